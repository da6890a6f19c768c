import jax.numpy as jnp
import numpy as np
import pytest

from specjax.tree import ROOT, Draft, DraftTree, Law, count_valid_prefix


def test_a_tree_with_everything():
    #      0
    #    / | \
    #   1  2  3
    #  / \     \
    # 4   5     6
    #     |
    #     7
    tree = DraftTree((-1, 0, 0, 0, 1, 1, 3, 5))
    assert (tree.size, tree.num_nodes, tree.depth, tree.is_chain) == (8, 7, 3, False)
    assert tree.depths == (0, 1, 1, 1, 2, 2, 2, 3)
    assert tree.children == ((1, 2, 3), (4, 5), (), (6,), (), (7,), (), ())
    assert tree.inner_nodes == (0, 1, 3, 5)
    assert tree.paths == ((), (1,), (2,), (3,), (1, 4), (1, 5), (3, 6), (1, 5, 7))
    np.testing.assert_array_equal(
        tree.ancestor_mask,
        np.array(
            [
                [1, 0, 0, 0, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, 0, 0, 0],
                [1, 0, 1, 0, 0, 0, 0, 0],
                [1, 0, 0, 1, 0, 0, 0, 0],
                [1, 1, 0, 0, 1, 0, 0, 0],
                [1, 1, 0, 0, 0, 1, 0, 0],
                [1, 0, 0, 1, 0, 0, 1, 0],
                [1, 1, 0, 0, 0, 1, 0, 1],
            ],
            bool,
        ),
    )


def test_swapped_parents_on_the_second_layer():
    """Case 119: node 3 hangs below node 2 and node 4 below node 1."""
    tree = DraftTree((-1, 0, 0, 2, 1))
    assert tree.depths == (0, 1, 1, 2, 2)
    assert tree.ancestor_mask[3].tolist() == [True, False, True, True, False]
    assert tree.ancestor_mask[4].tolist() == [True, True, False, False, True]


@pytest.mark.parametrize("length", [0, 1, 4])
def test_a_chain(length):
    tree = DraftTree.chain(length)
    assert tree.parents == tuple(range(-1, length))
    assert tree.is_chain
    assert tree.depth == tree.num_nodes == length
    np.testing.assert_array_equal(tree.ancestor_mask, np.tril(np.ones((length + 1, length + 1), bool)))


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((), r"parents is \(\); it must start with the root's -1"),
        ((0, 0), r"parents is \(0, 0\); it must start with the root's -1"),
        ((-1, -1), r"node 1 has parent -1; a parent must come before its child \(0 <= parent < 1\)"),
        ((-1, 0, 2), r"node 2 has parent 2; a parent must come before its child \(0 <= parent < 2\)"),
        ((-1, 0, 3, 0), r"node 2 has parent 3; a parent must come before its child"),
    ],
)
def test_wrong_parents(parents, message):
    with pytest.raises(ValueError, match=message):
        DraftTree(parents)


def test_a_negative_chain():
    with pytest.raises(ValueError, match="length is -1; it must be a whole number of at least 0"):
        DraftTree.chain(-1)


def test_from_choices_orders_by_depth_and_rank():
    tree = DraftTree.from_choices([(1,), (0, 1), (0,), (2,), (0, 0), (0, 1, 0)])
    #                                nodes: (0,) (1,) (2,) (0,0) (0,1) (0,1,0)
    assert tree.parents == (-1, 0, 0, 0, 1, 1, 5)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([(0,), (0,)], r"path \(0,\) is listed twice"),
        ([(0,), (1, 0)], r"path \(1, 0\) has no parent; list \(1,\) too"),
        ([()], r"path \(\); it must hold ranks of at least 0"),
        ([(0,), (-1,)], r"path \(-1,\); it must hold ranks of at least 0"),
    ],
)
def test_wrong_choices(choices, message):
    with pytest.raises(ValueError, match=message):
        DraftTree.from_choices(choices)


