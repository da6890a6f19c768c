"""Draft trees and drafts.

Letters in shapes: B rows, N draft nodes without the root, T = N + 1 tokens per verify pass, P nodes with children,
V vocabulary.

A draft is always a tree whose root is the newest committed token; a *chain* is the tree without branches. Nodes are
numbered with the root first and every parent before its children, so the tokens of a verify pass are the root followed by
the N drafts::

    DraftTree((-1, 0, 0, 1))          nodes      0             root, the newest committed token
                                                / \\
                                               1   2           depth 1: two candidates for the next token
                                               |
                                               3               depth 2

    ancestor_mask  (row attends to column)      0 1 2 3
                                             0  x . . .
                                             1  x x . .
                                             2  x . x .
                                             3  x x . x
"""

import dataclasses
import enum
import functools
import numbers
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.numeric import is_whole

if TYPE_CHECKING:
    from specjax.row_trees import RowTrees

ROOT = 0
"""Index of the root in every tree."""

NO_PARENT = -1
"""The root's entry in ``parents``."""

NO_SOURCE = -1
"""Entry of ``Draft.source`` for a row that nobody drafted anything for."""


class Law(enum.Enum):
    """How a draft token was chosen, given the draft distribution q at its parent.

    A verification rule is lossless for some laws only, so a draft states its law and no rule guesses it.
    """

    DETERMINISTIC = "deterministic"
    """A function of the text so far (an argmax, a top-k, a lookup): its q is one-hot."""
    INDEPENDENT = "independent"
    """Drawn from q, independently of its siblings."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Drawn from q with the earlier siblings removed and the rest renormalised."""
    COUPLED = "coupled"
    """The top of log q + g, where g is the Gumbel noise of its position that the rule uses as well."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class DraftTree:
    """Topology of a draft: static and hashable, a part of the compiled round. As a pytree it has no leaves.

    Trees that a drafter shapes per row are :class:`specjax.row_trees.RowTrees`.

    Attributes:
      parents: for each of the T nodes the index of its parent; ``NO_PARENT`` for the root, which comes first.

    Raises:
      ValueError: the root is missing or not first, or a parent does not come before its child.

    Example:
      >>> fork = DraftTree((-1, 0, 0, 1))
      >>> fork.num_nodes, fork.depths, fork.depth
      (3, (0, 1, 1, 2), 2)
      >>> fork.children
      ((1, 2), (3,), (), ())
      >>> DraftTree((-1, 2, 0))
      Traceback (most recent call last):
      ...
      ValueError: DraftTree: node 1 has parent 2; a parent must come before its child (0 <= parent < 1)
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        if isinstance(self.parents, str) or not all(isinstance(parent, numbers.Integral) for parent in self.parents):
            raise ValueError(f"DraftTree: parents is {self.parents!r}; it must hold whole numbers")
        object.__setattr__(self, "parents", tuple(int(parent) for parent in self.parents))
        if not self.parents or self.parents[ROOT] != NO_PARENT:
            raise ValueError(f"DraftTree: parents is {self.parents}; it must start with the root's {NO_PARENT}")
        for node, parent in enumerate(self.parents[1:], 1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"DraftTree: node {node} has parent {parent}; a parent must come before its child (0 <= parent < {node})"
                )

    @classmethod
    def chain(cls, length: int) -> "DraftTree":
        """A tree without branches of ``length`` draft nodes; 0 is the root alone, plain decoding.

        Example:
          >>> DraftTree.chain(3).parents
          (-1, 0, 1, 2)
        """
        if not is_whole(length) or length < 0:
            raise ValueError(f"DraftTree.chain: length is {length!r}; it must be a whole number of at least 0")
        return cls(tuple(range(-1, length)))

    @classmethod
    def from_choices(cls, choices: Iterable[Sequence[int]]) -> "DraftTree":
        """The tree of a list of paths of ranks, as published with Medusa (Cai et al. 2024, arXiv:2401.10774, section 2.1.2).

        Args:
          choices: each path names one node by the ranks that lead to it: ``(0, 1)`` is the second-best child of the best
            child of the root. The root is not listed; every prefix of a path must be.

        Raises:
          ValueError: a path is empty, listed twice, or its parent is missing.

        Example:
          >>> DraftTree.from_choices([(0,), (0, 0), (1,)]).parents
          (-1, 0, 0, 1)
        """
        paths = [tuple(path) for path in choices]
        for path in paths:
            if not all(isinstance(rank, numbers.Integral) for rank in path):
                raise ValueError(f"DraftTree.from_choices: path {path}; it must hold whole numbers")
        # By depth, then by rank: parents come first and siblings stand in the order of their ranks.
        ordered = sorted(paths, key=lambda path: (len(path), path))
        index: dict[tuple[int, ...], int] = {(): ROOT}
        parents = [NO_PARENT]
        for path in ordered:
            if not path or any(rank < 0 for rank in path):
                raise ValueError(f"DraftTree.from_choices: path {path}; it must hold ranks of at least 0, and at least one")
            if path in index:
                raise ValueError(f"DraftTree.from_choices: path {path} is listed twice")
            if path[:-1] not in index:
                raise ValueError(f"DraftTree.from_choices: path {path} has no parent; list {path[:-1]} too")
            index[path] = len(parents)
            parents.append(index[path[:-1]])
        return cls(tuple(parents))

    @property
    def size(self) -> int:
        """T, tokens per verify pass: the root and the drafts."""
        return len(self.parents)

    @property
    def num_nodes(self) -> int:
        """N, draft nodes."""
        return len(self.parents) - 1

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of every node from the root."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Length of the longest path, in draft tokens."""
        return max(self.depths)

    @property
    def is_chain(self) -> bool:
        """Whether no node has two children."""
        return self.depth == self.num_nodes

    @functools.cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of every node, in node order."""
        return tuple(tuple(n for n, p in enumerate(self.parents) if p == node) for node in range(self.size))

    @functools.cached_property
    def inner_nodes(self) -> tuple[int, ...]:
        """The P nodes that have children, in node order: the rows of ``Draft.parent_log_probs``."""
        return tuple(node for node, children in enumerate(self.children) if children)

    @functools.cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """For every node the draft nodes that lead to it, itself included."""
        paths: list[tuple[int, ...]] = [()]
        for node, parent in enumerate(self.parents[1:], 1):
            paths.append((*paths[parent], node))
        return tuple(paths)

    @functools.cached_property
    def path_table(self) -> np.ndarray:
        """[T, depth] int32, ``paths`` with ``ROOT`` behind their ends."""
        return _filled(self.paths, self.depth)

    @functools.cached_property
    def children_table(self) -> np.ndarray:
        """[T, most children] int32, ``children`` with ``ROOT`` behind the last.

        Example:
          >>> DraftTree((-1, 0, 0, 1)).children_table.tolist()
          [[1, 2], [3, 0], [0, 0], [0, 0]]
        """
        return _filled(self.children, max(map(len, self.children)))

    @functools.cached_property
    def nodes_within(self) -> np.ndarray:
        """[depth + 1] int32, for every depth how many draft nodes come before the first that is deeper.

        Example:
          >>> DraftTree((-1, 0, 0, 1)).nodes_within.tolist()
          [0, 2, 3]
        """
        deeper = [[node for node, depth in enumerate(self.depths) if depth > most] for most in range(self.depth + 1)]
        return np.array([min(nodes, default=self.size) - 1 for nodes in deeper], np.int32)

    @functools.cached_property
    def inner_index(self) -> np.ndarray:
        """[T] int32, the row of ``Draft.parent_log_probs`` that belongs to each node; 0 for nodes without children."""
        index = np.zeros(self.size, np.int32)
        index[list(self.inner_nodes)] = np.arange(len(self.inner_nodes))
        return index

    @functools.cached_property
    def ancestor_mask(self) -> np.ndarray:
        """[T, T] bool: row attends to column, that is to itself, its ancestors and the root."""
        mask = np.eye(self.size, dtype=bool)
        for node, path in enumerate(self.paths):
            mask[node, [ROOT, *path]] = True
        return mask

    def whole_paths(self, nodes: jax.Array) -> jax.Array:
        """[B, N] bool, which of ``nodes`` [B, N] (bool) have all their ancestors among them.

        Example:
          >>> DraftTree((-1, 0, 0, 1)).whole_paths(jnp.array([[False, True, True]])).tolist()
          [[False, True, False]]
        """
        needed = jnp.asarray(self.ancestor_mask[1:, 1:])
        return jnp.all(nodes[:, None, :] | ~needed[None], axis=-1)

    def path_to(self, node: jax.Array) -> jax.Array:
        """[B, depth] int32, the draft nodes that lead to each row's ``node`` [B], itself included; ``ROOT`` behind the last."""
        return jnp.asarray(self.path_table)[node]

    def prefix(self, num_nodes: int) -> "DraftTree":
        """The tree of the root and the first ``num_nodes`` draft nodes."""
        return DraftTree(self.parents[: num_nodes + 1])


