"""Trees from accuracies, against every tree there is."""

import functools

import numpy as np
import pytest

from specjax.tree import DraftTree
from specjax.tree_shapes import best_tree, expected_tokens, greedy_product_tree, sequoia_tree


def random_table(seed, depth=3, width=3, falling=True):
    """Chances that add up to less than 1; they fall with the rank, or not."""
    rng = np.random.default_rng(seed)
    table = rng.dirichlet(np.ones(width + 1), size=depth)[:, :width]
    return -np.sort(-table, axis=1) if falling else table


@functools.cache
def shapes(num_nodes, depth, width):
    """All ordered trees of so many draft nodes, as nested tuples of children."""
    if num_nodes == 0:
        return [()]
    if depth == 0 or width == 0:
        return []
    found = []
    # The first child and what is below it, then its siblings.
    for below in range(num_nodes):
        for first in shapes(below, depth - 1, FULL):
            found += [(first, *rest) for rest in shapes(num_nodes - 1 - below, depth, width - 1)]
    return found


FULL = 3
"""Width of the trees that are gone through."""


def value(shape, table, level=0):
    """Expected tokens of a nested tuple, by recursion."""
    return 1 + sum(table[level][rank] * value(child, table, level + 1) for rank, child in enumerate(shape))


def of(tree, node=0):
    return tuple(of(tree, child) for child in tree.children[node])


def test_there_are_as_many_trees_as_there_should_be():
    # Catalan numbers, less the one tree that is too wide.
    assert [len(shapes(n, 4, 4)) for n in range(4)] == [1, 1, 2, 5]
    assert len(set(shapes(4, 4, 3))) == 14 - 1


@pytest.mark.parametrize("falling", [True, False])
@pytest.mark.parametrize("num_nodes", range(1, 8))
def test_sequoia_is_the_best_of_all_trees(num_nodes, falling):
    for seed in range(3):
        table = random_table(seed, falling=falling)
        for max_depth in (1, 2, 3):
            trees = shapes(num_nodes, max_depth, FULL)
            if not trees:
                with pytest.raises(ValueError, match=f"num_nodes is {num_nodes}; a tree of {max_depth} levels"):
                    sequoia_tree(table, num_nodes, max_depth)
                continue
            best = max(value(shape, table) for shape in trees)
            tree, tokens = sequoia_tree(table, num_nodes, max_depth)
            assert (tree.num_nodes, tree.depth <= max_depth) == (num_nodes, True)
            assert tokens == pytest.approx(best, abs=1e-12)
            assert value(of(tree), table) == pytest.approx(best, abs=1e-12)
            assert expected_tokens(tree, table) == pytest.approx(best, abs=1e-12)


def test_the_same_acceptance_at_every_depth():
    acceptance = [0.5, 0.3, 0.1]
    for num_nodes in range(1, 8):
        best = max(value(shape, [acceptance] * 7) for shape in shapes(num_nodes, 7, FULL))
        assert sequoia_tree(acceptance, num_nodes)[1] == pytest.approx(best, abs=1e-12)
        assert sequoia_tree(np.tile(acceptance, (7, 1)), num_nodes)[1] == pytest.approx(best, abs=1e-12)
    # At most one level: the children in order.
    assert sequoia_tree(acceptance, 3, max_depth=1) == (DraftTree((-1, 0, 0, 0)), pytest.approx(1.9))


def test_greedy_is_the_best_tree_where_accuracies_fall_with_the_rank():
    for seed in range(20):
        table = random_table(seed, depth=4, width=4)
        for num_nodes in (1, 2, 5, 11, 23):
            tree = greedy_product_tree(table, num_nodes)
            assert tree.num_nodes == num_nodes
            assert expected_tokens(tree, table) == pytest.approx(sequoia_tree(table, num_nodes)[1], abs=1e-12)


