"""Goes through every random outcome of code that draws through ``Choices``.

The code runs as it ships, in a batch of which every row follows a *script*: the outcomes of its first draws. Behind the end
of its script a row takes the first possible outcome, and every other possible one becomes a new script to be run later::

    script ()         draws   a  or b          takes a, adds the script (b)
                              c  or d or e     takes c, adds (a, d) and (a, e)       this row: probability P(a) P(c | a)

So every path of positive probability is run exactly once, whatever the code does with what it draws, and the
probabilities of all paths add up to 1.

The code is compiled as in production, loops and conditions included. Its draws call back to the host, where the scripts are:
``jax.experimental.io_callback`` keeps their order.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from specjax.choices import Stream

CHUNK = 512
"""Rows of a batch. One size, so that a step is compiled once."""


class ReusedKeyError(RuntimeError):
    """Two draws of one row were made with the same key: their outcomes would not be independent."""


def production_key(stream: Stream, node: int, committed: int) -> Hashable:
    """What ``KeyedChoices`` derives a key from, beside the row's seed and completion index."""
    return stream, node, committed


@dataclasses.dataclass(frozen=True)
class Batch:
    """Scripts that run together, and where they start.

    Attributes:
      scripts: for each of B rows the outcomes of its first draws.
      committed: [B] int, committed lengths.
      active: [B] bool; the other rows take any outcome and branch nowhere (padding, finished rows).
      used: for every row the keys that it drew with in earlier rounds.
      noise: [B, positions, V] shared Gumbel noise, which cannot be enumerated; None where nothing asks for it.
    """

    scripts: Sequence[tuple[int, ...]]
    committed: np.ndarray
    active: np.ndarray
    used: Sequence[frozenset]
    noise: np.ndarray | None = None


