"""Draft trees that a drafter shapes for every row, while it drafts.

A static tree (``specjax.tree.DraftTree``) has the same shape in every row and round. A drafter that knows how sure it is may
rather spend its nodes where they are likely to be accepted: deep in one row, wide in another. What is compiled knows the
*bounds* of such trees; the shapes are arrays::

    TreeBounds(num_nodes=3, depth=2)          row 0    0           row 1     0         row 2    0
                                                      / \\                  / | \\               |
    RowTrees.parents   [-1, 0, 0, 1]                 1   2                1  2  3              1
                       [-1, 0, 0, 0]                 |                                        / \\
                       [-1, 0, 1, 1]                 3                                       2   3

A shape may depend on the tokens that were drafted, so no law but ``deterministic`` and ``coupled`` is true of them: a token that
was drawn from q and then kept for what it is comes from another distribution.

Letters in shapes: B rows, N draft nodes without the root, T = N + 1, M candidates.
"""

import dataclasses

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.numeric import is_whole
from specjax.tree import NO_PARENT, ROOT


@dataclasses.dataclass(frozen=True)
class TreeBounds:
    """How large the trees may get that a drafter shapes per row: static and hashable, a part of the compiled round.

    A drafter whose proposals hold :class:`RowTrees` has this as its ``tree``.

    Attributes:
      num_nodes: N, draft nodes of every row; those that a row does not need are not valid.
      depth: length of the longest path that there can be.

    Raises:
      ValueError: there is no such tree.

    Example:
      >>> TreeBounds(num_nodes=3, depth=2).size
      4
      >>> TreeBounds(num_nodes=3, depth=4)
      Traceback (most recent call last):
      ...
      ValueError: TreeBounds: depth is 4; it must be a whole number from 1 to the 3 of num_nodes
    """

    num_nodes: int
    depth: int

    def __post_init__(self):
        for name, most in (("num_nodes", None), ("depth", "num_nodes")):
            value, limit = getattr(self, name), None if most is None else getattr(self, most)
            if not is_whole(value) or value < 1 or (limit and value > limit):
                wanted = "of at least 1" if most is None else f"from 1 to the {limit} of {most}"
                raise ValueError(f"TreeBounds: {name} is {value!r}; it must be a whole number {wanted}")
            object.__setattr__(self, name, int(value))

    @property
    def size(self) -> int:
        """T, tokens per verify pass."""
        return self.num_nodes + 1

    @property
    def is_chain(self) -> bool:
        """Whether no node can have two children; not even where every row may happen to be one."""
        return False

    @property
    def nodes_within(self) -> np.ndarray:
        """[depth + 1] int32, for every depth how many draft nodes a tree of that depth may have.

        Example:
          >>> TreeBounds(num_nodes=3, depth=2).nodes_within.tolist()
          [0, 3, 3]
        """
        return np.array([0] + [self.num_nodes] * self.depth, np.int32)