def _filled(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """[len(rows), width] int32, ``ROOT`` behind each row's end."""
    table = np.full((len(rows), width), ROOT, np.int32)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    return table


@flax.struct.dataclass
class Draft:
    """What a drafter proposes for a batch.

    Attributes:
      tokens: [B, N] int32, a token for every draft node; where not valid, any token below the vocabulary size.
      valid: [B, N] bool, the nodes that a row really drafted (a row may draft nothing). A node counts as valid only if
        its parent does.
      parent_log_probs: [B, P, V], log q at every node that has children, after temperature and filters and in the dtype
        it was drawn with; None where all children are deterministic, and may be None where trees are shaped per row (P is T
        there, and no rule needs it).
      tree: topology: a static one for all rows, or :class:`specjax.row_trees.RowTrees`.
      laws: a law for every draft node (N).
      source: [B] int32, which of its drafter's ``sources`` drafted each row, ``NO_SOURCE`` where none did; None of a drafter
        that has no such list.
    """

    tokens: jax.Array
    valid: jax.Array
    parent_log_probs: jax.Array | None
    tree: "DraftTree | RowTrees"
    laws: tuple[Law, ...] = flax.struct.field(pytree_node=False)
    source: jax.Array | None = None

    def checked(self) -> "Draft":
        """The draft after shape checks, with nodes behind an invalid parent marked invalid."""
        batch, num_nodes = self.tokens.shape
        if num_nodes != self.tree.num_nodes or len(self.laws) != num_nodes:
            raise ValueError(
                f"Draft: {num_nodes} tokens and {len(self.laws)} laws for a tree of {self.tree.num_nodes} draft nodes"
            )
        chex.assert_shape(self.valid, (batch, num_nodes))
        if self.source is not None:
            chex.assert_shape(self.source, (batch,))
        if not isinstance(self.tree, DraftTree):
            chex.assert_shape(self.tree.parents, (batch, num_nodes + 1))
        if not jnp.issubdtype(self.tokens.dtype, jnp.integer) or self.valid.dtype != bool:
            raise ValueError(
                f"Draft: tokens are {self.tokens.dtype} and valid is {self.valid.dtype}; they must be integers and booleans"
            )
        if self.parent_log_probs is not None:
            chex.assert_shape(self.parent_log_probs, (batch, len(self.tree.inner_nodes), None))
        elif isinstance(self.tree, DraftTree) and any(law is not Law.DETERMINISTIC for law in self.laws):
            raise ValueError("Draft: parent_log_probs is None; only deterministic drafts may leave it out")
        # A valid node's ancestors are all valid.
        return self.replace(valid=self.tree.whole_paths(self.valid), tokens=self.tokens.astype(jnp.int32))

    def with_one_node(self) -> "Draft":
        """The first draft node alone, as a chain: all that a rule needs to see where no node is valid.

        Example:
          >>> tokens, valid, laws = jnp.array([[3, 1, 4]]), jnp.zeros((1, 3), bool), (Law.DETERMINISTIC,) * 3
          >>> draft = Draft(tokens, valid, None, DraftTree((-1, 0, 0, 1)), laws).with_one_node()
          >>> draft.tree.size, draft.tokens.tolist()
          (2, [[3]])
        """
        log_probs = None if self.parent_log_probs is None else self.parent_log_probs[:, :1]  # of the root, the first inner node
        tokens, valid = self.tokens[:, :1], self.valid[:, :1]
        return self.replace(tokens=tokens, valid=valid, parent_log_probs=log_probs, tree=DraftTree.chain(1), laws=self.laws[:1])

    @classmethod
    def empty(cls, batch: int) -> "Draft":
        """Nothing drafted: the round is a step of plain decoding.

        Example:
          >>> Draft.empty(2).tokens.shape
          (2, 0)
        """
        return cls(
            tokens=jnp.zeros((batch, 0), jnp.int32),
            valid=jnp.zeros((batch, 0), bool),
            parent_log_probs=None,
            tree=DraftTree.chain(0),
            laws=(),
        )


def count_valid_prefix(valid: jax.Array) -> jax.Array:
    """[B] how many leading entries of ``valid`` [B, N] are true.

    Example:
      >>> count_valid_prefix(jnp.array([[True, True, False, True], [False, True, True, True]])).tolist()
      [2, 0]
    """
    return jnp.sum(jnp.cumprod(valid.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
