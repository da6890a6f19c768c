"""A small model of the same tokenizer drafts a chain (Leviathan et al. 2023, arXiv:2211.17192).

Its cache between rounds, with n committed tokens and K drafts (the newest draft token is drawn but not fed)::

    before the round     n - 1 entries, or n - 2 after a round that accepted all K drafts
    propose              feeds what is missing up to the root (1 or 2 tokens), then K - 1 drafts: n + K - 1 entries
    observe, a accepted  n + a + 1 tokens are committed; entries of rejected drafts are cut: min(n + a, n + K - 1)

A row that drafted nothing for some rounds simply lacks more entries and catches up in wider passes.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from specjax.cache import KVCache
from specjax.choices import Stream, coupled_draw
from specjax.drafters.base import BoundDrafter, Context, check_num_speculative_tokens
from specjax.models.base import ModelFunctions
from specjax.models.loaded import Model
from specjax.tree import ROOT, Draft, DraftTree, Law

STEADY_WIDTH = 2
"""Tokens that a round feeds before it drafts: the root, and the last draft token after full acceptance."""

CATCH_UP_WIDTH = 32
"""Tokens per pass for rows that lack more than that."""


@flax.struct.dataclass
class DraftModelState:
    """What a draft model carries from round to round.

    Attributes:
      cache: the draft model's own cache; the entries of row b are those of its first ``cache.lengths[b]`` committed tokens.
      observed: [B] int32, committed tokens that ``observe`` has seen.
    """

    cache: KVCache
    observed: jax.Array


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """The drafter's functions; see :func:`draft_model`."""

    model: ModelFunctions
    num_speculative_tokens: int
    vocab_size: int
    max_positions: int
    law: Law = Law.INDEPENDENT
    law_choices = (Law.INDEPENDENT, Law.COUPLED, Law.DETERMINISTIC)

    @property
    def tree(self) -> DraftTree:
        """A chain."""
        return DraftTree.chain(self.num_speculative_tokens)

    def with_law(self, law):
        """See :meth:`specjax.drafters.Drafter.with_law`."""
        if law not in self.law_choices:
            known = [choice.value for choice in self.law_choices]
            raise ValueError(f"draft_model: law is {law.value!r}; a chain is drawn by one of {known}")
        return dataclasses.replace(self, law=law)

    def init(self, params, batch, capacity):
        """See :meth:`specjax.drafters.Drafter.init`; the cache never exceeds the positions that the model was made for."""
        cache = self.model.init_cache(params, batch, min(capacity, self.max_positions))
        return DraftModelState(cache, jnp.zeros((batch,), jnp.int32))

    def reset(self, state, rows):
        """See :meth:`specjax.drafters.Drafter.reset`."""
        return DraftModelState(
            cache=state.cache.roll_back(jnp.where(rows, 0, state.cache.lengths)),
            observed=jnp.where(rows, 0, state.observed),
        )

    def observe(self, params, state, tokens, features, counts):
        """See :meth:`specjax.drafters.Drafter.observe`."""
        del features
        num_tokens = tokens.shape[1]
        # Of the newly committed tokens all but the last were drafts; the entries of other drafts are cut.
        cache = state.cache.roll_back(state.observed + jnp.maximum(counts - 1, 0))
        if num_tokens > self.num_speculative_tokens + 1:
            # More than a round can emit: a chunk of a prompt, worth a pass of its own right now.
            follows = (cache.lengths == state.observed) & (cache.lengths + counts <= cache.capacity)
            cache, _ = self._feed(params, cache, tokens, jnp.where(follows, counts, 0))
        return DraftModelState(cache, state.observed + counts)

    def _feed(self, params, cache, tokens, counts):
        """Feeds the first ``counts`` [B] of ``tokens`` [B, C] behind the cache; returns it and the hidden states."""
        places = jnp.arange(tokens.shape[1])[None, :]
        positions = cache.lengths[:, None] + places
        output = self.model.apply(params, tokens, positions, cache, None)
        nodes = jnp.broadcast_to(places, tokens.shape)
        # The pass has read the cache before it is written to: the compiler needs no copy of it.
        output, cache = jax.lax.optimization_barrier((output, cache))
        return cache.commit(output.block, nodes, counts), output.hidden

    def _feed_history(self, params, cache, context, width, counts):
        places = cache.lengths[:, None] + jnp.arange(width)[None, :]
        tokens = jnp.take_along_axis(context.tokens, jnp.minimum(places, context.tokens.shape[1] - 1), axis=1)
        return self._feed(params, cache, tokens, counts)

    def propose(self, params, state, context: Context, choices, num_draft):
        """See :meth:`specjax.drafters.Drafter.propose`."""
        batch = num_draft.shape[0]
        # The last draft is drawn at position lengths - 1 + num_draft - 1 of the draft model.
        room = jnp.minimum(state.cache.capacity, self.max_positions) - context.lengths + 1
        num_draft = jnp.clip(jnp.minimum(num_draft, room), 0, self.num_speculative_tokens)
        if self.num_speculative_tokens == 0:
            return Draft.empty(batch), state
        nothing = (
            jnp.zeros((batch, self.num_speculative_tokens), jnp.int32),
            jnp.zeros((batch, self.num_speculative_tokens, context.logits_width), context.logits_dtype),
            state.cache,
        )
        tokens, log_probs, cache = jax.lax.cond(
            jnp.any(num_draft > 0),
            lambda nothing: self._draft(params, context, choices, num_draft, *nothing),
            lambda nothing: nothing,
            nothing,
        )
        draft = Draft(
            tokens=tokens,
            valid=jnp.arange(self.num_speculative_tokens)[None, :] < num_draft[:, None],
            parent_log_probs=log_probs,
            tree=self.tree,
            laws=(self.law,) * self.num_speculative_tokens,
        )
        return draft, state.replace(cache=cache)

    def _draft(self, params, context, choices, num_draft, tokens, log_probs, cache):
        drafting = num_draft > 0
        cache = cache.roll_back(context.lengths - 1)

        def lacking(cache):
            return jnp.where(drafting, context.lengths - cache.lengths, 0)

        def catch_up(cache):
            counts = jnp.where(lacking(cache) > STEADY_WIDTH, jnp.minimum(lacking(cache) - 1, CATCH_UP_WIDTH), 0)
            return self._feed_history(params, cache, context, CATCH_UP_WIDTH, counts)[0]

        cache = jax.lax.while_loop(lambda cache: jnp.any(lacking(cache) > STEADY_WIDTH), catch_up, cache)
        counts = lacking(cache)
        cache, hidden = self._feed_history(params, cache, context, STEADY_WIDTH, counts)
        hidden = jnp.take_along_axis(hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)

        def draw(index, hidden, tokens, log_probs):
            row_log_probs = self._log_probs(params, hidden, context, tokens, index)
            token = self._draw(choices, index, row_log_probs)
            return tokens.at[:, index].set(token), log_probs.at[:, index].set(row_log_probs)

        def feed_and_draw(carry):
            index, cache, tokens, log_probs = carry
            newest = jax.lax.dynamic_slice_in_dim(tokens, index - 1, 1, axis=1)
            cache, hidden = self._feed(params, cache, newest, (index < num_draft).astype(jnp.int32))
            return index + 1, cache, *draw(index, hidden, tokens, log_probs)

        # The last draft token is not fed: its own continuation is the bonus token, which the target draws.
        tokens, log_probs = draw(0, hidden, tokens, log_probs)
        longest = jnp.max(num_draft)
        _, cache, tokens, log_probs = jax.lax.while_loop(
            lambda carry: carry[0] < longest, feed_and_draw, (jnp.int32(1), cache, tokens, log_probs)
        )
        return tokens, log_probs, cache

    def _log_probs(self, params, hidden, context, tokens, index):
        """[B, V] log q behind the first ``index`` of the drafted ``tokens`` [B, K], at the target's width.

        Ids that only one of the two vocabularies has get probability 0.
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
        return common.log_probs(logits.astype(context.logits_dtype), tokens[:, None], jnp.reshape(index, (1,)))[:, 0]

    def _draw(self, choices, index, log_probs):
        """[B] the token of draft node ``index + 1``."""
        if self.law is Law.COUPLED:
            return coupled_draw(choices, index, log_probs)
        if self.law is Law.DETERMINISTIC:
            return jnp.argmax(log_probs, axis=-1).astype(jnp.int32)
        return choices.categorical(Stream.DRAFT, ROOT + 1 + index, log_probs)


def draft_model(model: Model, num_speculative_tokens: int = 4) -> BoundDrafter:
    """A drafter that runs a small model with the target's tokenizer.

    The draft model's distribution goes through the request's own settings (penalties, filters and all the others, the draft
    tokens so far included), which raises acceptance; q is what came out of them, so the rules stay exact.

    Args:
      model: any loaded model; its tokenizer is compared with the target's when a run starts.
      num_speculative_tokens: K, draft tokens per round, 0 to 32.

    Raises:
      ValueError: ``num_speculative_tokens`` is out of range.
    """
    check_num_speculative_tokens(num_speculative_tokens)
    functions = DraftModel(model.functions, num_speculative_tokens, model.vocab_size, model.max_positions)
    return BoundDrafter(functions, model.params, name=f"draft_model({model.name})", model=model)
