"""A draft model with ids of its own."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import SamplingParams
from specjax.certificates import certify
from specjax.certificates.tiny import table_model
from specjax.drafters import draft_model
from specjax.models.other_vocabulary import with_other_ids
from specjax.tree import DraftTree
from tests import hash_model as tiny

TABLE = tiny.random_table(0)
TARGET = tiny.model(TABLE)
PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3]]
ORDER = np.random.default_rng(1).permutation(tiny.VOCAB)
"""Id of the target for each id of the draft; the draft's id of each of the target's."""
BACK = np.argsort(ORDER)


class Renumbered(tiny.HashModel):
    """The target with its ids renumbered."""

    def apply(self, params, tokens, positions, cache, block_mask):
        return super().apply(params, params["order"][tokens], positions, cache, block_mask)

    def unembed(self, params, hidden):
        return super().unembed(params, hidden)[..., params["order"]]


def renumbered(vocab_size=tiny.VOCAB):
    params = {"table": jnp.asarray(TABLE), "order": jnp.asarray(ORDER, jnp.int32)}
    return specjax.Model(functions=Renumbered(), params=params, vocab_size=vocab_size, max_positions=64)


def test_the_target_in_other_ids_is_always_right():
    drafter = draft_model(with_other_ids(renumbered(), BACK, BACK), 3)
    params = SamplingParams(max_tokens=8, seed=2)
    for rule in ("token", "gumbel"):
        for completion in specjax.generate(TARGET, PROMPTS, params, drafter, rule=rule):
            assert completion.stats.draft_acceptance_rate == 1


def test_ids_that_the_draft_lacks():
    """Its q is that of the common ids, renormalised; what it cannot say comes as a correction."""
    said_as = np.where(np.arange(tiny.VOCAB) % 3 == 0, -1, BACK)
    dressed = with_other_ids(renumbered(), BACK, said_as)
    hidden = jnp.array([[[17.0]]])
    logits = dressed.unembed(dressed.params, hidden)[0, 0]
    chex.assert_shape(logits, (tiny.VOCAB,))
    own = TABLE[17, : tiny.VOCAB]
    np.testing.assert_array_equal(logits, np.where(np.arange(tiny.VOCAB) % 3 == 0, -np.inf, own))
    params = SamplingParams(max_tokens=12, seed=2)
    plain = specjax.generate(TARGET, PROMPTS, params, rule="gumbel")
    fast = specjax.generate(TARGET, PROMPTS, params, draft_model(dressed, 3), rule="gumbel")
    assert [c.token_ids for c in fast] == [c.token_ids for c in plain]
    assert any(token % 3 == 0 for c in fast for token in c.token_ids)
    assert all(0 < c.stats.draft_acceptance_rate < 1 for c in fast)


def test_nothing_that_it_can_say_is_allowed():
    """Its one token ends the text, which may not end yet: there is no q, so nothing is accepted, and nothing breaks."""
    stop = 7
    dressed = with_other_ids(renumbered(), BACK, np.where(np.arange(tiny.VOCAB) == stop, BACK, -1))
    params = SamplingParams(max_tokens=6, min_tokens=6, stop_token_ids=[stop], seed=1)
    plain = specjax.generate(TARGET, PROMPTS, params, rule="gumbel")
    for rule in ("gumbel", "token"):
        done = specjax.generate(TARGET, PROMPTS, params, draft_model(dressed, 2), rule=rule)
        assert [c.finish_reason for c in done] == ["length"] * 3
        assert sum(c.stats.num_accepted_tokens for c in done) == 0
        if rule == "gumbel":
            assert [c.token_ids for c in done] == [c.token_ids for c in plain]


@pytest.mark.parametrize(("rule", "tree"), [("token", DraftTree.chain(2)), ("without_replacement", DraftTree((-1, 0, 0)))])
def test_every_outcome(rule, tree):
    """Four tokens of its own, two of which the target has, and one of those that it lacks is read as another."""
    dressed = with_other_ids(table_model(4, seed=1), np.array([3, 0, 1]), np.array([3, -1, 1]))
    found = certify(rule, drafter=draft_model(dressed, tree=tree))
    assert found.lossless, found.counterexample
    assert found.expected_tokens > 1


@pytest.mark.parametrize(
    ("read_as", "said_as", "message"),
    [
        ([0, 1], [0], r"read_as has shape \(2,\) and said_as \(1,\)"),
        ([0, 4], [0, 1], "read_as holds 4; ids of model are 0 to 3"),
        ([0, -1], [0, 1], "read_as holds -1"),
        ([0, 1], [0, 9], "said_as holds 9"),
        ([0, 1], [2, 2], "said_as holds 2 twice"),
        ([0, 1], [-1, -1], "could not draft a single token"),
    ],
)
def test_bad_input(read_as, said_as, message):
    with pytest.raises(ValueError, match=message):
        with_other_ids(table_model(4, seed=1), np.array(read_as), np.array(said_as))
