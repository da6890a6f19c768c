"""Invariant 1 (lossless) with settings that depend on the text: each node of a draft along its own path."""

import jax.numpy as jnp
import pytest

from specjax import AllowedTokens, SamplingParams
from specjax.certificates import certify
from specjax.certificates.tiny import counting_tree
from specjax.sampling import PathDistribution
from specjax.tree import DraftTree

FORK = counting_tree(DraftTree((-1, 0, 0, 1)))
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


@pytest.mark.parametrize("rule", ["traversal", "gumbel"])
def test_a_grammar_is_lossless(rule):
    """The state goes on with the draft, which is a tree: after a 1 only 0 or 2, no two 2 in a row."""
    table = AllowedTokens([[0, 1, 2], [0, -1, 2], [0, 1, -1]])
    certificate = certify(rule, tree=DraftTree((-1, 0, 0, 1)), sampling=SETTINGS["penalties"], allowed_tokens=table)
    assert certificate.lossless, certificate.counterexample
    assert certificate.expected_tokens > 1.2


def test_penalties_frozen_at_the_start_of_a_draft_are_caught(monkeypatch):
    """Case 88. The law of the certificate itself knows no drafts, so that it does not share the mistake."""

    class Frozen(PathDistribution):
        def log_probs(self, logits, path_tokens, path_lengths):
            return super().log_probs(logits, path_tokens, jnp.zeros_like(path_lengths))

    monkeypatch.setattr("specjax.decoding.round.PathDistribution", Frozen)
    # Settings of its own: what is compiled for them is wrong.
    certificate = certify("token", sampling=SamplingParams(frequency_penalty=0.9), rounds=1)
    assert certificate.max_error > 1e-3
    assert "instead of" in certificate.counterexample
