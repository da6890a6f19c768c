"""Several completions of one prompt."""

import dataclasses

import numpy as np
import pytest

import specjax
from specjax import SamplingParams
from specjax.drafters import draft_model, prompt_lookup
from tests import hash_model as tiny

TABLE = tiny.random_table(0)
TARGET = tiny.model(TABLE)
UNIFORM = tiny.model(np.zeros_like(TABLE))
CLOSE = draft_model(tiny.model(TABLE + 0.7 * tiny.random_table(1)), 4)
PROMPT = [1, 2, 3]


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


def test_case_166_one_prompt_and_three_completions():
    params = SamplingParams(n=3, max_tokens=12, seed=4)
    _, state = tiny.start(UNIFORM, [PROMPT], params)
    assert state.cache.keys[0].shape[0] == state.cache.lengths.shape[0] == 3
    first = specjax.generate(UNIFORM, [PROMPT], params)
    assert len({tuple(tokens) for tokens in tokens_of(first)}) == 3
    assert tokens_of(specjax.generate(UNIFORM, [PROMPT], params)) == tokens_of(first)
    assert [(c.prompt_index, c.index, c.seed) for c in first] == [(0, 0, 4), (0, 1, 4), (0, 2, 4)]
    greedy = specjax.generate(TARGET, [PROMPT], dataclasses.replace(params, temperature=0.0))
    assert tokens_of(greedy) == [tiny.greedy(TABLE, PROMPT, 12)] * 3


def test_seed_and_index_determine_a_completion():
    params = [SamplingParams(n=n, max_tokens=9 + n, top_p=0.9, seed=n) for n in (2, 1)]
    completions = specjax.generate(TARGET, [PROMPT, [7]], params, drafter=CLOSE, rule="gumbel")
    assert [(c.prompt_index, c.index, c.seed) for c in completions] == [(0, 0, 2), (0, 1, 2), (1, 0, 1)]
    assert [len(c.token_ids) for c in completions] == [11, 11, 10]
    assert completions[0].token_ids != completions[1].token_ids
    # The first is that of n=1, the first two are those of n=3, in whatever batch.
    alone = [dataclasses.replace(p, n=1) for p in (params[1], params[0], params[0])]
    assert tokens_of(specjax.generate(TARGET, [[7], PROMPT, [5]], alone))[:2] == tokens_of(completions[2::-2])
    more = specjax.generate(TARGET, [PROMPT], dataclasses.replace(params[0], n=3))
    assert tokens_of(more)[:2] == tokens_of(completions[:2])


def test_an_unseeded_prompt_has_one_seed_for_all_its_completions():
    params = SamplingParams(n=2, max_tokens=9)
    completions = specjax.generate(TARGET, [PROMPT, PROMPT], [dataclasses.replace(params, n=1), params])
    first, second, third = (c.seed for c in completions)
    assert first != second == third
    again = specjax.generate(TARGET, [PROMPT], dataclasses.replace(params, n=3, seed=second))
    assert tokens_of(again)[:2] == tokens_of(completions[1:])


def test_a_stream_has_one_completion():
    with pytest.raises(ValueError, match="stream: n is 3; it must be 1"):
        specjax.stream(TARGET, PROMPT, SamplingParams(n=3))


def test_case_97_rows_with_and_without_seed_beside_each_other():
    prompts = [[5, 6, 5, 6], [7, 8, 9, 7, 8], [1]]
    params = [SamplingParams(temperature=0.0, max_tokens=12, seed=seed) for seed in (None, 7, None)]
    together = specjax.generate(TARGET, prompts, params, drafter=prompt_lookup(4, prompt_lookup_min=1), rule="gumbel")
    assert tokens_of(together) == [tiny.greedy(TABLE, prompt, 12) for prompt in prompts]
