"""Medusa heads draft a tree from one state of the target (Cai et al. 2024, arXiv:2401.10774).

What the heads say is known before anything is drawn: all nodes of one depth share the output of one head, and a round costs no
more than one product with each head's matrices. See :mod:`specjax.models.medusa_heads` for which state and which place.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from specjax.drafters.base import Context
from specjax.drafters.tree_drafting import Level, TreeDrafting, paths_at
from specjax.models.medusa_heads import MedusaHeads
from specjax.tree import DraftTree, Law


@flax.struct.dataclass
class MedusaState:
    """What is carried from round to round.

    Attributes:
      hidden: [B, E], the target's final hidden state of the root's predecessor; zeros where the root is the first token.
    """

    hidden: jax.Array


@dataclasses.dataclass(frozen=True)
class Medusa(TreeDrafting):
    """The drafter's functions; see :func:`specjax.drafters.medusa`.

    Attributes:
      heads: the heads' functions.
      feature_layers: of the target: its final hidden state.
      tree: topology of every proposal, no deeper than there are heads.
      laws: a law for every draft node; None until a run fixes one.
    """

    heads: MedusaHeads
    feature_layers: tuple[int, ...]
    tree: DraftTree
    laws: tuple[Law, ...] | None = None

    def init(self, params, batch, capacity):
        """See :meth:`specjax.drafters.Drafter.init`."""
        del capacity
        dtype = jax.tree.leaves(params["own"])[0].dtype
        return MedusaState(jnp.zeros((batch, self.heads.config.width), dtype))

    def observe(self, params, state, tokens, features, counts):
        """See :meth:`specjax.drafters.Drafter.observe`; the newest token's predecessor is what counts."""
        del params
        newest = jnp.take_along_axis(features[:, :, -1], jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
        return MedusaState(jnp.where(counts[:, None] > 0, newest.astype(state.hidden.dtype), state.hidden))

    def propose(self, params, state, context: Context, choices, num_draft):
        """See :meth:`specjax.drafters.Drafter.propose`."""
        asked = self.asked(num_draft)

        def draw(nothing):
            del nothing
            logits = self.heads.logits(params["own"], params["shared"], state.hidden)

            def log_probs_at(level: Level, carried, tokens, context):
                # The children of nodes at this depth are one place further than the depth says.
                of_head = self.heads.widen(logits[:, level.depth], params["shared"], context.logits_width)
                at_nodes = jnp.repeat(of_head[:, None].astype(context.logits_dtype), len(level.inner), axis=1)
                return context.distribution.log_probs(at_nodes, *paths_at(self.tree, level, tokens)), carried

            return self.draw_tree(context, choices, asked, (), log_probs_at)

        drawn = jax.lax.cond(jnp.any(asked), draw, lambda nothing: nothing, self.nothing_drawn(context))
        return self.draft(*drawn), state

    def reset(self, state, rows):
        """See :meth:`specjax.drafters.Drafter.reset`."""
        return MedusaState(jnp.where(rows[:, None], 0, state.hidden))
