import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.certificates import Branches, EnumeratingChoices, branch_out
from specjax.choices import KeyedChoices, Stream
from specjax.tree import Draft, DraftTree, Law
from specjax.verification import Token, residual_log_probs
from specjax.verification.proposal import one_hot_log_probs
from tests.verification.scripted import Scripted

INDEPENDENT = Law.INDEPENDENT


def log(probabilities, dtype=jnp.float32):
    return jnp.log(jnp.asarray(probabilities, dtype))


def chain_draft(tokens, proposed=None, valid=None, laws=None):
    tokens = jnp.array(tokens)
    length = tokens.shape[1]
    valid = jnp.ones(tokens.shape, bool) if valid is None else jnp.array(valid, bool)
    laws = laws or ((Law.DETERMINISTIC if proposed is None else INDEPENDENT),) * length
    return Draft(tokens, valid, None if proposed is None else log(proposed), DraftTree.chain(length), laws).checked()


@pytest.mark.parametrize(
    ("p", "q", "residual"),
    [
        ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [1, 0, 0]),
        ([0.6, 0.4, 0.0], [0.2, 0.2, 0.6], [2 / 3, 1 / 3, 0]),
        ([0.5, 0.3, 0.2], [1, 0, 0], [0, 0.6, 0.4]),
        ([0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.5, 0.3, 0.2]),  # nowhere positive: p
        ([0.5, 0.3, 0.2], [np.nan, 0.5, 0.5], [0.5, 0.3, 0.2]),  # no distribution: p
        ([0.5, 0.3, 0.2], [np.inf, 0.5, 0.5], [0.5, 0.3, 0.2]),
    ],
)
def test_residual(p, q, residual):
    np.testing.assert_allclose(jnp.exp(residual_log_probs(log([p]), log([q]))), [residual], atol=2e-7)


def test_residual_rows_are_independent():
    p, q = [[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.2, 0.2, 0.6]], [[0.2, 0.3, 0.5], [np.nan] * 3, [0.2, 0.2, 0.6]]
    np.testing.assert_allclose(
        jnp.exp(residual_log_probs(log(p), log(q))), [[1, 0, 0], [0.1, 0.1, 0.8], [0.2, 0.2, 0.6]], atol=2e-7
    )


def test_one_hot():
    assert jnp.exp(one_hot_log_probs(jnp.array([[2, 0], [1, 1]]), 3, jnp.float32)).tolist() == [
        [[0, 0, 1], [1, 0, 0]],
        [[0, 1, 0], [0, 1, 0]],
    ]


P = [0.5, 0.3, 0.2]
Q = [0.2, 0.3, 0.5]


def test_what_is_asked_and_decided():
    """Three nodes with distributions of their own; a row for every place where it may end."""
    p = [[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5], [0.7, 0.2, 0.1]]
    q = [[0.2, 0.3, 0.5], [0.5, 0.3, 0.2], [0.5, 0.4, 0.1]]
    draft = chain_draft([[2, 0, 1]] * 4, [q] * 4)
    ratios = [0.4, 0.2, 0.625]
    coins = [[0.41, 0.0, 0.0], [0.39, 0.21, 0.0], [0.39, 0.19, 0.63], [0.39, 0.19, 0.62]]
    choices = Scripted(tokens=[[10, 11, 12, 13]] * 4, coins=coins)
    verdict = Token()(choices, draft, log([p] * 4))
    assert verdict.num_accepted.tolist() == [0, 1, 2, 3]
    assert verdict.path.tolist() == [[0, 0, 0], [1, 0, 0], [1, 2, 0], [1, 2, 3]]
    assert verdict.next_token.tolist() == [10, 11, 12, 13]
    # No coin behind a rejection.
    for row, coins in choices.probabilities().items():
        assert coins == pytest.approx(dict(zip((1, 2, 3)[: row + 1], ratios, strict=False)))
    assert choices.asked[-1][:2] == ("EMIT", [0, 1, 2, 3])
    # max(p - q, 0), normalised, of the node that the row ended at; the bonus token comes from p.
    np.testing.assert_allclose(choices.emitted, [[1, 0, 0], [0, 0.75, 0.25], [0, 0, 1], [0.7, 0.2, 0.1]], atol=1e-5)


def test_rows_with_fewer_valid_drafts():
    """Where nothing was drafted nothing was rejected: the token comes from p, whatever stale q stands there."""
    draft = chain_draft([[2, 2]] * 4, [[Q, Q]] * 4, valid=[[0, 0], [1, 0], [1, 1], [0, 1]])
    choices = Scripted(tokens=[[0, 1, 2]] * 4, coins=[[0.1, 0.1]] * 4)
    verdict = Token()(choices, draft, log([[P, [0.1, 0.2, 0.7], [0.3, 0.3, 0.4]]] * 4))
    assert verdict.num_accepted.tolist() == [0, 1, 2, 0]
    np.testing.assert_allclose(choices.emitted, [P, [0.1, 0.2, 0.7], [0.3, 0.3, 0.4], P], rtol=1e-5)


