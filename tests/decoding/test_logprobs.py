"""Reported log-probabilities are the target's own, for every emitted token, however it came about."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import SamplingParams
from specjax.certificates.tiny import counting_tree, table_model
from specjax.decoding import run_rounds
from specjax.drafters import draft_model, prompt_lookup
from specjax.tree import DraftTree
from tests import hash_model as tiny

TABLE = tiny.random_table(0)
TARGET = tiny.model(TABLE)
CLOSE = draft_model(tiny.model(TABLE + 0.7 * tiny.random_table(1)), 4)
PROMPTS = [[1, 2, 3], [*range(4, 20), 1, 2], [7]]
SAMPLED = [
    SamplingParams(temperature=2.0, top_k=2, max_tokens=20, seed=5, logprobs=3),
    SamplingParams(temperature=0.0, max_tokens=14, logprobs=0),
    SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01, max_tokens=20, seed=2**40 + 11, logprobs=5),
]


@functools.partial(jax.jit, static_argnames="functions")
def logits_of(functions, params, text):
    """[S, V] of one text [S]."""
    positions = jnp.arange(len(text))[None]
    hidden = functions.apply(params, text[None], positions, functions.init_cache(params, 1, 1), None).hidden
    return functions.unembed(params, hidden)[0]


def by_teacher_forcing(model, prompt, tokens):
    """[tokens, vocabulary] log-probabilities before each of the ``tokens``, from one pass over the whole text."""
    text = np.zeros(64, np.int32)
    text[: len(prompt) + len(tokens)] = [*prompt, *tokens]
    logits = np.asarray(logits_of(model.functions, model.params, text), np.float64)[:, : model.vocab_size]
    logits = logits[len(prompt) - 1 :][: len(tokens)]
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def check(model, prompts, params, completions):
    """Every entry against teacher forcing; ``logprobs`` may be None, or any number."""
    for prompt, settings, completion in zip(prompts, params, completions, strict=True):
        if settings.logprobs is None:
            assert completion.logprobs is None
            continue
        expected = by_teacher_forcing(model, prompt, completion.token_ids)
        assert len(completion.logprobs) == len(completion.token_ids)
        for token, entry, row in zip(completion.token_ids, completion.logprobs, expected, strict=True):
            best = np.argsort(-row, kind="stable")[: settings.logprobs].tolist()
            assert list(entry) == [token, *(other for other in best if other != token)]
            np.testing.assert_allclose(list(entry.values()), row[list(entry)], atol=1e-4)


DRAFTERS = {"none": None, "close": CLOSE, "lookup": prompt_lookup(4, prompt_lookup_min=1)}


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_cases_93_and_95_they_are_those_of_teacher_forcing(drafter):
    completions = specjax.generate(TARGET, PROMPTS, SAMPLED, drafter=drafter, rule="gumbel")
    check(TARGET, PROMPTS, SAMPLED, completions)
    # The tokens are those of a run that reports none, and settings differ in every row.
    without = [dataclasses.replace(params, logprobs=None) for params in SAMPLED]
    plain = specjax.generate(TARGET, PROMPTS, without, drafter=drafter, rule="gumbel")
    assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
    assert [c.logprobs for c in plain] == [None] * 3
    if drafter is CLOSE:
        # Accepted and correction tokens were among them.
        assert all(0 < c.stats.num_accepted_tokens < c.stats.num_tested for c in completions)


def test_a_row_that_asks_for_nothing_has_nothing():
    params = [SAMPLED[0], dataclasses.replace(SAMPLED[1], logprobs=None), SAMPLED[2]]
    check(TARGET, PROMPTS, params, specjax.generate(TARGET, PROMPTS, params, drafter=CLOSE, rule="gumbel"))


def test_on_a_fork():
    target = table_model(vocab_size=5, seed=3)
    target = dataclasses.replace(target, params=target.params | {"table": target.params["table"].astype(np.float32)})
    drafter = counting_tree(DraftTree((-1, 0, 0, 1, 2)))
    prompts = [[1], [0, 1], [4, 3, 2]]
    params = [dataclasses.replace(p, top_k=0, logprobs=most) for p, most in zip(SAMPLED, (20, 2, 1), strict=True)]
    completions = specjax.generate(target, prompts, params, drafter=drafter, rule="gumbel")
    check(target, prompts, params, completions)
    # A vocabulary of five has no twenty tokens.
    assert {len(entry) for entry in completions[0].logprobs} == {5}
    accepted = np.sum([c.stats.num_accepted_tokens_per_pos for c in completions], axis=0)
    assert np.all(accepted > 0)
    assert sum(c.stats.num_accepted_tokens for c in completions) < sum(c.stats.num_tested for c in completions)


def test_of_a_transformer():
    target = specjax.load_model(pathlib.Path(__file__).parents[1] / "golden" / "tiny-llama", dtype="float32")
    params = [dataclasses.replace(p, ignore_eos=True, temperature=t) for p, t in zip(SAMPLED, (2.0, 0.0, 0.3), strict=True)]
    completions = specjax.generate(target, PROMPTS, params, drafter=prompt_lookup(2, prompt_lookup_min=1), rule="gumbel")
    check(target, PROMPTS, params, completions)
    accepted, tested = (sum(getattr(c.stats, name) for c in completions) for name in ("num_accepted_tokens", "num_tested"))
    assert 0 < accepted < tested


def test_padding_of_the_vocabulary_has_no_share():
    table = TABLE.copy()
    table[:, tiny.VOCAB :] = 100
    padded = tiny.model(table)
    check(padded, PROMPTS, SAMPLED, specjax.generate(padded, PROMPTS, SAMPLED, drafter=CLOSE, rule="gumbel"))


def test_a_row_that_ends_in_nan_has_as_many_as_tokens():
    tokens = [c.token_ids for c in specjax.generate(TARGET, PROMPTS, SAMPLED, drafter=CLOSE, rule="gumbel")]
    table = TABLE.copy()
    table[tiny.states([*PROMPTS[0], *tokens[0][:3]])[-1]] = np.nan
    broken = tiny.model(table)
    for drafter in (None, draft_model(broken, 4)):
        completions = specjax.generate(broken, PROMPTS, SAMPLED, drafter=drafter, rule="gumbel")
        assert (completions[0].finish_reason, completions[0].token_ids) == ("nan", tokens[0][:3])
        check(broken, PROMPTS, SAMPLED, completions)


def test_of_bonus_tokens_and_of_an_end_token_inside_an_accepted_run():
    tokens = tiny.greedy(TABLE, PROMPTS[1], 14)
    params = [SAMPLED[0], dataclasses.replace(SAMPLED[1], logprobs=2, stop_token_ids=(tokens[2],)), SAMPLED[2]]
    completions = specjax.generate(TARGET, PROMPTS, params, drafter=draft_model(TARGET, 4), rule="gumbel")
    assert (completions[1].token_ids, completions[1].stats.num_drafts) == (tokens[:3], 1)
    # In the other rows everything is accepted, and a bonus token follows.
    assert completions[0].stats.num_accepted_tokens_per_pos == completions[2].stats.num_accepted_tokens_per_pos == (4, 4, 4, 4)
    check(TARGET, PROMPTS, params, completions)


def test_few_numbers_of_them_are_compiled():
    traces = run_rounds._cache_size()
    for most in range(1, 6):
        params = [dataclasses.replace(SAMPLED[0], logprobs=most), SAMPLED[1], dataclasses.replace(SAMPLED[2], logprobs=None)]
        completions = specjax.generate(TARGET, PROMPTS, params, drafter=CLOSE, rule="gumbel")
        check(TARGET, PROMPTS, params, completions)
    assert run_rounds._cache_size() - traces <= 1
    batch, state = tiny.start(TARGET, PROMPTS, dataclasses.replace(SAMPLED[0], logprobs=None), CLOSE)
    assert tiny.one_round(batch, state)[1].logprobs is None
