"""A small model drafts a tree: at every inner node the children are drawn from its output there.

The model's cache holds committed tokens only. Level by level the nodes that have children go through the model with their
ancestors, as a block behind the cache with the tree's mask; a pass over a few more tokens costs little where a
pass is bound by reading the weights, and nothing has to be cut out of the cache afterwards::

    level 0   the committed text up to the root        children of the root are drawn
    level 1   1 2                                      children of 1 and 2
    level 2   1 2, and their children that go on       children of those
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters.base import Context
from specjax.drafters.model_drafter import ModelDrafter
from specjax.drafters.tree_drafting import Level, TreeDrafting, paths_at
from specjax.drafters.tree_growing import Grown, TreeGrowing
from specjax.row_trees import RowTrees, TreeBounds
from specjax.tree import DraftTree, Law


class UncommittedDrafts(ModelDrafter):
    """A model whose drafts never enter its cache."""

    tree: DraftTree | TreeBounds

    @property
    def steady_width(self) -> int:
        """See :class:`ModelDrafter`; accepted tokens were never in the cache."""
        return self.tree.depth + 1

    @property
    def most_emitted(self) -> int:
        """See :class:`ModelDrafter`."""
        return self.tree.depth + 1

    def feed_drafts(self, params, context, cache, tokens, depths, mask):
        """Hidden states [B, n, E] at draft nodes ``tokens`` [B, n] of ``depths`` (n), fed behind the cache."""
        positions = context.lengths[:, None] - 1 + jnp.asarray(depths, jnp.int32)[None, :]
        return self.model.apply(params, tokens, positions, cache, mask).hidden


@dataclasses.dataclass(frozen=True)
class DraftTreeModel(TreeDrafting, UncommittedDrafts):
    """Drafts trees of a fixed shape; see :func:`specjax.drafters.draft_model`.

    Attributes:
      tree: topology of every proposal.
      laws: a law for every draft node; None until a run fixes one.
    """

    tree: DraftTree = dataclasses.field(default_factory=lambda: DraftTree.chain(1))
    laws: tuple[Law, ...] | None = None

    def propose(self, params, state, context: Context, choices, num_draft):
        """See :meth:`specjax.drafters.Drafter.propose`."""
        deep_enough = jnp.asarray(self.tree.depths[1:])[None, :] <= self.room(state, context)[:, None]
        asked = self.asked(num_draft) & deep_enough

        def draw(nothing):
            cache, root_hidden = self.feed_up_to_root(params, nothing[-1], context, jnp.any(asked, axis=1))

            def log_probs_at(level: Level, carried, tokens, context):
                hidden = root_hidden
                if level.fed:
                    fed = np.array(level.fed)
                    depths = np.array(self.tree.depths)[fed]
                    hidden = self.feed_drafts(params, context, cache, tokens[:, fed - 1], depths, jnp.asarray(level.mask))
                    hidden = hidden[:, level.inner_of_fed]
                return self.log_probs(params, hidden, context, *paths_at(self.tree, level, tokens)), carried

            return *self.draw_tree(context, choices, asked, (), log_probs_at), cache

        nothing = (*self.nothing_drawn(context), state.cache)
        *drawn, cache = jax.lax.cond(jnp.any(asked), draw, lambda nothing: nothing, nothing)
        return self.draft(*drawn), state.replace(cache=cache)


@dataclasses.dataclass(frozen=True)
class GrowingDraftModel(TreeGrowing, UncommittedDrafts):
    """Drafts trees that it shapes while it drafts; see :func:`specjax.drafters.draft_model`.

    Attributes:
      tree: bounds of every proposal.
      branching: k.
    """

    tree: TreeBounds = dataclasses.field(default_factory=lambda: TreeBounds(1, 1))
    branching: int = 1

    def propose(self, params, state, context: Context, choices, num_draft):
        """See :meth:`specjax.drafters.Drafter.propose`."""
        del choices
        asked = jnp.arange(self.tree.num_nodes)[None, :] < num_draft[:, None]
        drafting = jnp.any(asked, axis=1) & (self.room(state, context) > 0)

        def grow(nothing):
            cache, root_hidden = self.feed_up_to_root(params, nothing[-1], context, drafting)

            def log_probs_at(grown: Grown, carried, context):
                hidden = root_hidden
                if grown.depth:
                    fed = self.feed_drafts(params, context, cache, grown.tokens, grown.depths, grown.mask)
                    hidden = fed[:, -self.branching :]
                lengths = jnp.full((hidden.shape[1],), grown.depth, jnp.int32)
                return self.log_probs(params, hidden, context, grown.path_tokens, lengths), carried

            return *self.grow_tree(context, (), log_probs_at), cache

        nothing = (*self.nothing_grown(context), state.cache)
        *grown, cache = jax.lax.cond(jnp.any(drafting), grow, lambda nothing: nothing, nothing)
        draft = self.grown_draft(*grown)
        assert isinstance(draft.tree, RowTrees)
        deep_enough = draft.tree.depths[:, 1:] <= self.room(state, context)[:, None]
        return draft.replace(valid=draft.valid & asked & deep_enough & drafting[:, None]), state.replace(cache=cache)
