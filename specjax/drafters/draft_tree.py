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
from specjax.tree import DraftTree, Law


@dataclasses.dataclass(frozen=True)
class DraftTreeModel(TreeDrafting, ModelDrafter):
    """The drafter's functions; see :func:`specjax.drafters.draft_model`."""

    tree: DraftTree = dataclasses.field(default_factory=lambda: DraftTree.chain(1))
    laws: tuple[Law, ...] | None = None

    @property
    def steady_width(self) -> int:
        """See :class:`ModelDrafter`; accepted tokens were never in the cache."""
        return self.tree.depth + 1

    @property
    def most_emitted(self) -> int:
        """See :class:`ModelDrafter`."""
        return self.tree.depth + 1

    def propose(self, params, state, context: Context, choices, num_draft):
        """See :meth:`specjax.drafters.Drafter.propose`."""
        deep_enough = jnp.asarray(self.tree.depths[1:])[None, :] <= self.room(state, context)[:, None]
        asked = self.asked(num_draft) & deep_enough

        def draw(nothing):
            cache, root_hidden = self.feed_up_to_root(params, nothing[-1], context, jnp.any(asked, axis=1))

            def log_probs_at(level: Level, carried, tokens, context):
                hidden = self._outputs(params, context, cache, tokens, level) if level.fed else root_hidden
                return self.log_probs(params, hidden, context, *paths_at(self.tree, level, tokens)), carried

            return *self.draw_tree(context, choices, asked, (), log_probs_at), cache

        nothing = (*self.nothing_drawn(context), state.cache)
        *drawn, cache = jax.lax.cond(jnp.any(asked), draw, lambda nothing: nothing, nothing)
        return self.draft(*drawn), state.replace(cache=cache)

    def _outputs(self, params, context, cache, tokens, level: Level):
        """Hidden states [B, inner, E] at the level's nodes, which go through the model with their ancestors."""
        fed = np.array(level.fed)
        positions = context.lengths[:, None] - 1 + jnp.asarray(np.array(self.tree.depths)[fed], jnp.int32)[None, :]
        output = self.model.apply(params, tokens[:, fed - 1], positions, cache, jnp.asarray(level.mask))
        return output.hidden[:, level.inner_of_fed]
