#!/usr/bin/env python3
"""Trains an autoregressive head for a target, from prompts to a checkpoint with its card.

python scripts/train_eagle.py --prompts PROMPTS.jsonl --work FOLDER --output NEW_FOLDER
"""

import training_run

from specjax.checkpoints.heads import load_head
from specjax.training.recipes import train_eagle


def main():
    options = training_run.parser(__doc__.splitlines()[0], steps=400, learning_rate=1e-3)
    options.add_argument("--depth", type=int, default=3, help="steps of the unroll")
    options.add_argument("--first-steps", type=int, default=600, help="optimizer steps before, that guess one token only")
    arguments = options.parse_args()
    material, command = training_run.prepare(arguments)
    head, log = train_eagle(
        material,
        training_run.settings(arguments),
        depth=arguments.depth,
        first_steps=arguments.first_steps,
        loss=arguments.loss,
        start=load_head(arguments.start) if arguments.start else None,
        folder=f"{arguments.work}/eagle",
        mesh=training_run.mesh(),
        progress=training_run.say,
    )
    training_run.finish(head, log, arguments, command)


if __name__ == "__main__":
    main()
