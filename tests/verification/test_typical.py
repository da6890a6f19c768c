import math

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.tree import Draft, DraftTree, Law
from specjax.verification import RULES, Typical, choose_rule
from tests.verification.scripted import Scripted

CHAIN = DraftTree.chain(1)
# Two paths of two nodes, 1-3 and 2-4.
TWINS = DraftTree((-1, 0, 0, 1, 2))


def kept(rule, tree, p, tokens, valid=None):
    """Paths of rows with these target distributions; the next token is that of the scripted node."""
    tokens = jnp.array(tokens)
    valid = jnp.ones(tokens.shape, bool) if valid is None else jnp.array(valid, bool)
    draft = Draft(tokens, valid, None, tree, (Law.DETERMINISTIC,) * tree.num_nodes).checked()
    choices = Scripted(tokens=[[10 * node for node in range(tree.size)]] * len(tokens))
    p = jnp.asarray(p, jnp.float32)
    verdict = rule(choices, draft, jnp.log(p))
    nodes = (verdict.next_token // 10).tolist()
    # The next token is drawn from p at the end of the path: one for every row, also where nothing was kept.
    np.testing.assert_allclose(choices.emitted, p[jnp.arange(len(tokens)), jnp.array(nodes)], atol=1e-6)
    assert [max(path) for path in verdict.path.tolist()] == nodes
    assert verdict.num_accepted.tolist() == [sum(node > 0 for node in path) for path in verdict.path.tolist()]
    return verdict.path.tolist()


def test_the_paper_s_settings():
    assert (Typical().epsilon, Typical().delta) == (0.09, 0.3)
    assert RULES["typical"] == Typical()


def test_a_sure_target_is_held_to_epsilon():
    """Where the entropy is small, delta exp(-H) is large and epsilon = .09 decides (.3 with the two swapped)."""
    rest = 0.0005
    rows = [[0.91 - rest, 0.09 - rest, 2 * rest], [0.91 - rest, 0.09 + rest, 0], [0.7, 0.3 - rest, rest]]
    assert all(0.3 * math.exp(sum(x * math.log(x) for x in row if x)) > 0.09 for row in rows)
    assert kept(Typical(), CHAIN, [[row] * 2 for row in rows], [[1]] * 3) == [[0], [1], [1]]


def test_a_flat_target_is_held_to_delta():
    """Uniform over 10: H = log 10, and the threshold is .03 (.009 with epsilon and delta swapped)."""
    rows = np.full((3, 12), 0.1)
    rows[:, 10:] = 0
    rows[0, [0, 10]] = [0.08, 0.02]
    rows[1, [0, 10]] = [0.06, 0.04]
    thresholds = 0.3 * np.exp([sum(x * math.log(x) for x in row if x) for row in rows])
    np.testing.assert_allclose(thresholds, [0.0309, 0.0303, 0.03], atol=4e-3)
    assert kept(Typical(), CHAIN, np.stack([rows] * 2, axis=1), [[10], [10], [11]]) == [[0], [1], [0]]


def test_settings_of_one_s_own():
    p = [[[0.5, 0.4, 0.1], [1, 0, 0]]] * 3
    assert kept(Typical(epsilon=0.11), CHAIN, p, [[2], [1], [0]]) == [[0], [1], [1]]
    assert kept(Typical(epsilon=0.05, delta=0.2), CHAIN, p, [[2], [1], [0]]) == [[1], [1], [1]]
    assert kept(Typical(epsilon=1.0, delta=1.0), CHAIN, p, [[2], [1], [0]]) == [[0], [1], [1]]


def test_the_longest_path_then_the_likelier():
    p = np.tile([0.4, 0.3, 0.2, 0.1], (5, 5, 1))
    p[3, 2] = p[4, 1] = [0.2, 0.6, 0.2, 0]
    tokens = [[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 0], [0, 1, 0, 1], [1, 0, 1, 1]]
    valid = [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    # .16 against .09, both ways round; the shorter is likelier; the later parts decide: .16 and .18, .18 and .12.
    assert kept(Typical(), TWINS, p, tokens, valid) == [[1, 3], [2, 4], [2, 4], [2, 4], [1, 3]]


def test_of_equal_paths_the_first():
    assert kept(Typical(), TWINS, np.full((2, 5, 4), 0.25), [[2, 2, 1, 1], [0, 1, 2, 3]]) == [[1, 3]] * 2


def test_a_kept_token_below_a_rejected_one_does_not_count():
    p = np.tile([0.9, 0.05, 0.05], (3, 5, 1))
    tokens, valid = [[1, 2, 0, 0], [1, 0, 0, 1], [0, 0, 1, 0]], [[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 1, 0]]
    # Case 127: nothing is kept, and the target's token comes all the same.
    assert kept(Typical(), TWINS, p, tokens, valid) == [[0, 0], [2, 0], [1, 0]]


def test_greedy_rows_are_greedy():
    """Case 127: at temperature 0 p is one-hot."""
    p = np.eye(4)[[[2, 1, 0, 3, 3], [2, 0, 1, 3, 3], [1, 0, 0, 3, 3]]]
    assert kept(Typical(), TWINS, p, [[2, 0, 1, 0], [0, 2, 3, 1], [2, 3, 0, 0]]) == [[1, 3], [2, 4], [0, 0]]


def test_it_says_that_it_is_lossy():
    """Case 127."""
    assert not Typical().lossless
    with pytest.raises(ValueError, match="rule 'typical' changes the target's distribution; it needs allow_lossy=True"):
        choose_rule("typical", CHAIN, (Law.DETERMINISTIC,), greedy=False)
    assert choose_rule("typical", CHAIN, (Law.DETERMINISTIC,), greedy=False, allow_lossy=True)[0] == Typical()


@pytest.mark.parametrize(("name", "value"), [("epsilon", 0.0), ("epsilon", 1.5), ("delta", -0.1), ("delta", float("nan"))])
def test_wrong_settings(name, value):
    with pytest.raises(ValueError, match=rf"Typical: {name} is {value}; it must be in \(0, 1\]"):
        Typical(**{name: value})
