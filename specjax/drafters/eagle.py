"""An autoregressive head drafts a chain or a tree (Li et al. 2024, arXiv:2401.15077).

Its cache holds an entry for every committed token, the root included, made of the *target's* states: accepted tokens are fed
anew, since those that the head drafted were made of its own. They wait until a draft is asked for, or until there are many: who
drafts nothing for a while pays for few passes. A draft is a block behind the cache, fed level by level; see
:mod:`specjax.models.eagle_head`.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.cache import KVCache
from specjax.drafters.base import Context
from specjax.drafters.tree_drafting import Level, TreeDrafting, paths_at
from specjax.drafters.tree_growing import Grown, TreeGrowing
from specjax.models.eagle_head import EagleHead
from specjax.row_trees import TreeBounds
from specjax.tree import ROOT, DraftTree, Law

MOST_WAITING = 8
"""Tokens that may wait to be fed; a pass over so many costs little more than one over few."""


@flax.struct.dataclass
class EagleState:
    """What is carried from round to round.

    Attributes:
      cache: the head's; an entry for each of the first ``cache.lengths[b]`` committed tokens, all that were fed.
      root_state: [B, E], the head's state at the newest of them: the root, where none is waiting.
      num_waiting: [B] int32, committed tokens behind these that were observed and not fed yet.
      tokens: [B, W] int32, those.
      features: [B, W, F, E], the target's before each of them.
    """

    cache: KVCache
    root_state: jax.Array
    num_waiting: jax.Array
    tokens: jax.Array
    features: jax.Array


@dataclasses.dataclass(frozen=True)
class EagleDrafter:
    """The part of the drafter that follows the committed text.

    Attributes:
      head: the head's functions.
      feature_layers: layers of the target whose states the head reads.
    """

    head: EagleHead
    feature_layers: tuple[int, ...]

    @property
    def most_emitted(self) -> int:
        """Tokens that a round can emit."""
        raise NotImplementedError

    def init(self, params, batch, capacity):
        """See :meth:`specjax.drafters.Drafter.init`."""
        cache = self.head.init_cache(params["own"], batch, capacity)
        width, dtype = self.head.config.width, cache.keys[0].dtype
        waiting = batch, max(MOST_WAITING, self.most_emitted)
        return EagleState(
            cache=cache,
            root_state=jnp.zeros((batch, width), dtype),
            num_waiting=jnp.zeros((batch,), jnp.int32),
            tokens=jnp.zeros(waiting, jnp.int32),
            features=jnp.zeros((*waiting, len(self.feature_layers), width), dtype),
        )

    def observe(self, params, state, tokens, features, counts):
        """See :meth:`specjax.drafters.Drafter.observe`."""
        if tokens.shape[1] > self.most_emitted:
            # A chunk of a prompt, worth a pass of its own right now; nothing of its rows is waiting.
            return self._fed(params, state, tokens, features, counts)
        full = jnp.any(state.num_waiting + counts > state.tokens.shape[1])
        state = jax.lax.cond(full, lambda state: self.caught_up(params, state), lambda state: state, state)
        places = jnp.arange(tokens.shape[1])[None, :]
        # Out of range means "do not write": a scatter drops such entries.
        places = jnp.where(places < counts[:, None], state.num_waiting[:, None] + places, state.tokens.shape[1])
        rows = jnp.arange(tokens.shape[0])[:, None]
        return state.replace(
            num_waiting=state.num_waiting + counts,
            tokens=state.tokens.at[rows, places].set(tokens, mode="drop"),
            features=state.features.at[rows, places].set(features.astype(state.features.dtype), mode="drop"),
        )

    def caught_up(self, params, state: EagleState) -> EagleState:
        """The state with all that was waiting fed."""

        def feed(width):
            fed = self._fed(params, state, state.tokens[:, :width], state.features[:, :width], state.num_waiting)
            return fed.replace(num_waiting=jnp.zeros_like(state.num_waiting))

        few, all_places = self.most_emitted, state.tokens.shape[1]
        if few == all_places:
            return feed(few)
        return jax.lax.cond(jnp.any(state.num_waiting > few), lambda: feed(all_places), lambda: feed(few))

    def _fed(self, params, state: EagleState, tokens, features, counts) -> EagleState:
        """The state with the first ``counts`` [B] of ``tokens`` [B, C] fed, beside ``features`` [B, C, F, E]."""
        places = jnp.arange(tokens.shape[1])[None, :]
        positions = state.cache.lengths[:, None] + places
        states = self.head.joined(params["own"], features)
        states, block = self.head.apply(params["own"], params["shared"], tokens, states, positions, state.cache)
        # The pass has read the cache before it is written to: the compiler needs no copy of it.
        states, block, cache = jax.lax.optimization_barrier((states, block, state.cache))
        cache = cache.commit(block, jnp.broadcast_to(places, tokens.shape), counts)
        newest = jnp.take_along_axis(states, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
        return state.replace(cache=cache, root_state=jnp.where(counts[:, None] > 0, newest, state.root_state))

    def reset(self, state, rows):
        """See :meth:`specjax.drafters.Drafter.reset`."""
        return state.replace(
            cache=state.cache.roll_back(jnp.where(rows, 0, state.cache.lengths)),
            root_state=jnp.where(rows[:, None], 0, state.root_state),
            num_waiting=jnp.where(rows, 0, state.num_waiting),
        )

    def log_probs(self, params, states, context: Context, path_tokens, path_lengths) -> jax.Array:
        """[B, n, V] log q behind the head's ``states`` [B, n, E] at nodes with these paths."""
        logits = self.head.wide_logits(params["own"], params["shared"], states, context.logits_width)
        return context.distribution.log_probs(logits.astype(context.logits_dtype), path_tokens, path_lengths)

    def feed(self, params, state: EagleState, context: Context, tokens, states, depths, mask) -> jax.Array:
        """The head's states [B, n, E] at draft nodes ``tokens`` [B, n] of ``depths`` (n), beside ``states`` of their parents."""
        positions = context.lengths[:, None] - 1 + jnp.asarray(depths, jnp.int32)[None, :]
        return self.head.apply(params["own"], params["shared"], tokens, states, positions, state.cache, mask)[0]


