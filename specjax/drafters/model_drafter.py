"""What all drafters that run a model of their own share: its cache, and how it catches up with the committed text.

The cache between rounds holds committed tokens, and behind a proposal perhaps drafts; ``observe`` cuts what was not accepted. A
row that drafted nothing for some rounds simply lacks more entries and catches up in wider passes.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specjax.cache import KVCache
from specjax.drafters.base import Context
from specjax.models.base import ModelFunctions

CATCH_UP_WIDTH = 32
"""Tokens per pass for rows that lack more than a round's worth."""


@flax.struct.dataclass
class ModelDrafterState:
    """What a drafter's model carries from round to round.

    Attributes:
      cache: the model's own cache; the entries of row b are those of its first ``cache.lengths[b]`` committed tokens.
      observed: [B] int32, committed tokens that ``observe`` has seen.
    """

    cache: KVCache
    observed: jax.Array


@dataclasses.dataclass(frozen=True)
class ModelDrafter:
    """The part of a drafter that feeds a model.

    Attributes:
      model: its functions.
      vocab_size: ids that it knows are below this.
      max_positions: positions that it was made for.
      split: whether the devices of a mesh that share the target share the model too; else each has the whole of it.
    """

    model: ModelFunctions
    vocab_size: int
    max_positions: int
    split: bool = False

    @property
    def steady_width(self) -> int:
        """Tokens that a row lacks at most from one round to the next."""
        raise NotImplementedError

    @property
    def most_emitted(self) -> int:
        """Tokens that a round can emit."""
        raise NotImplementedError

    def init(self, params, batch, capacity):
        """See :meth:`specjax.drafters.Drafter.init`; the cache never exceeds the positions that the model was made for."""
        cache = self.model.init_cache(params, batch, min(capacity, self.max_positions))
        return ModelDrafterState(cache, jnp.zeros((batch,), jnp.int32))

    def reset(self, state, rows):
        """See :meth:`specjax.drafters.Drafter.reset`."""
        return ModelDrafterState(
            cache=state.cache.roll_back(jnp.where(rows, 0, state.cache.lengths)),
            observed=jnp.where(rows, 0, state.observed),
        )

    def observe(self, params, state, tokens, features, counts):
        """See :meth:`specjax.drafters.Drafter.observe`."""
        del features
        # Of the newly committed tokens all but the last were drafts; the entries of other drafts are cut.
        cache = state.cache.roll_back(state.observed + jnp.maximum(counts - 1, 0))
        if tokens.shape[1] > self.most_emitted:
            # A chunk of a prompt, worth a pass of its own right now.
            follows = (cache.lengths == state.observed) & (cache.lengths + counts <= cache.capacity)
            cache, _ = self.feed(params, cache, tokens, jnp.where(follows, counts, 0))
        return ModelDrafterState(cache, state.observed + counts)

    def feed(self, params, cache: KVCache, tokens, counts) -> tuple[KVCache, jax.Array]:
        """Feeds the first ``counts`` [B] of ``tokens`` [B, C] behind the cache; returns it and the hidden states [B, C, E]."""
        places = jnp.arange(tokens.shape[1])[None, :]
        positions = cache.lengths[:, None] + places
        output = self.model.apply(params, tokens, positions, cache, None)
        nodes = jnp.broadcast_to(places, tokens.shape)
        # The pass has read the cache before it is written to: the compiler needs no copy of it.
        output, cache = jax.lax.optimization_barrier((output, cache))
        return cache.commit(output.block, nodes, counts), output.hidden

    def feed_up_to_root(self, params, cache: KVCache, context: Context, drafting) -> tuple[KVCache, jax.Array]:
        """Feeds what the rows ``drafting`` [B] lack of the committed text; returns the cache and the root's hidden [B, 1, E]."""
        cache = cache.roll_back(context.lengths - 1)

        def lacking(cache):
            return jnp.where(drafting, context.lengths - cache.lengths, 0)

        def catch_up(cache):
            width = jnp.minimum(lacking(cache) - 1, CATCH_UP_WIDTH)
            counts = jnp.where(lacking(cache) > self.steady_width, width, 0)
            return self._feed_history(params, cache, context, CATCH_UP_WIDTH, counts)[0]

        with jax.named_scope("catch_up"):
            cache = jax.lax.while_loop(lambda cache: jnp.any(lacking(cache) > self.steady_width), catch_up, cache)
        counts = lacking(cache)
        cache, hidden = self._feed_history(params, cache, context, self.steady_width, counts)
        return cache, jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)

    def _feed_history(self, params, cache, context, width, counts):
        places = cache.lengths[:, None] + jnp.arange(width)[None, :]
        tokens = jnp.take_along_axis(context.tokens, jnp.minimum(places, context.tokens.shape[1] - 1), axis=1)
        return self.feed(params, cache, tokens, counts)

    def room(self, state: ModelDrafterState, context: Context) -> jax.Array:
        """[B] how deep a draft may be: its last token is drawn at position lengths - 1 + depth - 1 of the model."""
        return jnp.minimum(state.cache.capacity, self.max_positions) - context.lengths + 1

    def log_probs(self, params: Any, hidden: jax.Array, context: Context, path_tokens, path_lengths) -> jax.Array:
        """[B, T, V] log q at nodes with these paths, at the target's width.

        Ids that only one of the two vocabularies has get probability 0.

        Args:
          params: the drafter's.
          hidden: [B, T, E].
          context: of the round.
          path_tokens: [B, T, D] int32, the draft tokens that lead to each node, its own included.
          path_lengths: [T] int32, how many there are.
        """
        logits = self.model.unembed(params, hidden)
        width = logits.shape[-1]
        if width > context.logits_width:
            logits = logits[..., : context.logits_width]
        elif width < context.logits_width:
            padding = context.logits_width - width
            logits = jnp.pad(logits, ((0, 0), (0, 0), (0, padding)), constant_values=-jnp.inf)
        # In the dtype it is stored in, so that the token is drawn from the very numbers that the rule will see.
        common = context.distribution.replace(vocab_size=min(self.vocab_size, context.vocab_size))
        return common.log_probs(logits.astype(context.logits_dtype), path_tokens, path_lengths)
