#!/usr/bin/env python3
"""Trains Medusa heads for a target, from prompts to a checkpoint with its card.

python scripts/train_medusa.py --prompts PROMPTS.jsonl --work FOLDER --output NEW_FOLDER
"""

import training_run

from specjax.training.recipes import train_medusa

OWN = {
    "num_heads": {"type": int, "default": 4, "help": "tokens ahead, a head for each"},
    "num_blocks": {"type": int, "default": 1, "help": "residual blocks of each head"},
}

if __name__ == "__main__":
    training_run.run(__doc__.splitlines()[0], train_medusa, "medusa", steps=600, learning_rate=1e-3, own=OWN)
