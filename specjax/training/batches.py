"""Batches of texts with the target's states, in an order that depends on the seed and the epoch alone.

A run that goes on from a checkpoint therefore meets the very batches that it would have met.
"""

import dataclasses
from collections.abc import Iterator

import flax.struct
import jax
import numpy as np

from specjax.numeric import for_jit
from specjax.training.states import StateStore, batches_by_length, padded_rows
from specjax.training.texts import Texts


@flax.struct.dataclass
class TrainingBatch:
    """Some texts with what the target made of them.

    Attributes:
      tokens: [B, T] int32.
      features: [B, T, F, E] float16, the target's states at every token; the last layer is the final hidden state.
      weights: [B, T] float32, how much each token counts as something to predict; 0 behind the text's end.
    """

    tokens: jax.Array
    features: jax.Array
    weights: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """Texts with stored states, cut into batches.

    Attributes:
      texts: the texts.
      states: their states.
      tokens_per_batch: tokens of one batch, padding included.
      prompt_weight: weight of a prompt's tokens, 0 to 1; answers, which drafts are made for, have 1.
      rows_multiple: the number of rows of a batch is a multiple of this (devices of a mesh).

    Raises:
      ValueError: names the argument, its value and the range.
    """

    texts: Texts
    states: StateStore
    tokens_per_batch: int = 2048
    prompt_weight: float = 0.5
    rows_multiple: int = 1

    def __post_init__(self):
        if self.states.features.shape[0] != self.texts.num_tokens:
            raise ValueError(
                f"Batches: states are of {self.states.features.shape[0]} tokens, the texts have {self.texts.num_tokens}"
            )
        if not 0 <= self.prompt_weight <= 1:
            raise ValueError(f"Batches: prompt_weight is {self.prompt_weight!r}; it must be from 0 to 1")
        if self.tokens_per_batch < 64:
            raise ValueError(f"Batches: tokens_per_batch is {self.tokens_per_batch!r}; it must be at least 64")

    def plan(self, seed: int | None) -> list[tuple[np.ndarray, int]]:
        """Rows and padded length of every batch of an epoch; in order of length where ``seed`` is None."""
        if seed is None:
            return list(batches_by_length(self.texts.lengths, self.tokens_per_batch))
        random = np.random.default_rng(seed)
        order = random.permutation(len(self.texts))
        plan = [(order[rows], size) for rows, size in batches_by_length(self.texts.lengths[order], self.tokens_per_batch)]
        return [plan[index] for index in random.permutation(len(plan))]

    def batch(self, rows: np.ndarray, size: int) -> TrainingBatch:
        """One batch of :meth:`plan`."""
        num_rows = -(-max(1, self.tokens_per_batch // size) // self.rows_multiple) * self.rows_multiple
        tokens, lengths = padded_rows(self.texts, rows, num_rows, size)
        features = np.zeros((num_rows, size, *self.states.features.shape[1:]), self.states.features.dtype)
        weights = np.zeros((num_rows, size), np.float32)
        for place, row in enumerate(rows):
            start, length = self.texts.offsets[row], lengths[place]
            features[place, :length] = self.states.features[start : start + length]
            weights[place, : self.texts.prompt_lengths[row]] = self.prompt_weight
            weights[place, self.texts.prompt_lengths[row] : length] = 1
        return TrainingBatch(for_jit(tokens), for_jit(features), for_jit(weights))

    def epoch(self, seed: int | None) -> Iterator[TrainingBatch]:
        """All batches of an epoch."""
        for rows, size in self.plan(seed):
            yield self.batch(rows, size)

    def from_step(self, step: int, seed: int) -> Iterator[TrainingBatch]:
        """Batches without end, beginning with the one that step number ``step`` of a run takes."""
        epoch = 0
        while True:
            plan = self.plan(hash_seed(seed, epoch))
            for rows, size in plan[step:]:
                yield self.batch(rows, size)
            step = max(0, step - len(plan))
            epoch += 1


def hash_seed(seed: int, epoch: int) -> int:
    """A seed for each epoch of a run."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])
