"""Trees shaped per row are what static trees of the same parents are, row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.row_trees import RowTrees, TreeBounds, best_nodes
from specjax.sampling.path import tree_paths
from specjax.tree import NO_PARENT, Draft, DraftTree, Law

DEPTH, N, B = 4, 7, 3
build = jax.jit(RowTrees.from_parents, static_argnums=1)


@st.composite
def parents_of_a_tree(draw, num_nodes=N, depth=DEPTH):
    """Parents sorted by depth, no node deeper than ``depth``."""
    depths, parents = [0], [NO_PARENT]
    for node in range(1, num_nodes + 1):
        # A child of a node that is not less deep than the last parent, so that depths never fall.
        possible = [p for p in range(max(parents[-1], 0), node) if depths[p] < depth]
        parents.append(draw(st.sampled_from(possible)))
        depths.append(depths[parents[-1]] + 1)
    return tuple(parents)


@settings(max_examples=40, deadline=None)
@given(st.lists(parents_of_a_tree(), min_size=B, max_size=B), st.integers(0, 2**32 - 1))
def test_every_row_is_its_own_static_tree(rows, seed):
    random = np.random.default_rng(seed)
    trees = build(jnp.array(rows), DEPTH)
    assert trees.bounds == TreeBounds(N, DEPTH)
    assert (trees.size, trees.num_nodes, trees.is_chain) == (N + 1, N, False)
    tokens, valid = random.integers(0, 99, (B, N)), random.random((B, N)) < 0.7
    path_tokens, path_lengths = tree_paths(trees, jnp.asarray(tokens))
    whole, node = trees.whole_paths(jnp.asarray(valid)), random.integers(0, N + 1, B)
    path = trees.path_to(jnp.asarray(node))
    for row, parents in enumerate(rows):
        tree = DraftTree(parents)
        behind = DEPTH - tree.depth
        assert trees.parents[row].tolist() == list(parents)
        assert trees.depths[row].tolist() == list(tree.depths)
        np.testing.assert_array_equal(trees.ancestor_mask[row], tree.ancestor_mask)
        np.testing.assert_array_equal(trees.path_table[row], np.pad(tree.path_table, ((0, 0), (0, behind))))
        np.testing.assert_array_equal(whole[row], tree.whole_paths(jnp.asarray(valid[row : row + 1]))[0])
        np.testing.assert_array_equal(path[row], trees.path_table[row, node[row]])
        one_path, one_length = tree_paths(tree, jnp.asarray(tokens[row : row + 1]))
        for place, length in enumerate(one_length.tolist()):
            assert path_lengths[row, place] == length
            assert path_tokens[row, place, :length].tolist() == one_path[0, place, :length].tolist()
    assert build._cache_size() == 1


def test_swapped_parents_on_the_second_layer():
    """Case 119: the row's own parents count: depth = the parent's + 1, and the mask of that parent, not of one's place."""
    trees = build(jnp.array([[-1, 0, 0, 2, 1, 1, 2, 4], [-1, 0, 0, 1, 2, 2, 1, 5], [-1, 0, 0, 0, 3, 1, 2, 6]]), DEPTH)
    assert trees.depths.tolist() == [[0, 1, 1, 2, 2, 2, 2, 3], [0, 1, 1, 2, 2, 2, 2, 3], [0, 1, 1, 1, 2, 2, 2, 3]]
    assert np.flatnonzero(trees.ancestor_mask[0, 3]).tolist() == [0, 2, 3]
    assert np.flatnonzero(trees.ancestor_mask[1, 3]).tolist() == [0, 1, 3]
    assert [np.flatnonzero(row[7]).tolist() for row in trees.ancestor_mask] == [[0, 1, 4, 7], [0, 2, 5, 7], [0, 2, 6, 7]]


def make_draft(parents, valid, depth, **changes):
    trees = RowTrees.from_parents(jnp.array(parents), depth)
    num_nodes = trees.num_nodes
    draft = Draft(jnp.zeros(np.shape(valid), int), jnp.array(valid, bool), None, trees, (Law.DETERMINISTIC,) * num_nodes)
    return draft.replace(**changes)


