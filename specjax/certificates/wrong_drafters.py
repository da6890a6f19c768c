"""Drafters that state another q than they draw from, or look at what they drew; and targets that see the wrong tokens."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from specjax.cache import KVCache
from specjax.certificates.tiny import TableDrafter, TableModel, table_model, widened
from specjax.drafters.draw import draw_children
from specjax.drafters.stacked import Stacked
from specjax.tree import Law, count_valid_prefix


class ArgmaxAsDrawn(TableDrafter):
    """Proposes the most likely token and states that it was drawn."""

    def _children(self, params, context, choices, nodes, log_probs):
        return *draw_children(choices, [Law.DETERMINISTIC] * len(nodes), nodes, log_probs, None), log_probs


class DistinctAsIndependent(TableDrafter):
    """Draws siblings without replacement and states that they are independent."""

    def _children(self, params, context, choices, nodes, log_probs):
        return *draw_children(choices, [Law.WITHOUT_REPLACEMENT] * len(nodes), nodes, log_probs, None), log_probs


def _without_the_least_likely(log_probs):
    least = jnp.min(log_probs, axis=-1, keepdims=True)
    # Rows that draw nothing have a certain token, and lose nothing.
    return jnp.where((log_probs == least) & jnp.isfinite(least), -jnp.inf, log_probs)


class FilteredRecord(TableDrafter):
    """Draws from the whole q and stores a filtered one."""

    def _children(self, params, context, choices, nodes, log_probs):
        tokens, possible, _ = super()._children(params, context, choices, nodes, log_probs)
        return tokens, possible, jax.nn.log_softmax(_without_the_least_likely(log_probs), axis=-1)


class UnnormalisedRecord(TableDrafter):
    """Draws from a filtered q and stores it as it was before it was made to add up to 1."""

    def _children(self, params, context, choices, nodes, log_probs):
        kept = _without_the_least_likely(log_probs)
        return *super()._children(params, context, choices, nodes, jax.nn.log_softmax(kept, axis=-1))[:2], kept


class OffsetsAsIds(TableDrafter):
    """Takes the offsets of a reduced vocabulary for ids where it proposes a token, and reads them well where it stores q."""

    def _children(self, params, context, choices, nodes, log_probs):
        laws = [self.fixed_laws[node - 1] for node in nodes]
        drawn, possible = draw_children(choices, laws, nodes, log_probs, None)
        of_target = jnp.arange(log_probs.shape[1]) + params["offsets"]
        return params["offsets"][drawn], possible, widened(log_probs, of_target, context.logits_width)


class WrongLevel(TableDrafter):
    """Stores at every inner node the q of another."""

    def propose(self, params, state, context, choices, num_draft):
        """See :meth:`specjax.drafters.Drafter.propose`."""
        draft, state = super().propose(params, state, context, choices, num_draft)
        return draft.replace(parent_log_probs=draft.parent_log_probs[:, ::-1]), state


class DropsUnlikely(TableDrafter):
    """Draws a token, and proposes it only if it came out likely."""

    def propose(self, params, state, context, choices, num_draft):
        """See :meth:`specjax.drafters.Drafter.propose`."""
        draft, state = super().propose(params, state, context, choices, num_draft)
        log_q = jnp.take_along_axis(draft.parent_log_probs, draft.tokens[..., None], axis=-1)[..., 0]
        return draft.replace(valid=draft.valid & (log_q > jnp.log(0.4))).checked(), state


class SchedulesInRetrospect(TableDrafter):
    """Cuts the draft where it is least sure, once it is whole: whether a token is verified depends on what it is."""

    def propose(self, params, state, context, choices, num_draft):
        """See :meth:`specjax.drafters.Drafter.propose`."""
        draft, state = super().propose(params, state, context, choices, num_draft)
        # How sure it is behind a token is known once the token is.
        sure = jnp.max(draft.parent_log_probs, axis=-1) > jnp.log(0.6)
        kept = count_valid_prefix(draft.valid & jnp.pad(sure[:, 1:], ((0, 0), (0, 1)), constant_values=True))
        return draft.replace(valid=draft.valid & (jnp.arange(draft.tree.num_nodes)[None, :] < kept[:, None])), state


class SoftWhereFound(Stacked):
    """A stack that hands on the second drafter's q also for what the first one found."""

    def propose(self, params, state, context, choices, num_draft):
        """See :meth:`specjax.drafters.Drafter.propose`."""
        draft, after = super().propose(params, state, context, choices, num_draft)
        drawn, _ = self.then.propose(params[1], state.then, context, choices, num_draft)
        return draft.replace(parent_log_probs=drawn.parent_log_probs), after


class SeesSiblings(TableModel):
    """A target that takes a tree for a chain."""

    def apply(self, params, tokens, positions, cache, block_mask):
        """See :meth:`specjax.models.base.ModelFunctions.apply`."""
        del block_mask
        return super().apply(params, tokens, positions, cache, None)


class CountsNodes(TableModel):
    """A target that takes a node's number for its depth."""

    def apply(self, params, tokens, positions, cache, block_mask):
        """See :meth:`specjax.models.base.ModelFunctions.apply`."""
        return super().apply(params, tokens, positions[:, :1] + jnp.arange(tokens.shape[1])[None, :], cache, block_mask)


class SharesMask(TableModel):
    """A target that masks the trees of all rows like the first row's."""

    def apply(self, params, tokens, positions, cache, block_mask):
        """See :meth:`specjax.models.base.ModelFunctions.apply`."""
        shared = block_mask if block_mask is None or block_mask.ndim == 2 else block_mask[0]
        return super().apply(params, tokens, positions, cache, shared)


@flax.struct.dataclass
class LosingCache(KVCache):
    """A cache that forgets the last of several accepted tokens."""

    def commit(self, block, nodes, counts):
        """See :meth:`specjax.cache.KVCache.commit`."""
        kept = super().commit(block, nodes, counts - (counts > 1))
        return LosingCache(kept.keys, kept.values, kept.lengths)


class Forgets(TableModel):
    """A target with that cache."""

    def init_cache(self, params, batch, capacity):
        """See :meth:`specjax.models.base.ModelFunctions.init_cache`."""
        return LosingCache(*vars(super().init_cache(params, batch, capacity)).values())


def wrong_target(kind, vocab_size: int = 3, seed: int = 0):
    """The tiny target with functions of another ``kind``."""
    return dataclasses.replace(table_model(vocab_size, seed), functions=kind(vocab_size))
