"""Invariant 1 (lossless): every built-in rule, once for each shape that it takes, over two rounds; and how much each accepts.

``specjax certify --table`` goes through all laws; its results are in docs/measurements/certificates.json.
"""

import functools

import pytest

from specjax.certificates import certify
from specjax.certificates.tiny import NUM_DISTRIBUTIONS, constant_model, table_drafter
from specjax.certificates.tiny_row_trees import row_tree_drafter
from specjax.certificates.wrong_rules import BlockRule, SiblingRule, TokenRule
from specjax.row_trees import TreeBounds
from specjax.tree import DraftTree, Law
from specjax.verification import CHAIN, ROW_TREE, RULES, TREE

CHAIN_OF_1, CHAIN_OF_2 = DraftTree.chain(1), DraftTree.chain(2)
FORK = DraftTree((-1, 0, 0, 1))
SEEDS = (0, 1, 2)


@functools.cache
def certificate(rule, tree, seed=0):
    """Certificates of one rule, tree and law share their compiled code, whatever the seed."""
    drafter = row_tree_drafter if isinstance(tree, TreeBounds) else table_drafter
    return certify(rule, drafter=drafter(tree, seed=seed + 1), seed=seed)


def tokens(*arguments, **options):
    return certificate(*arguments, **options).expected_tokens


@pytest.mark.parametrize(("rule", "shape"), [(name, shape) for name, rule in RULES.items() for shape in sorted(rule.shapes)])
def test_every_rule_is_what_it_claims(rule, shape):
    found = certificate(rule, {CHAIN: CHAIN_OF_2, TREE: FORK, ROW_TREE: TreeBounds(num_nodes=3, depth=2)}[shape])
    if RULES[rule].lossless:
        assert found.lossless, found.counterexample
        assert found.max_error <= (0 if RULES[rule].seed_stable else 1e-12)
        assert found.counterexample is None
    else:
        assert found.max_error > 1e-3
        assert "instead of" in found.counterexample
    assert 1 < found.expected_tokens < 3


@pytest.mark.parametrize("seed", SEEDS)
def test_longer_looks_accept_more(seed):
    """token <= block is promised (Sun et al. 2024, section 4), and traversal of a chain is block verification."""
    token, block, traversal = (tokens(rule, CHAIN_OF_2, seed=seed) for rule in ("token", "block", "traversal"))
    assert token <= block + 1e-12
    assert block == pytest.approx(traversal, abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_with_one_draft_token_block_is_token(seed):
    assert tokens("block", CHAIN_OF_1, seed=seed) == pytest.approx(tokens("token", CHAIN_OF_1, seed=seed), abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_traversal_accepts_no_less_than_top_down(seed):
    """Not promised for every tree, but so on all of these."""
    assert tokens("without_replacement", FORK, seed=seed) <= tokens("traversal", FORK, seed=seed) + 1e-12


@pytest.mark.parametrize(
    ("rule", "expected"), [("token", 19 / 9), (TokenRule(), 19 / 9), ("block", 20 / 9), (BlockRule(), 20 / 9)]
)
def test_published_values(rule, expected):
    """Sun et al. 2024 (arXiv:2403.10444): 10/9 and 11/9 accepted of two, and one more token. A third token is never drawn."""
    drafter = table_drafter(CHAIN_OF_2, [[2 / 3, 1 / 3, 0]] * NUM_DISTRIBUTIONS)
    found = certify(rule, target=constant_model([1 / 3, 2 / 3, 0]), drafter=drafter, law=Law.INDEPENDENT)
    assert found.lossless, found.counterexample
    assert found.expected_tokens == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("again", "shipped", "tree"),
    [
        (TokenRule(), "token", CHAIN_OF_2),
        (BlockRule(), "block", CHAIN_OF_2),
        (SiblingRule(), "without_replacement", FORK),
    ],
)
def test_rules_written_a_second_time(again, shipped, tree):
    """They are right, and accept as often as the shipped ones: the mutants made of them are wrong for their mistake alone."""
    assert certificate(again, tree, seed=2).lossless
    assert tokens(again, tree, seed=2) == pytest.approx(tokens(shipped, tree, seed=2), abs=1e-12)
