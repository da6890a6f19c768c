"""What drafters share that shape their trees while they draft (EAGLE-2, Li et al. 2024, arXiv:2406.16858, section 4).

Depth by depth the most likely tokens behind the most likely nodes become candidates; of all candidates the best become the draft.
A path's score is its log-probability, so a node is never better than its parent and whoever is chosen has its parent chosen too::

    depth 1    the best k tokens behind the root                       k candidates, all go on
    depth 2    the best k tokens behind each of those                  k k candidates, the best k go on
    ...
    draft      the best N of all candidates

The shape depends on the tokens in it, so no q is true of them: the laws are deterministic.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specjax.drafters.base import Context
from specjax.drafters.draw import softened
from specjax.row_trees import RowTrees, TreeBounds, best_nodes
from specjax.tree import NO_PARENT, Draft, Law


@flax.struct.dataclass
class Grown:
    """The nodes that go on, of the depths so far: what a model is fed to know the outputs at the newest of them.

    Attributes:
      tokens: [B, F] int32; the newest depth's last, F = depth * k.
      parents: [B, F] int32, which of the F is each one's parent; -1 is the root.
      mask: [B, F, F] bool, which of them each attends to.
      path_tokens: [B, k, D] int32, the tokens that lead to each of the newest.
      depth: of the newest; 0 is the root alone, which is none of the F.
      depths: of each of the F.
    """

    tokens: jax.Array
    parents: jax.Array
    mask: jax.Array
    path_tokens: jax.Array
    depth: int = flax.struct.field(pytree_node=False)
    depths: tuple[int, ...] = flax.struct.field(pytree_node=False)


class TreeGrowing:
    """Grows a tree for every row; for frozen dataclasses with these fields.

    Attributes:
      tree: bounds of every proposal.
      branching: k, tokens behind a node that become candidates, and nodes of a depth that go on.
    """

    tree: TreeBounds
    branching: int
    law_choices = (Law.DETERMINISTIC,)

    def with_law(self, law):
        """See :meth:`specjax.drafters.Drafter.with_law`."""
        if law is not Law.DETERMINISTIC:
            raise ValueError(f"law is {law.value!r}; trees that are shaped by what is in them are drafted deterministically")
        return self

    def grow_tree(
        self,
        context: Context,
        carried: Any,
        log_probs_at: Callable[[Grown, Any, Context], tuple[jax.Array, Any]],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Grows the trees.

        Args:
          context: of the round.
          carried: what ``log_probs_at`` hands on from depth to depth.
          log_probs_at: from the nodes so far, what is carried and the context (greedy rows at temperature 1 in it) to log q
            [B, k, V] at the newest nodes ([B, 1, V] at the root) and what is carried on.

        Returns:
          tokens [B, N] int32, parents [B, T] for :meth:`RowTrees.from_parents`, and which nodes are possible [B, N].
        """
        batch, k, depth = context.lengths.shape[0], self.branching, self.tree.depth
        context = softened(context)
        grown = Grown(
            tokens=jnp.zeros((batch, 0), jnp.int32),
            parents=jnp.zeros((batch, 0), jnp.int32),
            mask=jnp.zeros((batch, 0, 0), bool),
            path_tokens=jnp.zeros((batch, 1, depth), jnp.int32),
            depth=0,
            depths=(),
        )
        # Of the newest nodes: score, and number among all candidates.
        scores, numbers = jnp.zeros((batch, 1), context.logits_dtype), jnp.full((batch, 1), NO_PARENT, jnp.int32)
        candidates, count = [], 0
        for _ in range(depth):
            log_probs, carried = log_probs_at(grown, carried, context)
            best, tokens = jax.lax.top_k(log_probs, k)
            width = best.shape[1] * k
            new = (
                tokens.reshape(batch, width).astype(jnp.int32),
                (scores[..., None] + best).reshape(batch, width),
                jnp.repeat(numbers, k, axis=1),
            )
            candidates.append(new)
            scores, going = jax.lax.top_k(new[1], k)
            numbers = (count + going).astype(jnp.int32)
            grown = self._with(grown, jnp.take_along_axis(new[0], going, axis=1), (going // k).astype(jnp.int32))
            count += width
        tokens, scores, parents = (jnp.concatenate(values, axis=1) for values in zip(*candidates, strict=True))
        chosen, of_tree = best_nodes(scores, parents, self.tree.num_nodes)
        tokens, scores = (jnp.take_along_axis(values, chosen, axis=1) for values in (tokens, scores))
        return tokens, of_tree, scores > -jnp.inf

    def _with(self, grown: Grown, tokens, parent) -> Grown:
        """``grown`` with k nodes ``tokens`` [B, k] more, each behind the newest node number ``parent`` [B, k]."""
        batch, k, fed = tokens.shape[0], self.branching, grown.tokens.shape[1]
        first = fed - k  # of the newest so far
        parents = jnp.full((batch, k), -1, jnp.int32) if grown.depth == 0 else first + parent
        seen = jnp.zeros((batch, k, fed), bool)
        if grown.depth:
            seen = jnp.take_along_axis(grown.mask, parents[..., None], axis=1)
        own = jnp.broadcast_to(jnp.eye(k, dtype=bool)[None], (batch, k, k))
        mask = jnp.concatenate([jnp.pad(grown.mask, ((0, 0), (0, 0), (0, k))), jnp.concatenate([seen, own], axis=2)], axis=1)
        path_tokens = jnp.take_along_axis(grown.path_tokens, parent[..., None], axis=1)
        return Grown(
            tokens=jnp.concatenate([grown.tokens, tokens], axis=1),
            parents=jnp.concatenate([grown.parents, parents], axis=1),
            mask=mask,
            path_tokens=path_tokens.at[:, :, grown.depth].set(tokens),
            depth=grown.depth + 1,
            depths=(*grown.depths, *(grown.depth + 1,) * k),
        )

    def nothing_grown(self, context: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What :meth:`grow_tree` returns, of nothing."""
        batch, num_nodes = context.lengths.shape[0], self.tree.num_nodes
        parents = jnp.broadcast_to(jnp.array([NO_PARENT] + [0] * num_nodes, jnp.int32)[None], (batch, num_nodes + 1))
        return jnp.zeros((batch, num_nodes), jnp.int32), parents, jnp.zeros((batch, num_nodes), bool)

    def grown_draft(self, tokens, parents, valid) -> Draft:
        """The proposal of what was grown."""
        num_nodes = self.tree.num_nodes
        trees = RowTrees.from_parents(parents, self.tree.depth)
        return Draft(tokens, valid, None, trees, (Law.DETERMINISTIC,) * num_nodes).checked()


def check_growth(owner: str, tree: TreeBounds, branching: int | None) -> int:
    """k of a call; raises ValueError where there are fewer candidates than nodes."""
    k = min(8, tree.num_nodes) if branching is None else branching
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"{owner}: branching is {branching!r}; it must be a whole number of at least 1")
    candidates = k + (tree.depth - 1) * k * k
    if candidates < tree.num_nodes:
        raise ValueError(
            f"{owner}: branching {k} and depth {tree.depth} make {candidates} candidates; a tree of {tree.num_nodes} nodes needs "
            "as many at least"
        )
    return k