def test_deterministic_drafts_are_accepted_with_their_probability():
    draft = chain_draft([[1, 2]])
    choices = Scripted(tokens=[[0, 0, 0]], coins=[[0.29, 0.21]])
    verdict = Token()(choices, draft, log([[P, P, P]]))
    assert choices.probabilities()[0] == pytest.approx({1: 0.3, 2: 0.2})
    assert verdict.num_accepted.tolist() == [1]
    np.testing.assert_allclose(choices.emitted, [[0.625, 0.375, 0]], rtol=1e-6)


def test_laws_may_differ_by_node():
    """The stored q of a deterministic node is not looked at (case 75)."""
    draft = chain_draft([[0, 0]], [[[0.51, 0.49], [0.8, 0.2]]], laws=(Law.DETERMINISTIC, INDEPENDENT))
    choices = Scripted(tokens=[[0, 0, 0]], coins=[[0.5, 0.99]])
    Token()(choices, draft, log([[[0.51, 0.49], [0.4, 0.6], [0.5, 0.5]]]))
    assert choices.probabilities()[0] == pytest.approx({1: 0.51, 2: 0.5})


def test_nothing_drafted():
    choices = Scripted(tokens=[[2], [1]])
    verdict = Token()(choices, Draft.empty(2), log([[P], [Q]]))
    assert (verdict.path.shape, verdict.num_accepted.tolist(), verdict.next_token.tolist()) == ((2, 0), [0, 0], [2, 1])


def marginals(p, q, drafted=None, dtype=jnp.float64):
    """Exact probabilities [V] of the first emitted token and the probability that the draft is accepted.

    The draft is drawn from ``q`` or, where given, always ``drafted``.
    """
    choices = EnumeratingChoices()
    vocab_size = len(p)

    def step(state):
        batch = state.shape[0]
        target, proposed = (jnp.tile(log(values, dtype)[None], (batch, 1)) for values in (p, q))
        if drafted is None:
            token = choices.categorical(Stream.DRAFT, 1, proposed)
        else:
            token = jnp.full((batch,), drafted, jnp.int32)
        draft = Draft(token[:, None], jnp.ones((batch, 1), bool), proposed[:, None], DraftTree.chain(1), (INDEPENDENT,))
        verdict = Token()(choices, draft, jnp.stack([target, target], axis=1))
        first = jnp.where(verdict.num_accepted == 1, token, verdict.next_token)
        return jnp.stack([first, verdict.num_accepted], axis=1).astype(jnp.int32)

    with jax.enable_x64(True):
        end = branch_out(
            jax.jit(step), choices, Branches.start(np.zeros((1, 2), np.int32), 1), np.zeros(1, int), np.ones(1, bool)
        )
    assert end.probabilities.sum() == pytest.approx(1, abs=1e-14)
    first = [end.probabilities[end.state[:, 0] == token].sum() for token in range(vocab_size)]
    return first, end.probabilities[end.state[:, 1] == 1].sum()


def test_the_first_token_has_the_targets_distribution():
    """Case 69: softmax of the residual would give .321, .390, .290."""
    first, accepted = marginals(P, Q)
    np.testing.assert_allclose(first, P, atol=1e-15)
    assert accepted == pytest.approx(0.7, abs=1e-14)


def test_filtered_tokens_never_come():
    """Case 71: the target is filtered to ids 0 and 1, the drafter is not."""
    first, accepted = marginals([4 / 7, 3 / 7, 0, 0], [0.1, 0.2, 0.3, 0.4])
    np.testing.assert_allclose(first, [4 / 7, 3 / 7, 0, 0], atol=1e-15)
    assert accepted == pytest.approx(0.3, abs=1e-14)


def test_greedy_rejects_what_is_not_the_argmax():
    """Case 57: the draft's top token is 0, the target's is 1; a ratio of soft p would accept 0."""
    assert marginals([0, 1, 0], [0.4, 0.3, 0.3], drafted=0) == ([0, 1, 0], 0)


def test_a_broken_q_is_a_rejection():
    """Case 106: the rejected token is not emitted again."""
    first, accepted = marginals([0, 0.97, 0.03], [np.nan] * 3, drafted=0)
    np.testing.assert_allclose(first, [0, 0.97, 0.03], atol=1e-15)
    assert accepted == 0


@pytest.mark.parametrize("q", [0.0, np.nan, np.inf])
def test_impossible_tokens_are_never_accepted(q):
    choices = Scripted(tokens=[[1, 1]], coins=[[0.0]])
    draft = chain_draft([[0]], [[[q, 0.5, 0.5]]])
    verdict = Token()(choices, draft, log([[[0.0, 0.6, 0.4], P]]))
    assert verdict.num_accepted.tolist() == [0]
    np.testing.assert_allclose(choices.emitted[0, 0], 0)
    assert np.isfinite(choices.emitted).all()


@pytest.mark.parametrize(("drafted", "accepted"), [(1, 4), (0, 0)])
def test_accepted_counts(drafted, accepted):
    """Case 131: with K = 4, 5 tokens and 1 token."""
    draft = chain_draft(np.full((2, 4), drafted))
    choices = KeyedChoices.from_seeds([1, 2], jnp.array([3, 3]))
    assert jax.jit(Token().__call__)(choices, draft, log(np.tile([0.0, 1.0], (2, 5, 1)))).num_accepted.tolist() == [accepted] * 2
