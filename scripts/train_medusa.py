#!/usr/bin/env python3
"""Trains Medusa heads for a target, from prompts to a checkpoint with its card.

python scripts/train_medusa.py --prompts PROMPTS.jsonl --work FOLDER --output NEW_FOLDER
"""

import training_run

from specjax.checkpoints.heads import load_head
from specjax.training.recipes import train_medusa


def main():
    options = training_run.parser(__doc__.splitlines()[0], steps=600, learning_rate=1e-3)
    options.add_argument("--num-heads", type=int, default=4)
    options.add_argument("--num-blocks", type=int, default=1, help="residual blocks of each head")
    arguments = options.parse_args()
    material, command = training_run.prepare(arguments)
    head, log = train_medusa(
        material,
        training_run.settings(arguments),
        num_heads=arguments.num_heads,
        num_blocks=arguments.num_blocks,
        loss=arguments.loss,
        start=load_head(arguments.start) if arguments.start else None,
        folder=f"{arguments.work}/medusa",
        mesh=training_run.mesh(),
        progress=training_run.say,
    )
    training_run.finish(head, log, arguments, command)


if __name__ == "__main__":
    main()
