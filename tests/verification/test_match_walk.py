import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.choices import KeyedChoices
from specjax.tree import Draft, DraftTree, Law
from specjax.verification import Greedy, Gumbel, Match, match_walk

FORK = DraftTree((-1, 0, 0, 1))


def make_draft(tree, tokens, valid=None):
    tokens = jnp.array(tokens)
    valid = jnp.ones(tokens.shape, bool) if valid is None else jnp.array(valid, bool)
    return Draft(tokens, valid, None, tree, (Law.DETERMINISTIC,) * tree.num_nodes).checked()


def walk(draft, wanted):
    """Verdict where the target's token of row b at node i is ``wanted[b][i]``."""
    wanted = jnp.array(wanted)
    target = jax.nn.one_hot(wanted, 10)

    def draw(node, level, probs):
        np.testing.assert_array_equal(jnp.argmax(probs, -1), jnp.take_along_axis(wanted, node[:, None], axis=1)[:, 0])
        return jnp.argmax(probs, -1)

    with jax.disable_jit():
        verdict = match_walk(draw, draft, target)
    return verdict.path.tolist(), verdict.num_accepted.tolist(), verdict.next_token.tolist()


def test_a_chain_row_by_row():
    draft = make_draft(DraftTree.chain(3), [[1, 2, 3]] * 5)
    wanted = [
        [9, 2, 3, 4],  # nothing accepted; what follows does not matter
        [1, 9, 3, 4],
        [1, 2, 9, 4],
        [1, 2, 3, 4],  # all accepted, 4 is the bonus token
        [2, 1, 3, 4],  # tokens of other depths are no match
    ]
    assert walk(draft, wanted) == ([[0, 0, 0], [1, 0, 0], [1, 2, 0], [1, 2, 3], [0, 0, 0]], [0, 1, 2, 3, 0], [9, 9, 9, 4, 2])


def test_a_fork_row_by_row():
    # Node 1 (token 1) has the child 3 (token 3), node 2 (token 2) has none.
    draft = make_draft(FORK, [[1, 2, 3]] * 5)
    wanted = [
        [1, 3, 9, 7],  # down the deep branch, then the bonus token of node 3
        [1, 8, 9, 7],  # leaves it after node 1
        [2, 9, 8, 7],  # the branch that is not first: the bonus token of node 2
        [3, 9, 8, 7],  # 3 is a grandchild, not a child
        [2, 3, 3, 7],  # node 2 has no children: 3 is its bonus token
    ]
    assert walk(draft, wanted) == ([[1, 3], [1, 0], [2, 0], [0, 0], [2, 0]], [2, 1, 1, 0, 1], [7, 8, 8, 3, 3])


def test_rows_with_fewer_valid_drafts():
    draft = make_draft(DraftTree.chain(2), [[1, 2]] * 4, [[0, 0], [1, 0], [1, 1], [0, 1]])
    # The target agrees with every draft, valid or not.
    assert walk(draft, [[1, 2, 3]] * 4) == ([[0, 0], [1, 0], [1, 2], [0, 0]], [0, 1, 2, 0], [1, 2, 3, 1])


def test_of_equal_siblings_the_first_valid_is_taken():
    draft = make_draft(DraftTree((-1, 0, 0, 1, 2)), [[5, 5, 1, 2]] * 2, [[1, 1, 1, 1], [0, 1, 1, 1]])
    assert walk(draft, [[5, 1, 2, 8, 9]] * 2) == ([[1, 3], [2, 4]], [2, 2], [8, 9])


def test_nothing_drafted():
    assert walk(Draft.empty(2), [[4], [7]]) == ([[], []], [0, 0], [4, 7])


def target_log_probs(batch, nodes, seed=0, vocab_size=12):
    logits = np.random.default_rng(seed).normal(scale=2, size=(batch, nodes, vocab_size))
    return jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))


def emitted(draft, verdict):
    tokens = np.asarray(draft.tokens)
    return [
        [int(tokens[row, node - 1]) for node in verdict.path[row, :count]] + [int(verdict.next_token[row])]
        for row, count in enumerate(verdict.num_accepted.tolist())
    ]