class EnumeratingChoices:
    """The :class:`specjax.choices.Choices` of a batch of scripts; the same object serves one compiled step for many batches.

    Attributes:
      probabilities: [B] float64, of the outcomes that each row of the batch has taken so far.
      drawn: for every row the keys of this step, each with the distribution and the outcome.
      alternatives: (row, outcomes) of every path that branches off a row of this batch.
    """

    def __init__(self, key: Callable[[Stream, int, int], Hashable] = production_key):
        """Choices whose draws are independent if what ``key`` makes of (stream, node, committed length) differs."""
        self._key = key

    def start(self, batch: Batch) -> None:
        """Forgets the last batch."""
        self._batch = batch
        rows = len(batch.scripts)
        self._taken: list[list[int]] = [[] for _ in range(rows)]
        self._error: Exception | None = None
        self.probabilities = np.ones(rows)
        self.drawn: list[dict[Hashable, tuple[bytes, int]]] = [{} for _ in range(rows)]
        self.alternatives: list[tuple[int, tuple[int, ...]]] = []

    def check(self) -> None:
        """Raises what went wrong in a draw: an exception cannot pass through compiled code."""
        if self._error is not None:
            raise self._error

    def bernoulli(self, stream, node, probability):
        """See :meth:`specjax.choices.Choices.bernoulli`."""

        def coins(node, probability):
            true = np.clip(np.nan_to_num(probability.astype(np.float64)), 0, 1).reshape(len(probability), -1)
            nodes = np.broadcast_to(node, probability.shape).reshape(true.shape)
            columns = zip(nodes.T, true.T, strict=True)
            coins = [self._draw(stream, nodes, np.stack([1 - true, true], axis=1)) == 1 for nodes, true in columns]
            return np.stack(coins, axis=1).reshape(probability.shape)

        return self._on_host(coins, probability.shape, bool, node, probability)

    def categorical(self, stream, node, log_probs):
        """See :meth:`specjax.choices.Choices.categorical`."""

        def tokens(node, log_probs):
            probabilities = np.exp(log_probs.astype(np.float64))
            wrong = self._batch.active & ~(np.abs(probabilities.sum(axis=1) - 1) < 1e-9)
            if wrong.any():
                row = int(np.argmax(wrong))
                raise ValueError(f"categorical: probabilities of row {row} are {probabilities[row]}; they must add up to 1")
            return self._draw(stream, np.broadcast_to(node, len(probabilities)), probabilities)

        return self._on_host(tokens, log_probs.shape[:1], jnp.int32, node, log_probs)

    def gumbel(self, offset, vocab_size, dtype):
        """See :meth:`specjax.choices.Choices.gumbel`."""

        def noise(offset):
            given = self._batch.noise
            if given is None or given.shape[-1] != vocab_size:
                raise ValueError(f"gumbel: noise for {vocab_size} tokens is asked for; this enumeration was given none")
            # Rows that are not active may ask for positions behind the end.
            position = np.minimum(self._batch.committed + offset, given.shape[1] - 1)
            return given[np.arange(len(position)), position]

        return self._on_host(noise, (len(self._batch.scripts), vocab_size), dtype, offset)

    def _on_host(self, function, shape, dtype, *arguments):
        """What ``function`` makes of concrete ``arguments``, an array of this shape and dtype."""
        dtype = np.dtype(dtype)
        arrays = [jnp.asarray(argument) for argument in arguments]
        dtypes = [array.dtype for array in arrays]
        result = jax.eval_shape(_to_words, jax.ShapeDtypeStruct(shape, dtype))

        def guarded(*words):
            try:
                concrete = [np.asarray(word) for word in words]
                concrete = [w.view(kind)[..., 0] if kind == np.float64 else w for w, kind in zip(concrete, dtypes, strict=True)]
                value = np.asarray(function(*concrete), dtype)
            except Exception as error:
                self._error = self._error or error
                value = np.zeros(shape, dtype)
            return value[..., None].view(np.uint32) if dtype == np.float64 else value

        words = io_callback(guarded, result, *map(_to_words, arrays), ordered=True)
        return jax.lax.bitcast_convert_type(words, dtype) if dtype == np.float64 else words

    def _draw(self, stream: Stream, nodes, probabilities) -> np.ndarray:
        """[B] outcomes of ``probabilities`` [B, outcomes]."""
        batch = self._batch
        outcomes = np.argmax(probabilities, axis=1)
        # A certain outcome needs no noise, and whether it is asked for may depend on the other rows: a loop over the batch goes
        # on while one of them does. It is no part of a script.
        uncertain = batch.active & (np.sum(probabilities > 0, axis=1) > 1)
        for row in np.flatnonzero(uncertain).tolist():
            key = self._key(stream, int(nodes[row]), int(batch.committed[row]))
            drawn, taken, script = self.drawn[row], self._taken[row], batch.scripts[row]
            distribution = probabilities[row].tobytes()
            if key in drawn and drawn[key][0] == distribution:
                # The same noise for the same distribution is the same outcome, with real keys as well: a loop over the
                # batch may repeat a draw for rows that have left it.
                outcomes[row] = drawn[key][1]
                continue
            if key in drawn or key in batch.used[row]:
                raise ReusedKeyError(f"row {row} draws from two distributions, or in two rounds, with the key {key}")
            if len(taken) < len(script):
                outcome = script[len(taken)]
            else:
                outcome, *others = np.flatnonzero(probabilities[row] > 0).tolist()
                self.alternatives.extend((row, (*taken, other)) for other in others)
            taken.append(outcome)
            drawn[key] = distribution, outcome
            self.probabilities[row] *= probabilities[row, outcome]
            outcomes[row] = outcome
        return outcomes


def _to_words(value: jax.Array) -> jax.Array:
    """float64 as pairs of 32-bit words: the thread of a callback may not know that 64 bits are enabled."""
    return jax.lax.bitcast_convert_type(value, jnp.uint32) if value.dtype == jnp.float64 else value