def test_greedy_adds_the_best_next_node():
    table = [[0.6, 0.3, 0.05], [0.5, 0.2, 0.1]]
    # 0.6, 0.3 (of two equal ones the shallower), 0.3, 0.15, 0.12, 0.06, 0.06, 0.05, ...
    order = [(0,), (1,), (0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (2,), (1, 2), (2, 0)]
    for size in range(1, len(order) + 1):
        assert greedy_product_tree(table, size) == DraftTree.from_choices(order[:size])
    full = greedy_product_tree(table, 12)
    assert of(full) == (((), (), ()),) * 3


def test_a_rank_of_no_chance_comes_last_and_hides_no_better_one_for_long():
    table = [[0.5, 0.0, 0.4]]
    assert greedy_product_tree(table, 3) == DraftTree((-1, 0, 0, 0))
    assert greedy_product_tree([[0.0, 0.9], [0.5, 0.5]], 6) == DraftTree((-1, 0, 0, 1, 1, 2, 2))
    assert sequoia_tree(table, 3)[1] == pytest.approx(1.9)


def test_children_stand_in_the_order_of_their_ranks():
    tree, _ = sequoia_tree([[0.5, 0.3], [0.9, 0.05]], 4)
    # Both children of the root go on; the better one is child 1, and its own child is node 3.
    assert tree.parents == (-1, 0, 0, 1, 2)


def test_many_nodes():
    table = random_table(1, depth=6, width=8)
    tree, tokens = sequoia_tree(table, 128)
    assert expected_tokens(tree, table) == pytest.approx(tokens)
    assert tokens == pytest.approx(expected_tokens(greedy_product_tree(table, 128), table))


# Measured costs

ACCURACIES = [[0.6, 0.15, 0.06], [0.5, 0.12, 0.06], [0.4, 0.1, 0.06]]
# Seconds of a pass: two cores in bfloat16, and a device that is bound by reading the weights.
CPU = {1: 0.045, 2: 0.060, 4: 0.068, 8: 0.092, 16: 0.129, 32: 0.22}
TPU = {1: 0.0020, 8: 0.0020, 16: 0.0021, 32: 0.0022}


def fastest(verify, draft=(0.0, 0.0, 0.0)):
    """Tokens per second of the fastest of all trees of at most 7 draft nodes, and of plain decoding."""
    sizes = sorted(verify)
    found = {}
    for num_nodes in range(8):
        for shape in shapes(num_nodes, 3, FULL):
            depth = max([0, *(1 + deep(child) for child in shape)])
            seconds = float(np.interp(num_nodes + 1, sizes, [verify[size] for size in sizes])) + sum(draft[:depth])
            found[shape] = value(shape, ACCURACIES) / seconds
    return max(found.values())


def deep(shape):
    return max((1 + deep(child) for child in shape), default=0)


@pytest.mark.parametrize("draft", [0.0, 0.004, (0.01, 0.0, 0.0), (0.0, 0.0, 1.0)])
@pytest.mark.parametrize("verify", [CPU, TPU, {1: 0.01, 3: 0.011, 5: 0.03}], ids=["cpu", "tpu", "steps"])
def test_the_fastest_of_all_trees(verify, draft):
    verify = {size: seconds for size, seconds in verify.items() if size <= 8}
    choice = best_tree(ACCURACIES, verify, draft)
    by_level = [draft] * 3 if isinstance(draft, float) else draft
    assert choice.tokens_per_second == pytest.approx(fastest(verify, by_level), rel=1e-12)
    assert choice.expected_tokens == pytest.approx(expected_tokens(choice.tree, ACCURACIES), abs=1e-12)
    sizes = sorted(verify)
    seconds = np.interp(choice.tree.size, sizes, [verify[size] for size in sizes]) + sum(by_level[: choice.tree.depth])
    assert choice.seconds == pytest.approx(seconds)


def test_a_cpu_and_a_tpu_get_different_trees():
    cpu, tpu = best_tree(ACCURACIES, CPU, 0.001), best_tree(ACCURACIES, TPU, 0.0001)
    assert 1 <= cpu.tree.num_nodes <= 4
    assert tpu.tree.num_nodes >= 12
    assert tpu.expected_tokens > cpu.expected_tokens
    # None is larger than what was measured.
    assert tpu.tree.size <= 32


def test_plain_decoding_where_nothing_is_faster():
    for verify, draft in (({1: 0.01, 2: 0.02, 9: 0.03}, 0.0), (TPU, 1.0), ({1: 0.01}, 0.0)):
        choice = best_tree([[0.5, 0.1], [0.4, 0.1]], verify, draft)
        assert (choice.tree, choice.expected_tokens, choice.seconds) == (DraftTree.chain(0), 1.0, verify[1])


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (greedy_product_tree, ([[0.5, 1.2]], 1), r"greedy_product_tree: accuracies holds 1.2; chances lie in \[0, 1\]"),
        (greedy_product_tree, ([[0.5, -0.1]], 1), "accuracies holds -0.1"),
        (greedy_product_tree, ([[float("nan")]], 1), "accuracies holds nan"),
        (
            greedy_product_tree,
            ([[0.5, 0.6]], 1),
            "at depth 0 add up to 1.1; .*of top-k accuracies take the",
        ),
        (greedy_product_tree, ([0.5], 1), r"accuracies has shape \(1,\); it must be an array \[D, R\], not empty"),
        (greedy_product_tree, ([[]], 1), r"accuracies has shape \(1, 0\)"),
        (greedy_product_tree, ([[0.5], [0.5, 0.1]], 1), "it must be an array .* of numbers"),
        (greedy_product_tree, (None, 1), "accuracies"),
        (greedy_product_tree, ([[0.5]], 0), "num_nodes is 0; it must be a whole number of at least 1"),
        (greedy_product_tree, ([[0.5]], True), "num_nodes is True; it must be a whole number"),
        (greedy_product_tree, ([[0.5, 0.2]], 2.0), "num_nodes is 2.0; it must be a whole number"),
        (greedy_product_tree, ([[0.5, 0.2]] * 2, 7), "num_nodes is 7; a tree of 2 levels and 2 ranks has at most 6"),
        (sequoia_tree, ([0.5], 0), "sequoia_tree: num_nodes is 0"),
        (sequoia_tree, ([0.5], 2, 0), "max_depth is 0; it must be a whole number of at least 1"),
        (sequoia_tree, ([[0.5]] * 2, 2, 3), "max_depth is 3; acceptance is given for 2 depths"),
        (sequoia_tree, ([], 2), "acceptance has shape"),
        (sequoia_tree, ([0.7, 0.7], 2), "acceptance at depth 0 add up to 1.4"),
        (expected_tokens, (3, [0.5]), "tree is 3; it must be a DraftTree"),
        (expected_tokens, (DraftTree.chain(2), [[0.5]]), r"accuracies have shape \(1, 1\); a tree of depth 2 with up to 1"),
        (expected_tokens, (DraftTree((-1, 0, 0)), [0.5]), "with up to 2 children needs at least"),
        (
            best_tree,
            ([[0.5]], {2: 0.1}),
            "is {2: 0.1}; it must map sizes of a pass, 1 among them, to seconds above 0",
        ),
        (best_tree, ([[0.5]], {1: 0.0}), "verify_seconds is {1: 0.0}"),
        (best_tree, ([[0.5]], [0.1]), r"verify_seconds is \[0.1\]"),
        (best_tree, ([[0.5]], {1: 0.1, 2.5: 0.2}), "verify_seconds"),
        (
            best_tree,
            ([[0.5]], {1: 0.1}, -1),
            "draft_seconds is -1; it must be a number of at least 0, or 1, one per level",
        ),
        (best_tree, ([[0.5]], {1: 0.1}, [0.1, 0.1]), "draft_seconds is"),
    ],
)
def test_bad_input(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(*arguments)