def test_a_node_behind_an_invalid_parent_or_too_deep_is_not_valid():
    draft = make_draft([[-1, 0, 0, 1], [-1, 0, 1, 2], [-1, 0, 1, 1]], [[0, 1, 1], [1, 1, 1], [1, 0, 1]], depth=2)
    assert draft.checked().valid.tolist() == [[False, True, False], [True, True, False], [True, False, True]]
    # A parent that never leads to the root is no reason to hang, or to accept.
    assert make_draft([[-1, 2, 1]], [[1, 1]], depth=2).checked().valid.tolist() == [[False, False]]


def test_drafts_that_do_not_fit_their_trees():
    with pytest.raises(AssertionError, match=r"\(2, 3\)"):  # trees of one row for two
        make_draft([[-1, 0, 0]], [[1, 1], [1, 1]], depth=1).checked()
    with pytest.raises(ValueError, match="2 tokens and 2 laws for a tree of 3 draft nodes"):
        make_draft([[-1, 0, 0, 0]], [[1, 1]], depth=1, laws=(Law.DETERMINISTIC,) * 2).checked()
    with pytest.raises(AssertionError, match=r"\(1, 3, None\)"):  # any of the three nodes may have children
        make_draft([[-1, 0, 0]], [[1, 1]], depth=1, parent_log_probs=jnp.zeros((1, 1, 5))).checked()
    # No rule could use q: it may be left out.
    make_draft([[-1, 0, 0]], [[1, 1]], depth=1, laws=(Law.COUPLED,) * 2).checked()


@pytest.mark.parametrize(
    ("num_nodes", "depth", "message"),
    [
        (0, 1, "num_nodes is 0; it must be a whole number of at least 1"),
        (True, 1, "num_nodes is True; it must be a whole number of at least 1"),
        (3, 0, "depth is 0; it must be a whole number from 1 to the 3 of num_nodes"),
        (3, 4, "depth is 4; it must be a whole number from 1 to the 3 of num_nodes"),
        (3, 1.5, "depth is 1.5; it must be a whole number from 1 to the 3 of num_nodes"),
    ],
)
def test_bounds_that_no_tree_has(num_nodes, depth, message):
    with pytest.raises(ValueError, match=message):
        TreeBounds(num_nodes, depth)


def test_equal_bounds_are_one_to_a_compiler():
    assert len({TreeBounds(np.int64(3), 2), TreeBounds(3, 2), TreeBounds(3, 2)}) == 1
    assert TreeBounds(3, 2) != TreeBounds(3, 1)


def test_a_static_tree_has_no_leaves_and_is_told_from_another():
    assert jax.tree.leaves(DraftTree.chain(2)) == []
    traces = []

    @jax.jit
    def count(tree):
        traces.append(tree)
        return jnp.int32(tree.num_nodes)

    assert [int(count(DraftTree(parents))) for parents in ((-1, 0), (-1, 0), (-1, 0, 0), (-1, 0))] == [1, 1, 2, 1]
    assert traces == [DraftTree((-1, 0)), DraftTree((-1, 0, 0))]


@settings(max_examples=40, deadline=None)
@given(st.lists(parents_of_a_tree(), min_size=B, max_size=B), st.integers(0, 2**32 - 1))
def test_the_best_nodes_are_those_of_a_search(rows, seed):
    """Against taking the likeliest node whose parent is there, one after another."""
    random = np.random.default_rng(seed)
    # Some steps are certain: equal scores of parent and child.
    steps = np.log(random.choice([0.2, 0.4, 0.7, 1.0], size=(B, N)) * random.choice([1.0, 0.999], size=(B, N)))
    scores, parents = np.zeros((B, N), np.float32), np.array(rows)[:, 1:] - 1
    for node in range(N):
        before = np.where(parents[:, node] >= 0, np.take_along_axis(scores, parents[:, node, None], axis=1)[:, 0], 0)
        scores[:, node] = before + steps[:, node]
    chosen, of_tree = best_nodes(jnp.asarray(scores), jnp.asarray(parents), 4)
    for row in range(B):
        there = set()
        while len(there) < 4:
            open_nodes = [n for n in range(N) if n not in there and (parents[row, n] < 0 or parents[row, n] in there)]
            there.add(max(open_nodes, key=lambda n: (scores[row, n], -n)))
        assert chosen[row].tolist() == sorted(there)
        number = {-1: 0} | {candidate: place + 1 for place, candidate in enumerate(sorted(there))}
        assert of_tree[row].tolist() == [-1, *(number[parents[row, candidate]] for candidate in sorted(there))]
        DraftTree(tuple(of_tree[row].tolist()))