def test_equal_trees_are_one_to_a_compiler():
    trees = {DraftTree([-1, 0, 0]), DraftTree(np.array([-1, 0, 0])), DraftTree((-1, 0, 0))}
    assert len(trees) == 1
    assert DraftTree((-1, 0, 1)) not in trees


def test_prefix():
    assert DraftTree((-1, 0, 0, 1)).prefix(2) == DraftTree((-1, 0, 0))


FORK = DraftTree((-1, 0, 0, 1))


def draft(valid, log_probs=None, law=Law.DETERMINISTIC, tokens=None):
    tokens = np.arange(np.size(valid), dtype=np.int16).reshape(np.shape(valid)) if tokens is None else tokens
    return Draft(jnp.asarray(tokens), jnp.asarray(valid), log_probs, FORK, (law,) * 3)


def test_a_node_behind_an_invalid_parent_is_not_valid():
    checked = draft([[False, True, True], [True, False, True], [True, True, False]]).checked()
    assert checked.valid.tolist() == [[False, True, False], [True, False, True], [True, True, False]]
    assert checked.tokens.dtype == jnp.int32
    assert checked.tokens.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_invalidity_reaches_through_generations():
    chain = Draft(
        jnp.zeros((1, 4), int), jnp.array([[True, False, True, True]]), None, DraftTree.chain(4), (Law.DETERMINISTIC,) * 4
    )
    assert chain.checked().valid.tolist() == [[True, False, False, False]]


def test_drafts_that_do_not_fit_their_tree():
    with pytest.raises(ValueError, match="2 tokens and 3 laws for a tree of 3 draft nodes"):
        draft(np.ones((1, 2), bool)).checked()
    with pytest.raises(ValueError, match="3 tokens and 2 laws for a tree of 3 draft nodes"):
        draft(np.ones((1, 3), bool)).replace(laws=(Law.DETERMINISTIC,) * 2).checked()
    with pytest.raises(ValueError, match="parent_log_probs is None; only deterministic drafts may leave it out"):
        draft(np.ones((1, 3), bool), law=Law.INDEPENDENT).checked()
    with pytest.raises(AssertionError, match=r"\(1, 3, 5\)"):  # the fork has two nodes with children
        draft(np.ones((1, 3), bool), jnp.zeros((1, 3, 5)), Law.INDEPENDENT).checked()


def test_an_empty_draft():
    empty = Draft.empty(3).checked()
    assert empty.tokens.shape == empty.valid.shape == (3, 0)
    assert empty.tree.parents == (-1,)
    assert ROOT == 0


def test_count_valid_prefix():
    valid = jnp.array([[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 0]], bool)
    assert count_valid_prefix(valid).tolist() == [3, 1, 0, 2]
    assert count_valid_prefix(valid).dtype == jnp.int32


def test_tables_of_a_tree():
    #      0
    #    /   \
    #   1     4
    #  / \    |
    # 2   3   5
    tree = DraftTree((-1, 0, 1, 1, 0, 4))
    assert tree.path_table.tolist() == [[0, 0], [1, 0], [1, 2], [1, 3], [4, 0], [4, 5]]
    assert tree.children_table.tolist() == [[1, 4], [2, 3], [0, 0], [0, 0], [5, 0], [0, 0]]
    assert tree.inner_index.tolist() == [0, 1, 0, 0, 2, 0]
    # Node 2 is the first of depth 2: a budget of one draft token holds node 1 alone.
    assert tree.nodes_within.tolist() == [0, 1, 5]
    assert DraftTree((-1, 0, 0, 1, 2, 3)).nodes_within.tolist() == [0, 2, 4, 5]
    root = DraftTree.chain(0)
    assert (root.path_table.shape, root.children_table.shape, root.inner_index.tolist()) == ((1, 0), (1, 0), [0])
    assert root.nodes_within.tolist() == [0]
    assert {table.dtype for table in (tree.path_table, tree.children_table, tree.inner_index, tree.nodes_within)} == {
        np.dtype("int32")
    }
