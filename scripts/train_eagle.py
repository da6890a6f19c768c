#!/usr/bin/env python3
"""Trains an autoregressive head for a target, from prompts to a checkpoint with its card.

python scripts/train_eagle.py --prompts PROMPTS.jsonl --work FOLDER --output NEW_FOLDER
"""

import training_run

from specjax.training.recipes import train_eagle

OWN = {
    "depth": {"type": int, "default": 3, "help": "steps of the unroll"},
    "first_steps": {"type": int, "default": 600, "help": "optimizer steps before, that guess one token only"},
}

if __name__ == "__main__":
    training_run.run(__doc__.splitlines()[0], train_eagle, "eagle", steps=400, learning_rate=1e-3, own=OWN)
