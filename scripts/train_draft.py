#!/usr/bin/env python3
"""Distils a draft model from a target, from prompts to a checkpoint with its card.

python scripts/train_draft.py --prompts PROMPTS.jsonl --work FOLDER --output NEW_FOLDER
"""

import argparse

import training_run

from specjax.models.shallow import keep_layers
from specjax.training.recipes import train_draft


def layer_list(text: str) -> list[int]:
    """Layer numbers, separated by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be layer numbers separated by commas, such as 0,29") from None


def check(model, arguments) -> None:
    """Raises ValueError if the target lacks one of the layers, or a start has layers already."""
    if arguments.layers is not None:
        keep_layers(model, arguments.layers)
        if arguments.start:
            raise ValueError(f"--layers {arguments.layers} beside --start {arguments.start}, which has layers; give one of them")


OWN = {
    "layers": {"type": layer_list, "help": "of the target, to start from, such as 0,29; by default its first and its last"},
    "depth": {"type": int, "default": 4, "help": "tokens in a row that the evaluation drafts"},
}

if __name__ == "__main__":
    training_run.run(__doc__.splitlines()[0], train_draft, "draft", steps=600, learning_rate=5e-4, own=OWN, check=check)