def gumbel_tokens(choices, log_probs, path):
    """Per row argmax(log p + g) along ``path`` (nodes, the root first)."""
    return [
        [int(jnp.argmax(log_probs[row, node] + choices.gumbel(depth, 12, jnp.float32)[row])) for depth, node in enumerate(path)]
        for row in range(log_probs.shape[0])
    ]


def test_gumbel_emits_the_top_of_log_p_and_the_noise_of_the_position():
    """Invariant 2, seed-stable: any chain gives a prefix of the same tokens."""
    choices = KeyedChoices.from_seeds([1, 2, 3], jnp.array([4, 9, 2]))
    # The same distribution after every token: the walk's place decides the noise, not the token.
    log_probs = jnp.repeat(target_log_probs(3, 1), 4, axis=1)
    right = gumbel_tokens(choices, log_probs, [0, 1, 2, 3])
    wrong_second = [[row[0], (row[1] + 1) % 12, row[2]] for row in right]
    for tokens, count in ((right, 4), (wrong_second, 2)):
        draft = make_draft(DraftTree.chain(3), [row[:3] for row in tokens])
        assert emitted(draft, Gumbel()(choices, draft, log_probs)) == [row[:count] for row in right]
    draft = Draft.empty(3)
    assert emitted(draft, Gumbel()(choices, draft, log_probs[:, :1])) == [row[:1] for row in right]


def test_gumbel_uses_one_noise_row_per_depth_in_a_tree():
    choices = KeyedChoices.from_seeds([1, 2], jnp.array([4, 9]))
    log_probs = jnp.repeat(target_log_probs(2, 1, seed=3), 4, axis=1)
    right = gumbel_tokens(choices, log_probs, [0, 2])
    # The right token is at the second child.
    draft = make_draft(FORK, [[(row[0] + 1) % 12, row[0], 0] for row in right])
    verdict = Gumbel()(choices, draft, log_probs)
    assert verdict.path.tolist() == [[2, 0], [2, 0]]
    assert emitted(draft, verdict) == right


def test_rows_decided_by_greedy_make_no_noise():
    one_hot = jnp.log(jax.nn.one_hot(jnp.array([[3, 1], [4, 1]]), 5))
    draft = make_draft(DraftTree.chain(1), [[3], [1]])
    noise_made = []

    class Counted(KeyedChoices):
        def gumbel(self, offset, vocab_size, dtype):
            jax.debug.callback(lambda: noise_made.append(1))
            return super().gumbel(offset, vocab_size, dtype)

    choices = Counted(*vars(KeyedChoices.from_seeds([1, 2], jnp.array([4, 9]))).values())
    verdict = Gumbel()(choices, draft, one_hot)
    jax.effects_barrier()
    assert emitted(draft, verdict) == [[3, 1], [4]]
    assert not noise_made
    # One row that is not decided: now there is noise, and the greedy row does not notice.
    verdict = Gumbel()(choices, draft, one_hot.at[1, 0].set(jnp.log(0.2)))
    jax.effects_barrier()
    assert noise_made
    assert emitted(draft, verdict)[0] == [3, 1]


@pytest.mark.parametrize("rule", [Greedy(), Gumbel(), Match()], ids=lambda rule: rule.name)
def test_one_hot_rows_are_greedy_under_every_rule(rule):
    choices = KeyedChoices.from_seeds([1, 2], jnp.array([4, 9]))
    one_hot = jnp.log(jax.nn.one_hot(jnp.array([[3, 1, 0, 2], [4, 1, 2, 0]]), 5))
    draft = make_draft(FORK, [[3, 4, 1], [3, 4, 1]])
    assert emitted(draft, rule(choices, draft, one_hot)) == [[3, 1, 2], [4, 2]]


@pytest.mark.parametrize(("always", "accepted"), [(True, 4), (False, 0)])
def test_accepted_counts(always, accepted):
    """Case 131: with K = 4, 5 tokens and 1 token."""
    log_probs = jnp.log(jax.nn.one_hot(jnp.full((2, 5), 3), 5))
    draft = make_draft(DraftTree.chain(4), jnp.full((2, 4), 3 if always else 2))
    assert Greedy()(None, draft, log_probs).num_accepted.tolist() == [accepted] * 2
