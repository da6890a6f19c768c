"""A drafter small enough to go through all of its outcomes whose trees have another shape in every row."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from specjax.certificates.tiny import random_table
from specjax.drafters.base import BoundDrafter, Stateless
from specjax.row_trees import RowTrees, TreeBounds, best_nodes
from specjax.tree import NO_PARENT, Draft, Law

LEAST_LIKELY = 0.2
"""Paths that are less likely are not drafted: some rows have fewer nodes than others."""


@dataclasses.dataclass(frozen=True)
class RowTreeDrafter(Stateless):
    """Drafts from a table of distributions: per depth the best tokens behind the best nodes, and of these the best overall.

    The row of the table that is q at a node depends on the committed length and on the tokens from the root down to it, as in
    ``TableDrafter``. Coupled, the noise of the position is added to log q, and the shape depends on the noise as well.
    It does not look at budgets: the round has to.

    Parameters are ``table`` [rows, V], log-probabilities.

    Attributes:
      tree: bounds of every proposal.
      law: of all draft nodes.
    """

    tree: TreeBounds
    law: Law = Law.DETERMINISTIC
    law_choices = (Law.DETERMINISTIC, Law.COUPLED)

    def with_law(self, law):
        """See :meth:`specjax.drafters.Drafter.with_law`."""
        return dataclasses.replace(self, law=law)

    def propose(self, params, state, context, choices, num_draft):
        """See :meth:`specjax.drafters.Drafter.propose`."""
        tokens, scores, parents = self._candidates(params, context, choices)
        chosen, of_tree = best_nodes(scores, parents, self.tree.num_nodes)
        tokens, scores = (jnp.take_along_axis(values, chosen, axis=1) for values in (tokens, scores))
        draft = Draft(
            tokens=tokens,
            valid=(scores >= math.log(LEAST_LIKELY)) & (jnp.arange(self.tree.num_nodes)[None, :] < num_draft[:, None]),
            parent_log_probs=None,
            tree=RowTrees.from_parents(of_tree, self.tree.depth),
            laws=(self.law,) * self.tree.num_nodes,
        )
        return draft.checked(), state

    def _candidates(self, params, context, choices):
        """The best nodes of every depth: tokens, scores and parents [B, M], M at least ``num_nodes``."""
        table, num_nodes, batch = params["table"].astype(context.logits_dtype), self.tree.num_nodes, len(context.tokens)
        newest = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
        # Of the nodes whose children come next: what was drafted down to them, in one number, and their number as candidates.
        paths, reached = 7 * context.lengths[:, None] + newest, jnp.zeros((batch, 1), table.dtype)
        place = jnp.full((batch, 1), NO_PARENT, jnp.int32)
        levels: list[tuple[jax.Array, jax.Array, jax.Array]] = []
        for depth in range(self.tree.depth):
            log_probs = table[paths % len(table)]
            if self.law is Law.COUPLED:
                noise = choices.gumbel(depth, context.logits_width, table.dtype)
                # Normalised, a path's score never grows.
                log_probs = jax.nn.log_softmax(log_probs + noise[:, None], axis=-1)
            width = log_probs.shape[1] * table.shape[1]
            scores = (reached[..., None] + log_probs).reshape(batch, width)
            reached, best = jax.lax.top_k(scores, min(num_nodes, width))
            parent, tokens = (best // table.shape[1]).astype(jnp.int32), (best % table.shape[1]).astype(jnp.int32)
            before = sum(level[0].shape[1] for level in levels)
            levels.append((tokens, reached, jnp.take_along_axis(place, parent, axis=1)))
            paths = 31 * jnp.take_along_axis(paths, parent, axis=1) + tokens + 1
            place = jnp.broadcast_to(before + jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        tokens, scores, parents = (jnp.concatenate(values, axis=1) for values in zip(*levels, strict=True))
        lacking = [(0, 0), (0, max(0, num_nodes - tokens.shape[1]))]
        scores = jnp.pad(scores, lacking, constant_values=-jnp.inf)
        return jnp.pad(tokens, lacking), scores, jnp.pad(parents, lacking, constant_values=NO_PARENT)


def row_tree_drafter(bounds: TreeBounds, *, vocab_size: int = 3, seed: int = 0, kind=RowTreeDrafter) -> BoundDrafter:
    """A :class:`RowTreeDrafter` with a random table.

    Args:
      bounds: of every proposal.
      vocab_size: width of the table.
      seed: of the table.
      kind: the class, for drafters that do something else with the same table.

    Example:
      >>> row_tree_drafter(TreeBounds(num_nodes=3, depth=2)).functions.tree.depth
      2
    """
    return BoundDrafter(kind(bounds), {"table": random_table(vocab_size, seed)}, name="row_tree_drafter")