@flax.struct.dataclass
class RowTrees:
    """Topology of a draft, another one in every row; the fields of a ``DraftTree`` with a batch dimension.

    Attributes:
      parents: [B, T] int32, the parent of each node; ``NO_PARENT`` for the root, which comes first. Parents stand before their
        children, and nodes are sorted by depth.
      depths: [B, T] int32, distance from the root; ``depth + 1`` for nodes that are deeper than ``depth``, and never valid.
      ancestor_mask: [B, T, T] bool: row attends to column, that is to itself, its ancestors and the root.
      path_table: [B, T, depth] int32, the draft nodes that lead to each node, itself included; ``ROOT`` behind the last.
      depth: length of the longest path that there can be.
    """

    parents: jax.Array
    depths: jax.Array
    ancestor_mask: jax.Array
    path_table: jax.Array
    depth: int = flax.struct.field(pytree_node=False)

    @classmethod
    def from_parents(cls, parents: jax.Array, depth: int) -> "RowTrees":
        """The trees of ``parents`` [B, T]; ``depth`` steps of gathers, to be compiled with the drafter that shapes them.

        Example:
          >>> trees = RowTrees.from_parents(jnp.array([[-1, 0, 0, 1], [-1, 0, 1, 2]]), depth=2)
          >>> trees.depths.tolist()  # the chain of three is deeper than was said: its end is never valid
          [[0, 1, 1, 2], [0, 1, 2, 3]]
          >>> trees.path_table[0].tolist()
          [[0, 0], [1, 0], [2, 0], [1, 3]]
        """
        chex.assert_rank(parents, 2)
        parents = jnp.asarray(parents, jnp.int32)
        batch, size = parents.shape
        TreeBounds(size - 1, depth)
        up = jnp.maximum(parents, ROOT)
        node = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
        ancestors = [node]
        for _ in range(depth):
            ancestors.append(jnp.take_along_axis(up, ancestors[-1], axis=1))
        # [B, T, depth + 1]: every node, its parent, the parent of that, ...
        above = jnp.stack(ancestors, axis=-1)
        depths = jnp.sum(above != ROOT, axis=-1, dtype=jnp.int32)
        steps_up = depths[..., None] - 1 - jnp.arange(depth)[None, None, :]
        path_table = jnp.where(steps_up >= 0, jnp.take_along_axis(above, jnp.maximum(steps_up, 0), axis=-1), ROOT)
        column = jnp.arange(size)
        mask = jnp.any(path_table[..., None] == column[None, None, None, :], axis=2)
        return cls(parents, depths, mask | (column == ROOT)[None, None, :], path_table, depth)

    @property
    def num_nodes(self) -> int:
        """N, draft nodes."""
        return self.parents.shape[1] - 1

    @property
    def size(self) -> int:
        """T, tokens per verify pass: the root and the drafts."""
        return self.parents.shape[1]

    @property
    def is_chain(self) -> bool:
        """Whether no node can have two children."""
        return False

    @property
    def bounds(self) -> TreeBounds:
        """What is static of these trees."""
        return TreeBounds(self.num_nodes, self.depth)

    @property
    def inner_nodes(self) -> tuple[int, ...]:
        """The rows of ``Draft.parent_log_probs``: all nodes, as any may have children."""
        return tuple(range(self.size))

    @property
    def inner_index(self) -> np.ndarray:
        """[T] int32, the row of ``Draft.parent_log_probs`` that belongs to each node."""
        return np.arange(self.size, dtype=np.int32)

    def whole_paths(self, nodes: jax.Array) -> jax.Array:
        """[B, N] bool, which of ``nodes`` [B, N] (bool) have all their ancestors among them, and are not too deep."""
        whole = jnp.all(nodes[:, None, :] | ~self.ancestor_mask[:, 1:, 1:], axis=-1)
        return whole & (self.depths[:, 1:] <= self.depth)

    def path_to(self, node: jax.Array) -> jax.Array:
        """[B, depth] int32, the draft nodes that lead to each row's ``node`` [B], itself included; ``ROOT`` behind the last."""
        return jnp.take_along_axis(self.path_table, node[:, None, None], axis=1)[:, 0]


def best_nodes(scores: jax.Array, parents: jax.Array, num_nodes: int) -> tuple[jax.Array, jax.Array]:
    """The best of many candidates, as a tree: how EAGLE-2 (Li et al. 2024, arXiv:2406.16858, section 4.2) spends its nodes.

    A candidate's score must not exceed its parent's (the log-probability of a whole path does not), so that whoever is chosen has
    its parent chosen too; of equal ones the first in the order is taken.

    Args:
      scores: [B, M]; minus infinity for candidates that are not there.
      parents: [B, M] int32, which candidate is the parent, and comes before its child; ``NO_PARENT`` for children of the root.
      num_nodes: N, how many to choose, at most M.

    Returns:
      [B, N] int32, the candidates that became the draft nodes 1 to N, in their own order; and [B, T] int32, the parents of the
      tree's nodes, for :meth:`RowTrees.from_parents`.

    Example:
      >>> scores, parents = jnp.log(jnp.array([[0.6, 0.3, 0.1, 0.5, 0.2]])), jnp.array([[-1, -1, -1, 0, 1]])
      >>> chosen, of_tree = best_nodes(scores, parents, num_nodes=3)
      >>> chosen.tolist(), of_tree.tolist()
      ([[0, 1, 3]], [[-1, 0, 0, 1]])
    """
    chex.assert_equal_shape([scores, parents])
    chosen = jnp.sort(jax.lax.top_k(scores, num_nodes)[1].astype(jnp.int32), axis=1)
    parent = jnp.take_along_axis(parents, chosen, axis=1)
    before = jnp.sum(chosen[:, None, :] < parent[:, :, None], axis=-1, dtype=jnp.int32)
    of_tree = jnp.where(parent == NO_PARENT, ROOT, before + 1)
    return chosen, jnp.pad(of_tree, ((0, 0), (1, 0)), constant_values=NO_PARENT)
