"""A pass over a tree is a pass over each of its paths: the decoder, in float32, within its rounding.

Positions are by depth, a node sees the committed text and its own ancestors, and of the pass's keys and values those of any path
can be committed. Trees of one size share a program, whatever their shape: what is compiled takes masks and positions as arrays.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.models.config import DecoderConfig, RopeConfig
from specjax.models.decoder import Decoder
from specjax.row_trees import RowTrees
from specjax.tree import NO_PARENT, ROOT, DraftTree
from tests.test_row_trees import parents_of_a_tree

CONFIG = DecoderConfig(
    vocab_size=97, num_layers=2, width=24, num_query_heads=4, num_kv_heads=2, head_dim=6, mlp_width=40, max_positions=128,
    rope=RopeConfig(theta=100.0), qkv_bias=True,
)  # fmt: skip
DECODER = Decoder(CONFIG)
LENGTHS = (9, 4, 1)
"""Committed tokens of the rows, the root included."""
ROWS, CAPACITY = len(LENGTHS), 24
ATOL = 3e-6
"""Hidden states are of size 1; float32 has steps of 1e-7, and sums of about 50 terms are taken in another order."""


@functools.cache
def weights():
    return DECODER.init(jax.random.key(0))


@functools.cache
def text():
    """[ROWS, CAPACITY] tokens, and the cache of all but the newest committed one of each row."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (ROWS, CAPACITY)), jnp.int32)
    cache = DECODER.init_cache(weights(), ROWS, CAPACITY)
    places = jnp.broadcast_to(jnp.arange(CAPACITY), tokens.shape)
    block = apply(weights(), tokens, places, cache, None).block
    return tokens, cache.commit(block, places, jnp.array(LENGTHS) - 1)


def root():
    """[ROWS, 1] the newest committed tokens."""
    return jnp.take_along_axis(text()[0], jnp.array(LENGTHS)[:, None] - 1, axis=1)


@functools.partial(jax.jit, static_argnums=1)
def shaped(parents, depth):
    return RowTrees.from_parents(parents, depth)


@jax.jit
def apply(params, tokens, offsets, cache, mask):
    """A pass behind the cache over ``tokens`` [rows, T], ``offsets`` [rows, T] behind its end."""
    return DECODER.apply(params, tokens, cache.lengths[:, None] + offsets, cache, mask)


def pass_over_trees(parents, depth, tokens):
    """One pass over the root and ``tokens`` [ROWS, N], and the trees."""
    trees = shaped(parents, depth)
    everything = jnp.concatenate([root(), tokens], axis=1)
    return apply(weights(), everything, trees.depths, text()[1], trees.ancestor_mask), trees


def passes_over_paths(trees, tokens):
    """[ROWS, T, depth + 1, E] hidden states of the root and the path to every node: each path a row, one causal pass."""
    size, depth = trees.size, trees.depth
    of_path = jnp.take_along_axis(jnp.pad(tokens, ((0, 0), (1, 0))), trees.path_table.reshape(ROWS, -1), axis=1)
    first = jnp.broadcast_to(root()[:, :, None], (ROWS, size, 1))
    rows = jnp.concatenate([first, of_path.reshape(ROWS, size, depth)], axis=2).reshape(ROWS * size, depth + 1)
    cache = jax.tree.map(lambda leaf: jnp.repeat(leaf, size, axis=0), text()[1])
    offsets = jnp.broadcast_to(jnp.arange(depth + 1), rows.shape)
    return apply(weights(), rows, offsets, cache, None).hidden.reshape(ROWS, size, depth + 1, -1)


def check(rows, depth, seed=0):
    """That a pass over the trees of ``rows``, parents of equal length each, gives every node what its own path gives it."""
    num_nodes = len(rows[0]) - 1
    tokens = jnp.asarray(np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (ROWS, num_nodes)), jnp.int32)
    output, trees = pass_over_trees(jnp.array(rows), depth, tokens)
    hidden, alone = output.hidden, passes_over_paths(trees, tokens)
    expected = jnp.take_along_axis(alone, trees.depths[..., None, None], axis=2)[:, :, 0]
    np.testing.assert_allclose(hidden, expected, atol=ATOL)
    # Not because nothing depends on the path.
    assert float(jnp.max(jnp.abs(hidden[:, 1:] - hidden[:, :1]))) > 0.1


