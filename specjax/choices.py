"""Where randomness comes from.

Rules and drafters draw only through a :class:`Choices` object. In production it is :class:`KeyedChoices`, which derives a
key per row; in a certificate it is an enumerator (``specjax.certificates``) that goes through every outcome, so that the
certificate runs the very code that ships.

Two kinds of keys, both a function of the row's own seed, never of its place in the batch:

* *Shared Gumbel noise* comes from (seed, completion index, position). One row of noise per position, also in trees, used
  by the drafter and by the rule: the emitted token at a position is then a function of target and seed alone.
* *Everything else* comes from (seed, completion index, committed length at the start of the round, stream, node). Block
  and traversal verification look at coins behind the accepted prefix; keyed by position alone, the next round would meet
  the same coins again and be biased.
"""

import enum
from typing import Protocol

import chex
import flax.struct
import jax
import jax.numpy as jnp


class Stream(enum.IntEnum):
    """Independent uses of randomness within a round. The numbers are part of every seeded result: never renumber."""

    SHARED_GUMBEL = 0
    """Noise of a position, for the ``coupled`` law and the ``gumbel`` rule."""
    DRAFT = 1
    """The drafter's own draws."""
    ACCEPT = 2
    """Coins of acceptance tests."""
    EMIT = 3
    """The correction or bonus token."""
    MATCH = 4
    """Target draws of the ``match`` rule."""


class Choices(Protocol):
    """Source of random outcomes for B rows."""

    def bernoulli(self, stream: Stream, node, probability: jax.Array) -> jax.Array:
        """Coins that are true with ``probability`` [B] (or [B, M], one coin per node); a probability of 0 never is.

        Args:
          stream: what the coins are for.
          node: which node they belong to: int, [B], or [M] / [B, M] for several.
          probability: [B] or [B, M]. NaN counts as 0.
        """
        ...

    def categorical(self, stream: Stream, node, log_probs: jax.Array) -> jax.Array:
        """[B] int32 tokens drawn from ``log_probs`` [B, V] (normalised), never one of probability 0.

        Args:
          stream: what the draw is for.
          node: int or [B].
          log_probs: [B, V].
        """
        ...

    def gumbel(self, offset, vocab_size: int, dtype) -> jax.Array:
        """[B, V] the shared Gumbel noise of position ``committed length + offset`` (int or [B])."""
        ...


@flax.struct.dataclass
class KeyedChoices:
    """Production randomness: a key per row from its own seed.

    Attributes:
      seeds: [B, 2] uint32, high and low word of each row's seed.
      completion: [B] int32, which of several completions of one request the row is.
      committed: [B] int32, committed length at the start of the round.

    Example:
      >>> choices = KeyedChoices.from_seeds([7, 7], committed=jnp.array([5, 5]))
      >>> coins = choices.bernoulli(Stream.ACCEPT, 0, jnp.array([0.5, 0.5]))
      >>> bool(coins[0] == coins[1])   # the same seed, the same coin, whatever the row
      True
    """

    seeds: jax.Array
    completion: jax.Array
    committed: jax.Array

    @classmethod
    def from_seeds(cls, seeds, committed, completion=None) -> "KeyedChoices":
        """Choices for Python integers ``seeds`` (0 <= seed < 2**64), one per row."""
        committed = jnp.asarray(committed, jnp.int32)
        words = jnp.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], jnp.uint32)
        chex.assert_shape(words, (*committed.shape, 2))
        if completion is None:
            completion = jnp.zeros_like(committed)
        return cls(words, jnp.asarray(completion, jnp.int32), committed)

    def _keys(self, stream: Stream, *data) -> jax.Array:
        """[B] keys; every element of ``data`` is [B]."""

        def row_key(words, *numbers):
            key = jax.random.wrap_key_data(words, impl="threefry2x32")
            for number in (jnp.uint32(int(stream)), *numbers):
                key = jax.random.fold_in(key, number)
            return key

        return jax.vmap(row_key)(self.seeds, self.completion, *data)

    def _round_keys(self, stream: Stream, node) -> jax.Array:
        return self._keys(stream, self.committed, jnp.broadcast_to(jnp.asarray(node, jnp.int32), self.committed.shape))

    def bernoulli(self, stream, node, probability):
        """See :meth:`Choices.bernoulli`."""
        if probability.ndim == 2:
            nodes = jnp.broadcast_to(jnp.asarray(node, jnp.int32), probability.shape)
            return jax.vmap(lambda n, p: self.bernoulli(stream, n, p), in_axes=1, out_axes=1)(nodes, probability)
        uniform = jax.vmap(lambda key: jax.random.uniform(key, dtype=probability.dtype))(self._round_keys(stream, node))
        # Strictly below: u lies in [0, 1), so probability 0 (or NaN) is never true and 1 always is.
        return uniform < probability

    def categorical(self, stream, node, log_probs):
        """See :meth:`Choices.categorical`."""
        noise = _gumbel(self._round_keys(stream, node), log_probs.shape[-1], log_probs.dtype)
        return jnp.argmax(log_probs + noise, axis=-1).astype(jnp.int32)

    def gumbel(self, offset, vocab_size, dtype):
        """See :meth:`Choices.gumbel`."""
        return _gumbel(self._keys(Stream.SHARED_GUMBEL, self.committed + offset), vocab_size, dtype)


def coupled_draw(choices: Choices, offset, log_probs: jax.Array) -> jax.Array:
    """[B] int32 tokens drawn from ``log_probs`` [B, V] with the shared noise of position ``committed length + offset``.

    Drafter and target both draw so: where their distributions are close, they draw the same token. One-hot rows (greedy
    requests) need no noise, and a batch of only such rows makes none.

    Example:
      >>> choices = KeyedChoices.from_seeds([7], committed=jnp.array([5]))
      >>> coupled_draw(choices, 0, jnp.array([[-jnp.inf, 0.0]])).tolist()
      [1]
    """

    def noisy(log_probs):
        return log_probs + choices.gumbel(offset, log_probs.shape[-1], log_probs.dtype)

    certain = jnp.all(jnp.max(log_probs, axis=-1) == 0)
    return jnp.argmax(jax.lax.cond(certain, lambda x: x, noisy, log_probs), axis=-1).astype(jnp.int32)


def _gumbel(keys: jax.Array, vocab_size: int, dtype) -> jax.Array:
    return jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), dtype))(keys)
