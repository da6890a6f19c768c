"""How large a verify pass is: over all nodes of the drafter's tree, or over those alone that were drafted.

A draft that is not there costs nothing: where no row drafted anything the pass is over the root, a plain step. Between that and
the whole tree a drafter may name sets of nodes that are often all that is there (``Drafter.passes``), and a round the depths at
which it often cuts drafts (``Round.depths``). A pass is compiled for each, and the first that holds all drafted nodes of all rows
is run.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.layout import Layout
from specjax.drafters.base import Drafter
from specjax.row_trees import RowTrees
from specjax.tree import ROOT, Draft, DraftTree

Nodes = tuple[int, ...]
"""Nodes of a tree in a pass, the root among them."""


def usual_passes(drafter: Drafter, depths: tuple[int, ...]) -> tuple[Nodes, ...]:
    """Passes that are often enough, the smallest first; those over the root alone and over everything are not among them.

    Args:
      drafter: may name sets of nodes in ``passes``.
      depths: at which drafts are often cut.

    Example:
      >>> from specjax.drafters import prompt_lookup, stacked
      >>> usual_passes(stacked(prompt_lookup(4), prompt_lookup(1)).functions, (1, 3))
      ((0, 1), (0, 1, 2, 3))
    """
    tree = drafter.tree
    cut = [range(1, int(tree.nodes_within[depth]) + 1) for depth in depths if 0 < depth < tree.depth]
    found = {(ROOT, *sorted({*nodes} - {ROOT})) for nodes in (*cut, *getattr(drafter, "passes", ()))}
    return tuple(sorted(found, key=lambda nodes: (len(nodes), nodes)))


def smallest_pass(
    passed: Callable[[Nodes, jax.Array | None], Any], draft: Draft, usual: tuple[Nodes, ...], layout: Layout
) -> Any:
    """What ``passed`` makes of all nodes, or of the first set of them that holds all that was drafted.

    Args:
      passed: from some nodes and their ancestor mask, [n, n] or [B, n, n], None where nodes follow one another, to a pytree of
        arrays. In these the nodes are an axis, or what is made of the root is no longer than what is made of all.
      draft: of all rows; its valid nodes are needed.
      usual: see :func:`usual_passes`.
      layout: rows of all devices share a pass.

    Returns:
      What ``passed`` returns for the whole tree. Where a node was left out, anything stands for it: it is not valid, and never
      looked at.
    """
    tree = draft.tree
    block_mask = None if tree.is_chain else jnp.asarray(tree.ancestor_mask)

    def over(nodes):
        # Nodes that follow one another need no mask.
        if block_mask is None or _follow(tree, nodes):
            return passed(nodes, None)
        return passed(nodes, block_mask[..., places(nodes), :][..., places(nodes)])

    whole = tuple(range(tree.size))
    if tree.num_nodes == 0:
        return over(whole)
    # All branches must return the same shapes.
    shapes = jax.eval_shape(lambda: over(whole))
    passes = [(ROOT,), *usual, whole]
    needed = jnp.any(draft.valid, axis=0)
    holds_all = jnp.stack([~jnp.any(needed & jnp.asarray(~np.isin(whole[1:], nodes))) for nodes in passes])
    holds_all = layout.everywhere(holds_all)

    def spread(nodes):
        return jax.tree.map(functools.partial(_spread_like, nodes), over(nodes), shapes)

    return jax.lax.switch(jnp.argmax(holds_all), [functools.partial(spread, nodes) for nodes in passes])


def places(nodes: Nodes) -> slice | np.ndarray:
    """What an axis of all nodes is indexed with for ``nodes``."""
    return slice(len(nodes)) if nodes == tuple(range(len(nodes))) else np.array(nodes)


def spread_to(nodes: Nodes, values: jax.Array, size: int, axis: int) -> jax.Array:
    """``values`` whose ``axis`` is ``nodes`` where the whole tree of this ``size`` has them; anything for others."""
    if nodes == tuple(range(len(nodes))):
        missing = [(0, size - values.shape[axis] if axis == place else 0) for place in range(values.ndim)]
        return jnp.pad(values, missing)
    place = np.zeros(size, np.int32)
    place[list(nodes)] = np.arange(len(nodes))
    return jnp.take(values, place, axis=axis)


def _spread_like(nodes: Nodes, values: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """``values`` of some nodes as large as ``wanted``: those of blocks have any layout of their axes."""
    for axis, size in enumerate(wanted.shape):
        if values.shape[axis] != size:
            values = spread_to(nodes, values, size, axis)
    return values


def _follow(tree: DraftTree | RowTrees, nodes: Nodes) -> bool:
    """Whether each of ``nodes`` is known to be the child of the one before."""
    if isinstance(tree, RowTrees):
        return len(nodes) == 1
    return all(tree.parents[node] == before for before, node in itertools.pairwise(nodes))