@dataclasses.dataclass(frozen=True)
class Branches:
    """What may have happened so far.

    Attributes:
      state: pytree of numpy arrays [R, ...], one row for every different state.
      origins: [R] int, the row of the start that each came from.
      probabilities: [R], given the origin.
      used: R sets of the keys drawn with.
    """

    state: Any
    origins: np.ndarray
    probabilities: np.ndarray
    used: tuple[frozenset, ...]

    @classmethod
    def start(cls, state: Any, num_rows: int) -> "Branches":
        """The first ``num_rows`` rows of ``state``, each certain."""
        state = jax.tree.map(lambda leaf: np.asarray(leaf)[:num_rows], state)
        return cls(state, np.arange(num_rows), np.ones(num_rows), (frozenset(),) * num_rows)

    def merged(self) -> "Branches":
        """Rows of equal state and origin as one: what comes next is the same for all of them.

        Equal means every bit, memory that is never to be read included: merging hides no mistake.
        """
        rows = len(self.origins)
        leaves = [leaf.reshape(rows, -1) for leaf in jax.tree.leaves(self.state) if leaf.size]
        groups: dict[tuple, list[int]] = {}
        for row in range(rows):
            groups.setdefault((int(self.origins[row]), *(leaf[row].tobytes() for leaf in leaves)), []).append(row)
        first = np.array([members[0] for members in groups.values()])
        return Branches(
            state=jax.tree.map(lambda leaf: leaf[first], self.state),
            origins=self.origins[first],
            probabilities=np.array([self.probabilities[members].sum() for members in groups.values()]),
            used=tuple(frozenset().union(*(self.used[row] for row in members)) for members in groups.values()),
        )


def branch_out(
    step: Callable[[Any], Any],
    choices: EnumeratingChoices,
    branches: Branches,
    committed: np.ndarray,
    active: np.ndarray,
    noise: np.ndarray | None = None,
) -> Branches:
    """All branches after one more step.

    Args:
      step: from the state of ``CHUNK`` rows to their new state, drawing through ``choices``; compiled or not.
      choices: what it draws through.
      branches: those before it, R rows.
      committed: [R] int, their committed lengths.
      active: [R] bool; rows that are not take the step without branching.
      noise: [origins, positions, V] shared Gumbel noise.

    Raises:
      ReusedKeyError: two draws of one branch, in this step or an earlier one, used the same key.
    """
    pending: list[tuple[int, tuple[int, ...]]] = [(row, ()) for row in range(len(branches.origins))]
    states, parents, probabilities = [], [], []
    used: list[frozenset] = []
    while pending:
        paths, pending = pending[-CHUNK:], pending[:-CHUNK]
        num_paths = len(paths)
        paths += paths[-1:] * (CHUNK - num_paths)
        rows = np.array([row for row, _ in paths])
        batch = Batch(
            scripts=[script for _, script in paths],
            committed=committed[rows],
            active=active[rows] & (np.arange(CHUNK) < num_paths),
            used=[branches.used[row] for row in rows],
            noise=None if noise is None else noise[branches.origins[rows]],
        )
        choices.start(batch)
        before = jax.tree.map(lambda leaf: leaf[rows], branches.state)  # noqa: B023
        after = jax.tree.map(lambda leaf: np.asarray(leaf)[:num_paths], step(before))  # noqa: B023
        # Draws that nothing needs may still be on their way.
        jax.effects_barrier()
        choices.check()
        states.append(after)
        parents.append(rows[:num_paths])
        probabilities.append(choices.probabilities[:num_paths])
        used.extend(batch.used[row] | choices.drawn[row].keys() for row in range(num_paths))
        pending.extend((int(rows[row]), script) for row, script in choices.alternatives)
    parent = np.concatenate(parents)
    return Branches(
        state=jax.tree.map(lambda *leaves: np.concatenate(leaves), *states),
        origins=branches.origins[parent],
        probabilities=branches.probabilities[parent] * np.concatenate(probabilities),
        used=tuple(used),
    ).merged()