def filled(tree, num_nodes):
    """The parents of ``tree``, with further children of the root for the nodes that it lacks."""
    return (*tree.parents, *[ROOT] * (num_nodes - tree.num_nodes))


NUM_NODES, DEPTH = 10, 10
SMALL = {
    "chains": (DraftTree.chain(10), DraftTree.chain(3), DraftTree.chain(1)),
    "forks": (DraftTree((-1, 0, 0, 1, 1, 2)), DraftTree((-1, 0, 0, 0, 3, 3)), DraftTree((-1, 0, 1, 2, 2))),
    # Case 117: a root with two children and one grandchild each; case 119: second-layer nodes that hang below 2 and 1.
    "swapped": (DraftTree((-1, 0, 0, 1, 2)), DraftTree((-1, 0, 0, 2, 1)), DraftTree((-1, 0, 0, 2, 1, 1, 4, 3))),
    # Numbered branch by branch.
    "branches": (DraftTree((-1, 0, 1, 2, 0, 4, 5)), DraftTree((-1, 0, 1, 1, 0, 4)), DraftTree((-1, 0, 0, 2, 3, 4))),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_trees(name):
    check([filled(tree, NUM_NODES) for tree in SMALL[name]], DEPTH)


@settings(max_examples=25, deadline=None)
@given(st.lists(parents_of_a_tree(NUM_NODES, depth=NUM_NODES), min_size=ROWS, max_size=ROWS), st.integers(0, 2**32 - 1))
def test_random_trees(rows, seed):
    check(rows, DEPTH, seed)


def test_one_program_for_every_shape():
    check([filled(DraftTree.chain(10), NUM_NODES)] * ROWS, DEPTH)
    traces = apply._cache_size(), shaped._cache_size()
    check([filled(DraftTree((-1, 0, 0)), NUM_NODES)] * ROWS, DEPTH)
    assert (apply._cache_size(), shaped._cache_size()) == traces


def test_positions_are_by_depth():
    """Case 117: n, n + 1, n + 1, n + 2, n + 2; and a node number in place of the depth would be seen."""
    tokens = jnp.arange(NUM_NODES * ROWS).reshape(ROWS, NUM_NODES)
    output, trees = pass_over_trees(jnp.array([filled(DraftTree((-1, 0, 0, 1, 2)), NUM_NODES)] * ROWS), DEPTH, tokens)
    assert trees.depths[:, :5].tolist() == [[0, 1, 1, 2, 2]] * ROWS
    by_number = jnp.broadcast_to(jnp.arange(NUM_NODES + 1), (ROWS, NUM_NODES + 1))
    everything = jnp.concatenate([root(), tokens], axis=1)
    wrong, right = apply(weights(), everything, by_number, text()[1], trees.ancestor_mask).hidden, output.hidden
    np.testing.assert_allclose(wrong[:, :2], right[:, :2], atol=ATOL)  # the root and node 1 have their depth as number
    assert np.all(np.max(np.abs(wrong - right), axis=(0, 2))[2:] > 100 * ATOL)


def test_a_static_mask_is_that_of_equal_rows():
    tree = DraftTree(filled(DraftTree((-1, 0, 0, 1, 1, 2)), NUM_NODES))
    tokens = jnp.arange(NUM_NODES * ROWS).reshape(ROWS, NUM_NODES)
    depths, everything = jnp.array([tree.depths] * ROWS), jnp.concatenate([root(), tokens], axis=1)
    static = apply(weights(), everything, depths, text()[1], jnp.asarray(tree.ancestor_mask)).hidden
    per_row = pass_over_trees(jnp.array([tree.parents] * ROWS), DEPTH, tokens)[0].hidden
    np.testing.assert_allclose(static, per_row, atol=ATOL)


@pytest.mark.parametrize("ends", [(5, 4, 8), (8, 3, 0)], ids=["all", "one row accepts nothing"])
def test_the_committed_path_is_what_its_tokens_leave_behind(ends):
    """Rows accept different paths at once, and one gather and scatter commits them: as if only these tokens had been fed."""
    rows = jnp.array([(-1, 0, 0, 1, 2, 3, 3, 4, 6, 0, 0), (-1, 0, 0, 0, 3, 3, 4, 5, 7, 8, 9), (-1, 0, 1, 2, 0, 4, 4, 6, 7, 8, 0)])
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, CONFIG.vocab_size, (ROWS, NUM_NODES)), jnp.int32)
    output, trees = pass_over_trees(rows, DEPTH, tokens)
    path, counts = trees.path_to(jnp.array(ends)), trees.depths[jnp.arange(ROWS), jnp.array(ends)]
    assert len(set(counts.tolist())) == 3
    text_tokens, cache = text()
    committed = cache.commit(output.block, jnp.pad(path, ((0, 0), (1, 0))), counts + 1)
    # The accepted tokens behind the text, and everything fed from the start.
    place, here = jnp.arange(CAPACITY)[None, :], jnp.array(LENGTHS)[:, None]
    accepted = jnp.take_along_axis(jnp.pad(tokens, ((0, 0), (1, 0))), path, axis=1)
    behind = jnp.take_along_axis(accepted, jnp.clip(place - here, 0, DEPTH - 1), axis=1)
    history = jnp.where(place < here, text_tokens, behind)
    places = jnp.broadcast_to(place, history.shape)
    empty = DECODER.init_cache(weights(), ROWS, CAPACITY)
    sequential = empty.commit(apply(weights(), history, places, empty, None).block, places, jnp.array(LENGTHS) + counts)
    assert committed.lengths.tolist() == sequential.lengths.tolist() == (jnp.array(LENGTHS) + counts).tolist()
    there = np.arange(CAPACITY)[None, None, :, None] < np.asarray(committed.lengths)[:, None, None, None]
    for of_tree, in_order in zip((*committed.keys, *committed.values), (*sequential.keys, *sequential.values), strict=True):
        np.testing.assert_allclose(np.where(there, of_tree, 0), np.where(there, in_order, 0), atol=10 * ATOL)


