"""Invariant 1 (lossless), over two rounds, and 4 (cache arithmetic): the tiny models see every wrong cache entry."""

import dataclasses

import flax.struct
import jax.numpy as jnp
import pytest

from specjax import AllowedTokens, SamplingParams
from specjax.cache import KVCache
from specjax.certificates import ReusedKeyError, certify
from specjax.certificates.tiny import TableModel, constant_model, counting_tree, table_model
from specjax.sampling import PathDistribution
from specjax.tree import DraftTree, Law
from specjax.verification import Match, Token
from tests.certificates.mutants import ConstantDrafter, TokenRule, key_of_position

FORK = counting_tree(DraftTree((-1, 0, 0, 1)))
Q = (0.5, 0.3, 0.2)


@pytest.mark.parametrize("law", [Law.INDEPENDENT, Law.DETERMINISTIC], ids=lambda law: law.value)
def test_match_is_lossless(law):
    certificate = certify("match", law=law)
    assert certificate.lossless, certificate.counterexample
    assert certificate.max_error <= 1e-12
    assert certificate.counterexample is None
    assert 1 < certificate.expected_tokens < 3


@pytest.mark.parametrize("law", [Law.INDEPENDENT, Law.DETERMINISTIC], ids=lambda law: law.value)
def test_token_is_lossless(law):
    certificate = certify("token", law=law)
    assert certificate.lossless, certificate.counterexample
    assert certificate.max_error <= 1e-12
    assert 1 < certificate.expected_tokens < 3


@pytest.mark.parametrize("rule", ["match", "gumbel"])
def test_rules_are_lossless_on_a_fork(rule):
    certificate = certify(rule, drafter=FORK)
    assert certificate.lossless, certificate.counterexample
    assert certificate.expected_tokens > 1


@pytest.mark.parametrize("law", [Law.COUPLED, Law.INDEPENDENT], ids=lambda law: law.value)
def test_gumbel_emits_what_plain_decoding_emits(law):
    certificate = certify("gumbel", law=law)
    assert certificate.max_error == 0, certificate.counterexample
    assert certificate.expected_tokens > 1.2


def test_greedy_emits_the_most_likely_tokens():
    certificate = certify("greedy")
    assert certificate.max_error == 0, certificate.counterexample


def test_rows_that_draft_nothing_or_less():
    """With budgets of 1, 2 and 3 the rows of one batch draft 0, 1 and 2 tokens."""
    assert certify("token", max_tokens=(1, 2, 3)).lossless


@pytest.mark.parametrize("rule", [Token(), TokenRule()], ids=["shipped", "written a second time"])
def test_expected_tokens_of_token_verification(rule):
    """The value of Sun et al. 2024 (arXiv:2403.10444): 10/9 accepted, and one."""
    certificate = certify(rule, target=constant_model([1 / 3, 2 / 3]), drafter=ConstantDrafter((2 / 3, 1 / 3)), rounds=1)
    assert certificate.lossless, certificate.counterexample
    assert certificate.expected_tokens == pytest.approx(1 + 10 / 9, abs=1e-12)


@pytest.mark.parametrize(
    "mistake", ["correction from p", "softmax of the residual", "bonus from the node before", "reversed ratio"]
)
def test_a_wrong_rule_is_caught(mistake):
    certificate = certify(TokenRule(mistake), drafter=ConstantDrafter(Q))
    assert not certificate.lossless
    assert certificate.max_error > 1e-3
    assert "instead of" in certificate.counterexample


def test_a_residual_where_nothing_was_drafted_is_caught():
    certificate = certify(TokenRule("residual where nothing was drafted"), drafter=ConstantDrafter(Q), max_tokens=(1, 3))
    assert certificate.max_error > 1e-3


def test_noise_of_the_draft_used_for_the_residual_is_caught():
    with pytest.raises(ReusedKeyError, match="with the key"):
        certify(TokenRule("noise of the draft for the residual"), drafter=ConstantDrafter(Q), rounds=1)


def test_noise_used_again_in_the_next_round_is_caught():
    """Coins keyed by position alone: those behind the accepted prefix come again."""
    with pytest.raises(ReusedKeyError, match="in two rounds"):
        certify(TokenRule(), drafter=ConstantDrafter(Q), key=key_of_position)


def test_the_q_of_an_argmax_draft_is_caught():
    """Cases 57 and 75: a draft that is an argmax in truth, tested against its soft q."""
    certificate = certify(
        "token", target=constant_model([0.51, 0.49]), drafter=ConstantDrafter((0.51, 0.49), takes_argmax=True), rounds=1
    )
    assert certificate.counterexample == "after the prompt (1,), (0,) has probability 1 instead of 0.51"
    assert certificate.max_error == pytest.approx(1 - 0.51**2)


