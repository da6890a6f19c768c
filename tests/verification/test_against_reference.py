"""Every rule that tests against q gives what a few lines of NumPy give: path, coins, and what the next token is drawn from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.tree import Draft, DraftTree, Law
from specjax.verification import RULES
from tests.verification import reference
from tests.verification.scripted import Scripted

I, W, D = Law.INDEPENDENT, Law.WITHOUT_REPLACEMENT, Law.DETERMINISTIC
CHAIN = DraftTree.chain(4)
# Three children of the root; numbered by levels, and swapped on the second (case 119); numbered in depth.
LEVELS = DraftTree((-1, 0, 0, 0, 2, 1, 1, 4))
DEEP = DraftTree((-1, 0, 1, 2, 1, 0, 5, 5, 0))


def decide(rule, rows):
    """Verdict and what was asked of a batch of ``rows``; the next token of a row is ten times the node that it is drawn at."""
    tree, laws = rows[0].tree, rows[0].laws
    with np.errstate(divide="ignore"):
        p, q = (np.log(np.stack([getattr(row, name) for row in rows])) for name in ("p", "q"))
    q = jnp.asarray(q[:, list(tree.inner_nodes)], jnp.float32)
    tokens, valid = (jnp.asarray(np.stack([getattr(row, name) for row in rows])) for name in ("tokens", "valid"))
    choices = Scripted(
        tokens=np.tile(10 * np.arange(tree.size), (len(rows), 1)), coins=np.stack([row.coins for row in rows]).astype(np.float32)
    )
    draft = Draft(tokens, valid, q, tree, laws).checked()
    verdict = jax.jit(lambda draft, p: RULES[rule](choices, draft, p))(draft, jnp.asarray(p, jnp.float32))
    return jax.device_get(verdict), choices


@pytest.mark.parametrize(
    ("rule", "tree", "laws", "right"),
    [
        ("token", CHAIN, (I, W, D, I), reference.top_down),
        ("multi_round", LEVELS, (D, I, I, I, D, I, I), reference.top_down),
        ("without_replacement", DEEP, (W,) * 8, reference.top_down),
        ("without_replacement", LEVELS, (I, W, W, I, D, W, I), reference.top_down),
        ("block", CHAIN, (I, I, W, D), reference.block),
        ("traversal", DEEP, (W,) * 8, reference.traversal),
        ("traversal", LEVELS, (I, W, D, I, D, W, I), reference.traversal),
        ("kseq", DEEP, (I,) * 8, reference.kseq),
        ("typical", DEEP, (W,) * 8, reference.typical),
    ],
)
def test_a_rule_against_numpy(rule, tree, laws, right):
    rows = reference.random_rows(tree, laws, 120, seed=len(laws))
    verdict, choices = decide(rule, rows)
    asked, accepted = choices.probabilities(), []
    emitted = choices.emitted  # and thereby: the next token is drawn once, for all rows together
    for number, row in enumerate(rows):
        path, distribution, coins = right(row)
        accepted.append(len(path))
        assert verdict.path[number].tolist() == path + [0] * (tree.depth - len(path)), number
        assert verdict.num_accepted[number] == len(path)
        assert verdict.next_token[number] == 10 * (path[-1] if path else 0)
        np.testing.assert_allclose(emitted[number], distribution, atol=2e-5)
        # Of a traversal other rows' coins are asked too, with probability 0.
        tested = {node: probability for node, probability in asked.get(number, {}).items() if node in coins or probability}
        assert tested == pytest.approx(coins, abs=1e-5), number
        times = [nodes[number] for stream, nodes, probability in choices.asked if stream == "ACCEPT" and probability[number] > 0]
        assert len(times) == len(set(times))
    # It must have been put to the test.
    assert max(accepted) == tree.depth
    assert len(set(accepted)) >= tree.depth
