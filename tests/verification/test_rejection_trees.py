"""Literal cases of the rules that test several children: by hand, every row different."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.tree import Draft, DraftTree, Law
from specjax.verification import KSeq, MultiRound, Traversal, WithoutReplacement
from specjax.verification.kseq import common_factor
from tests.verification.scripted import Scripted

TWO = DraftTree((-1, 0, 0))
FORK = DraftTree((-1, 0, 0, 1))
P = [0.5, 0.3, 0.2]
Q = [0.2, 0.3, 0.5]


def log(values):
    return jnp.log(jnp.asarray(values, jnp.float32))


def draft_of(tree, tokens, q, law, valid=None):
    tokens = jnp.array(tokens)
    valid = jnp.ones(tokens.shape, bool) if valid is None else jnp.array(valid, bool)
    return Draft(tokens, valid, log(q), tree, (law,) * tree.num_nodes).checked()


def decided(rule, draft, p, coins):
    """Path, probabilities of the coins by row and node, what the next token is drawn from."""
    choices = Scripted(tokens=np.zeros((len(coins), draft.tree.size), int), coins=coins)
    verdict = rule(choices, draft, log(p))
    return verdict.path.tolist(), choices.probabilities(), np.asarray(choices.emitted)


def test_multi_round():
    """Both children drawn from q; the second is tested against what the first left: (.3, 0, 0) / .3."""
    # Rows: the first passes; the second does, which is sure; the second is what is left nothing of; two of the same.
    tokens = [[2, 0], [2, 0], [2, 1], [2, 2]]
    draft = draft_of(TWO, tokens, [[Q]] * 4, Law.INDEPENDENT)
    coins = [[0.39, 0], [0.41, 0.99], [0.41, 0.0], [0.41, 0.0]]
    path, asked, emitted = decided(MultiRound(), draft, [[P, [0.1, 0.2, 0.7], [0.7, 0.2, 0.1]]] * 4, coins)
    assert path == [[1], [2], [0], [0]]
    for row, coins in enumerate(({1: 0.4}, {1: 0.4, 2: 1}, {1: 0.4, 2: 0}, {1: 0.4, 2: 0})):
        assert asked[row] == pytest.approx(coins)
    # What is left after a second rejection: max((1, 0, 0) - q, 0), normalised.
    np.testing.assert_allclose(emitted, [[0.1, 0.2, 0.7], [0.7, 0.2, 0.1], [1, 0, 0], [1, 0, 0]], atol=1e-6)


def test_without_replacement():
    """The second child was drawn from q less the first: (.2, .3, 0) / .5 after token 2."""
    p, q = [0.4, 0.5, 0.1], Q
    draft = draft_of(TWO, [[2, 1], [2, 1], [2, 0], [1, 2]], [[q]] * 4, Law.WITHOUT_REPLACEMENT)
    coins = [[0.19, 0], [0.21, 0.82], [0.21, 0.99], [0.99, 0.0]]
    path, asked, emitted = decided(WithoutReplacement(), draft, [[p, P, Q]] * 4, coins)
    # Left after token 2: (.2, .2, 0) / .4, that is (.5, .5, 0); token 1 has 5/6 of .6, token 0 all of .4.
    assert path == [[1], [2], [2], [1]]
    assert asked[0] == pytest.approx({1: 0.2})
    assert asked[1] == pytest.approx({1: 0.2, 2: 0.5 / 0.6})
    assert asked[2] == pytest.approx({1: 0.2, 2: 1})
    assert asked[3] == pytest.approx({1: 1})
    np.testing.assert_allclose(emitted, [P, Q, Q, P], atol=1e-6)
    path, asked, emitted = decided(WithoutReplacement(), draft, [[p, P, Q]] * 4, [[0.21, 0.84]] * 3 + [[0.0, 0.0]])
    assert path == [[0], [0], [2], [1]]
    # max((.5, .5, 0) - (.4, .6, 0), 0)
    np.testing.assert_allclose(emitted[0], [1, 0, 0], atol=1e-6)


def test_all_children_without_replacement_always_cover_the_target():
    """K = V: one of them is accepted, whatever the coins."""
    tree = DraftTree((-1, 0, 0, 0))
    draft = draft_of(tree, [[0, 1, 2], [2, 1, 0], [1, 2, 0]], [[Q]] * 3, Law.WITHOUT_REPLACEMENT)
    almost = [[0.9999] * 3] * 3
    path, _, _ = decided(WithoutReplacement(), draft, [[P] * 4] * 3, almost)
    assert all(row != [0] for row in path)


def test_a_sibling_that_was_not_drafted_took_nothing_away():
    """Of a tree that is numbered in depth a budget may leave out any later node; rows draft none, one or both children."""
    draft = draft_of(TWO, [[2, 0]] * 4, [[Q]] * 4, Law.WITHOUT_REPLACEMENT, [[0, 0], [1, 0], [1, 1], [0, 1]])
    path, asked, emitted = decided(WithoutReplacement(), draft, [[[0.1, 0.3, 0.6], Q, P]] * 4, [[0.9999, 0.9]] * 4)
    assert path == [[0], [1], [1], [0]]
    # In the last row token 0 was drawn from all of q, not from q less token 2: .1 / .2.
    assert asked == {1: pytest.approx({1: 1}), 2: pytest.approx({1: 1}), 3: pytest.approx({2: 0.5})}
    np.testing.assert_allclose(emitted[[0, 3]], [[0.1, 0.3, 0.6], [0, 0, 1]], atol=1e-6)


def test_traversal_of_a_fork():
    """Node 1 has w = .2 / .5 = .4, node 3 below it .4 * .6 / .4 = .6.

    If node 3 is rejected, max(.4 p - q, 0) at node 1 is (0, .02, 0): its p becomes (0, 1, 0), w = .02 / (.02 + 1 - .4) = 1 / 31.
    If node 1 is rejected too, the root's p becomes (1, 0, 0), and w = .3 / (.3 + 1 - 1) = 1.
    """
    q1, p = [0.5, 0.1, 0.4], [P, [0.1, 0.3, 0.6], Q, [0.7, 0.2, 0.1]]
    draft = draft_of(FORK, [[2, 0, 2], [2, 0, 2], [2, 0, 2], [2, 1, 2]], [[Q, q1]] * 4, Law.INDEPENDENT)
    coins = [[0, 0, 0.59], [0.032, 0, 0.61], [0.033, 0.9999, 0.61], [0.033, 0.0, 0.61]]
    path, asked, emitted = decided(Traversal(), draft, [p] * 4, coins)
    assert path == [[1, 3], [1, 0], [2, 0], [0, 0]]
    coins = [{3: 0.6}, {3: 0.6, 1: 1 / 31}, {3: 0.6, 1: 1 / 31, 2: 1}, {3: 0.6, 1: 1 / 31, 2: 0}]
    for row, expected in enumerate(coins):
        assert {node: asked[row][node] for node in expected} == pytest.approx(expected, abs=1e-6)
        assert not any(asked[row][node] for node in set(asked[row]) - set(expected))
    np.testing.assert_allclose(emitted, [p[3], [0, 1, 0], Q, [1, 0, 0]], atol=1e-6)


def test_kseq():
    """p = (1/2, 1/2), q = (1, 0): two children have rho = 1 / (2 - sqrt 2), one has 1; then p = q, and nothing in common."""
    tokens, valid = [[0, 0], [0, 0], [1, 0], [0, 0], [0, 0]], [[1, 1], [1, 0], [1, 1], [1, 1], [0, 0]]
    half, sure = [0.5, 0.5], [1.0, 0.0]
    draft = draft_of(TWO, tokens, [[sure], [sure], [[0.3, 0.7]], [sure], [sure]], Law.INDEPENDENT, valid)
    p = [[half] * 3, [half] * 3, [[0.3, 0.7]] * 3, [[0.0, 1.0]] * 3, [half] * 3]
    coins = [[0.293, 0.293], [0.51, 0.0], [0.9999, 0.0], [0.0, 0.0], [0.0, 0.0]]
    path, asked, emitted = decided(KSeq(), draft, p, coins)
    assert path == [[0], [0], [1], [0], [0]]
    share = 1 - 0.5**0.5
    assert asked == {
        0: pytest.approx({1: share, 2: share}, abs=1e-6),
        1: pytest.approx({1: 0.5}, abs=1e-6),
        2: pytest.approx({1: 1.0}, abs=1e-6),
        3: {1: 0, 2: 0},
    }
    np.testing.assert_allclose(emitted, [[0, 1], [0, 1], [0.3, 0.7], [0, 1], half], atol=1e-6)


def test_the_common_factor_where_p_and_q_are_close():
    """In float32 a sum of almost 1 says nothing about what is missing; with equal p and q every child must pass."""
    p = np.random.default_rng(0).dirichlet(np.ones(500), 3).astype(np.float32)
    rho, _, passes = common_factor(jnp.asarray(p), jnp.asarray(p), jnp.array([1, 2, 8]))
    np.testing.assert_allclose(rho, 1, atol=1e-6)
    np.testing.assert_allclose(passes, 1, atol=1e-6)
    assert rho.dtype == passes.dtype == jnp.float32


def test_the_common_factor_is_the_smallest_that_is_right():
    random = np.random.default_rng(1)
    p, q = (jnp.asarray(random.dirichlet(np.ones(7), 6), jnp.float32) for _ in range(2))
    rho, beta, passes = common_factor(p, q, jnp.array([1, 2, 3, 4, 5, 6]))
    np.testing.assert_allclose(beta, jnp.sum(jnp.minimum(q, p / rho[:, None]), axis=1), atol=1e-6)
    np.testing.assert_allclose(passes, 1 - (1 - beta) ** jnp.arange(1, 7), atol=1e-6)
    np.testing.assert_allclose(passes, rho * beta, atol=1e-5)
    assert np.all((rho >= 1) & (rho <= jnp.arange(1, 7)))