# The largest published list has 80 nodes, the deepest 6 levels; one size for all of them.
PUBLISHED_NODES, PUBLISHED_DEPTH = 80, 6


def likeliest_products(num_nodes, accuracies):
    """The tree of the ``num_nodes`` paths of ranks with the largest products; rank r at depth d counts accuracies[d] 2^-r."""
    frontier, choices = [()], {}
    for accuracy in accuracies:
        paths = [(*path, rank) for path in frontier for rank in range(10)]
        for path in paths:
            choices[path] = choices.get(path[:-1], 1.0) * accuracy * 0.5 ** path[-1]
        frontier = sorted(paths, key=lambda path: (-choices[path], path))[:num_nodes]
    return DraftTree.from_choices(sorted(choices, key=lambda path: (-choices[path], path))[:num_nodes])


def test_a_tree_of_published_size():
    """63 nodes over four depths, wide at the top, as the lists published with Medusa are."""
    trees = [likeliest_products(63, accuracies) for accuracies in ((0.6, 0.5, 0.5, 0.4), (0.9, 0.8, 0.8, 0.7), (0.3, 0.3, 0.3))]
    assert [tree.num_nodes for tree in trees] == [63] * 3
    assert trees[0].depth == 4
    assert len({tree.parents for tree in trees}) == 3
    check([filled(tree, PUBLISHED_NODES) for tree in trees], PUBLISHED_DEPTH)


def test_published_trees(published_trees):
    """With ``--trees-path``: the lists of Medusa, EAGLE and others."""
    for name, tree in published_trees.items():
        fits = tree.num_nodes <= PUBLISHED_NODES and tree.depth <= PUBLISHED_DEPTH
        assert fits, f"{name}: {tree.num_nodes} nodes of depth {tree.depth}; this test has room for 80 nodes of depth 6"
        assert tree.parents[0] == NO_PARENT
        # Beside it the tree without its last node, and the one with only its upper half.
        smaller = [tree.prefix(tree.num_nodes - 1), tree.prefix(tree.num_nodes // 2)]
        check([filled(each, PUBLISHED_NODES) for each in (tree, *smaller)], PUBLISHED_DEPTH)