@dataclasses.dataclass(frozen=True)
class Eagle(TreeDrafting, EagleDrafter):
    """Drafts chains and trees of a fixed shape; see :func:`specjax.drafters.eagle`.

    Attributes:
      tree: topology of every proposal.
      laws: a law for every draft node; None until a run fixes one.
    """

    tree: DraftTree
    laws: tuple[Law, ...] | None = None

    @property
    def most_emitted(self):
        """See :attr:`EagleDrafter.most_emitted`."""
        return self.tree.depth + 1

    def propose(self, params, state, context: Context, choices, num_draft):
        """See :meth:`specjax.drafters.Drafter.propose`."""
        asked = self.asked(num_draft)

        def draw(nothing):
            del nothing
            followed = self.caught_up(params, state)

            def log_probs_at(level: Level, states, tokens, context):
                if level.fed:
                    fed = np.array(level.fed)
                    parents, depths = np.array(self.tree.parents)[fed], np.array(self.tree.depths)[fed]
                    made = self.feed(
                        params, followed, context, tokens[:, fed - 1], states[:, parents], depths, jnp.asarray(level.mask)
                    )
                    states = states.at[:, fed].set(made)
                paths = paths_at(self.tree, level, tokens)
                return self.log_probs(params, states[:, np.array(level.inner)], context, *paths), states

            states = jnp.zeros((asked.shape[0], self.tree.size, self.head.config.width), state.root_state.dtype)
            states = states.at[:, ROOT].set(followed.root_state)
            return self.draw_tree(context, choices, asked, states, log_probs_at), followed

        nothing = self.nothing_drawn(context), state
        drawn, state = jax.lax.cond(jnp.any(asked), draw, lambda nothing: nothing, nothing)
        return self.draft(*drawn), state


@dataclasses.dataclass(frozen=True)
class GrowingEagle(TreeGrowing, EagleDrafter):
    """Drafts trees that it shapes while it drafts; see :func:`specjax.drafters.eagle`.

    Attributes:
      tree: bounds of every proposal.
      branching: k.
    """

    tree: TreeBounds
    branching: int

    @property
    def most_emitted(self):
        """See :attr:`EagleDrafter.most_emitted`."""
        return self.tree.depth + 1

    def propose(self, params, state, context: Context, choices, num_draft):
        """See :meth:`specjax.drafters.Drafter.propose`."""
        del choices

        def grow(nothing):
            del nothing
            followed = self.caught_up(params, state)

            def log_probs_at(grown: Grown, states, context):
                # Of the root and of all nodes so far.
                k = self.branching
                if grown.depth:
                    of_parents = jnp.take_along_axis(states, grown.parents[..., None] + 1, axis=1)
                    made = self.feed(params, followed, context, grown.tokens, of_parents, grown.depths, grown.mask)
                    states = jnp.concatenate([states[:, :1], made], axis=1)
                newest = states[:, -k:] if grown.depth else states
                lengths = jnp.full((newest.shape[1],), grown.depth, jnp.int32)
                return self.log_probs(params, newest, context, grown.path_tokens, lengths), states

            return self.grow_tree(context, followed.root_state[:, None], log_probs_at), followed

        nothing = self.nothing_grown(context), state
        grown, state = jax.lax.cond(jnp.any(num_draft > 0), grow, lambda nothing: nothing, nothing)
        draft = self.grown_draft(*grown)
        asked = jnp.arange(self.tree.num_nodes)[None, :] < num_draft[:, None]
        return draft.replace(valid=draft.valid & asked), state