def test_tokens_of_another_seed_are_caught():
    """Sample and match in the place of the shared noise."""

    @dataclasses.dataclass(frozen=True)
    class FreshNoise(Match):
        seed_stable = True

    certificate = certify(FreshNoise(), drafter=FORK, rounds=1)
    assert certificate.max_error > 0.1
    assert "plain decoding emits" in certificate.counterexample


class SeesSiblings(TableModel):
    """A target that takes a tree for a chain."""

    def apply(self, params, tokens, positions, cache, block_mask):
        return super().apply(params, tokens, positions, cache, None)


@flax.struct.dataclass
class LosingCache(KVCache):
    """A cache that forgets the last of several accepted tokens."""

    def commit(self, block, nodes, counts):
        kept = super().commit(block, nodes, counts - (counts > 1))
        return LosingCache(kept.keys, kept.values, kept.lengths)


class Forgets(TableModel):
    """A target with that cache."""

    def init_cache(self, params, batch, capacity):
        return LosingCache(*vars(super().init_cache(params, batch, capacity)).values())


@pytest.mark.parametrize("wrong", [SeesSiblings, Forgets])
def test_the_tiny_models_see_mask_and_cache(wrong):
    target = dataclasses.replace(table_model(3, seed=0), functions=wrong(3))
    assert certify("match", target=target, drafter=FORK).max_error > 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "tokens"}, r"rule is 'tokens'; it must be one of \['block', 'greedy', 'gumbel', "),
        ({"rule": "match", "vocab_size": 1}, "vocab_size is 1; it must be a whole number of at least 2"),
        ({"rule": "match", "depth": -1}, "depth is -1; it must be a whole number of at least 0"),
        ({"rule": "match", "rounds": 0}, "rounds is 0; it must be a whole number of at least 1"),
        ({"rule": "match", "max_tokens": (7,)}, r"max_tokens is \(7,\); each must be from 1 to 6"),
        ({"rule": "match", "depth": 20}, "at most 200000 can be gone through"),
        ({"rule": "token", "law": Law.COUPLED}, r"rule 'token' is right for the laws .*; this drafter draws 'coupled'"),
        ({"rule": "token", "drafter": FORK}, r"rule 'token' takes drafts of shape \['chain'\]; this drafter proposes a tree"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        certify(**arguments)


PENALTIES = {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": -0.3}
SETTINGS = {
    "penalties": SamplingParams(**PENALTIES),
    "bias and filters": SamplingParams(temperature=0.8, logit_bias={0: 0.7, 2: -0.4}, top_k=2, frequency_penalty=1.0),
    "minimum length": SamplingParams(min_tokens=2, stop_token_ids=(1,), **PENALTIES),
}


def prefers_even_lengths(tokens, prompt_length, length, logits):
    """Depends on the newest token and on how long the output is."""
    return logits.at[tokens[length - 1]].add(jnp.where((length - prompt_length) % 2 == 0, 0.9, -0.5).astype(logits.dtype))


@pytest.mark.parametrize("settings", ["bias and filters", "minimum length"])
def test_settings_that_depend_on_the_text_are_lossless(settings):
    """Cases 84 to 88: exact at every draft position."""
    certificate = certify("token", sampling=SETTINGS[settings])
    assert certificate.lossless, certificate.counterexample
    assert certificate.expected_tokens > 1.2


def test_settings_are_lossless_on_a_fork():
    """Every node of a tree along its own path, a user's own transform included."""
    certificate = certify("match", drafter=FORK, sampling=SETTINGS["minimum length"], logits_processor=prefers_even_lengths)
    assert certificate.lossless, certificate.counterexample
    assert certificate.expected_tokens > 1


@pytest.mark.parametrize("rule", ["token", "gumbel"])
def test_a_grammar_is_lossless(rule):
    """The state goes on with the draft: after a 1 only 0 or 2, no two 2 in a row."""
    table = AllowedTokens([[0, 1, 2], [0, -1, 2], [0, 1, -1]])
    certificate = certify(rule, sampling=SETTINGS["penalties"], allowed_tokens=table)
    assert certificate.lossless, certificate.counterexample
    assert certificate.expected_tokens > 1.2


def test_penalties_frozen_at_the_start_of_a_draft_are_caught(monkeypatch):
    """Case 88. The law of the certificate itself knows no drafts, so that it does not share the mistake."""

    class Frozen(PathDistribution):
        def log_probs(self, logits, path_tokens, path_lengths):
            return super().log_probs(logits, path_tokens, jnp.zeros_like(path_lengths))

    monkeypatch.setattr("specjax.decoding.round.PathDistribution", Frozen)
    certificate = certify("token", sampling=SETTINGS["penalties"], rounds=1)
    assert certificate.max_error > 1e-3
    assert "instead of" in certificate.counterexample
