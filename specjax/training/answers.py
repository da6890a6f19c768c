"""Texts to train on from nothing but prompts: the target's own answers.

A draft is to say what the target would say, so the target's answers are what it learns from, greedy and sampled ones in turn.
Answers are made in parts that are kept, so that an interrupted run goes on where it was.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from specjax.decoding.generate import generate
from specjax.models.loaded import Model
from specjax.sampling.params import SamplingParams
from specjax.training.texts import Texts


def write_answers(
    model: Model,
    prompts: Sequence[Sequence[int]],
    folder: str | Path,
    *,
    max_tokens: int = 150,
    temperature: float = 0.7,
    rows_at_once: int = 16,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Texts:
    """The target's answers to prompts, every second one greedy and the others sampled.

    Args:
      model: the target.
      prompts: token ids of each.
      folder: keeps the parts.
      max_tokens: of each answer.
      temperature: of the sampled ones.
      rows_at_once: prompts of one part, answered together.
      seed: of the first sampled answer; the others count on from it.
      progress: called with the prompts answered and all of them.

    Raises:
      ValueError: the folder holds the answers to other prompts.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Prompts of similar length together, so that little of a batch is padding.
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
    parts = []
    for start in range(0, len(order), rows_at_once):
        rows = order[start : start + rows_at_once]
        path = folder / f"answers-{start:07d}.npz"
        asked = [list(prompts[row]) for row in rows]
        if path.exists():
            part = Texts.load(path)
            if [part.prompt(index).tolist() for index in range(len(part))] != asked:
                raise ValueError(f"{path} holds the answers to other prompts; name another folder")
        else:
            settings = [
                SamplingParams(temperature=0 if row % 2 == 0 else temperature, max_tokens=max_tokens, seed=seed + row)
                for row in rows
            ]
            answers = [completion.token_ids for completion in generate(model, asked, settings)]
            part = Texts.of_rows(
                [prompt + answer for prompt, answer in zip(asked, answers, strict=True)], [len(prompt) for prompt in asked]
            )
            part.save(path)
        parts.append(part)
        progress(min(start + rows_at_once, len(order)), len(order))
    joined = Texts.join(parts)
    # Back in the order of the prompts.
    return joined.select(np.argsort(np.array(order), kind="stable"))
