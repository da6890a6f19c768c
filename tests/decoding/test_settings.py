"""Penalties, biases, minimum lengths and a user's own transform inside drafts: what comes out is what plain decoding gives.

All tests share their compiled programs: the settings are arrays, and the one ``logits_processor`` does nothing behind some
prompts.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import AllowedTokens, SamplingParams
from specjax.certificates.tiny import counting_tree
from specjax.decoding import run_rounds
from specjax.decoding.generate import Batch
from specjax.drafters import draft_model, prompt_lookup
from specjax.tree import DraftTree
from tests import hash_model as tiny

# Little noise and one favourite: texts repeat themselves, so that penalties have something to do and the lookup to find.
TABLE = 0.4 * tiny.random_table(0)
TABLE[:, 5:9] += 3.0
TARGET = tiny.model(TABLE)
CLOSE = tiny.model(TABLE + 0.2 * tiny.random_table(1))
PROMPTS = [[1, 2, 3], [4, 5, 6, 5, 6], [7]]
ROWS = [
    SamplingParams(seed=5, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, max_tokens=20),
    SamplingParams(temperature=0.0, frequency_penalty=0.7, logit_bias={5: -math.inf, 30: 2.0}, max_tokens=18),
    SamplingParams(
        seed=6, top_p=0.9, presence_penalty=-0.5, min_tokens=9, stop_token_ids=(6, 7), logit_bias={6: 1}, max_tokens=20
    ),
]
DRAFTERS = {
    "none": None,
    "lookup-4": prompt_lookup(4, prompt_lookup_min=1),
    **{f"draft-{k}": draft_model(CLOSE, k) for k in (1, 2, 3, 4)},
    "fork": counting_tree(DraftTree((-1, 0, 0, 1, 1, 2))),
}


def processor(tokens, prompt_length, length, logits):
    """Behind a prompt that starts with an odd id: likes the token behind the newest, the more the longer the output is."""
    raised = logits.at[(tokens[length - 1] + 1) % tiny.VOCAB].add((0.3 * (length - prompt_length)).astype(logits.dtype))
    return jnp.where(tokens[0] % 2 == 1, raised, logits)


EVERYTHING = AllowedTokens(np.zeros((1, tiny.VOCAB), int))
BEHIND = np.arange(tiny.VOCAB)[None, :] % 6
# The state is one more than the newest id modulo 6, and only ids that are 3 or 4 more may follow.
STEPS = AllowedTokens(
    np.concatenate([BEHIND + 1, np.where(np.isin((BEHIND - np.arange(6)[:, None]) % 6, (3, 4)), BEHIND + 1, -1)])
)
# Three ids below 20, then only the end token 40.
SHORT = np.full((5, tiny.VOCAB), -1)
SHORT[:3, :20] = np.arange(1, 4)[:, None]
SHORT[3:, 40] = 4
SHORT = AllowedTokens(SHORT)


def completions(params, drafter, target=TARGET, prompts=PROMPTS, allowed=EVERYTHING):
    run = {"rule": "gumbel", "logits_processor": processor, "allowed_tokens": allowed}
    return specjax.generate(target, prompts, params, drafter=drafter, **run)


def outcomes(*arguments, **named):
    return [(c.token_ids, c.finish_reason) for c in completions(*arguments, **named)]


@pytest.fixture(scope="module")
def plain():
    return outcomes(ROWS, None)


def test_plain_decoding_heeds_the_settings(plain):
    neutral = [
        dataclasses.replace(SamplingParams(), **{n: getattr(p, n) for n in ("seed", "temperature", "top_p", "max_tokens")})
        for p in ROWS
    ]
    assert [a == b for a, b in zip(plain, outcomes(neutral, None), strict=True)] == [False] * 3
    assert 5 not in plain[1][0]
    assert len(plain[2][0]) >= 10
    assert plain[2][1] == "stop"
    assert not {6, 7} & set(plain[2][0][:9])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_leaves_the_tokens_of_plain_decoding(plain, drafter):
    """Cases 84 and 86 with every setting at once."""
    assert outcomes(ROWS, DRAFTERS[drafter]) == plain


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_frequency_penalty_moves_on(drafter):
    """Case 84: logits always [1.0, 0.9, 0.8]."""
    table = np.full_like(TABLE, -1000)
    table[:, :3] = [1.0, 0.9, 0.8]
    target = tiny.model(table)
    bound = DRAFTERS[drafter]
    if drafter.startswith("draft"):
        bound = dataclasses.replace(bound, params=target.params, model=target)
    params = [SamplingParams(temperature=0, max_tokens=8, frequency_penalty=f) for f in (0.15, 2, -2)]
    result = [tokens for tokens, _ in outcomes(params, bound, target, [[2, 9], [4], [6]])]
    assert result[0] == [0, 1, 0, 2, 1, 0, 2, 1]
    assert result[1] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert result[2] == [0] * 8


def test_a_draft_model_that_is_the_target_is_always_accepted():
    """Case 79: with its own tokens so far counted, and the same filters, q is p."""
    perfect = dataclasses.replace(DRAFTERS["draft-4"], params=TARGET.params)
    for allowed in (EVERYTHING, STEPS):
        for completion in completions(ROWS, perfect, allowed=allowed):
            assert completion.stats.num_drafts == -(-len(completion.token_ids) // 5)


@pytest.mark.parametrize("drafter", ["draft-4", "lookup-4", "fork"])
def test_every_drafter_keeps_to_the_grammar(drafter):
    """With all other settings, and with none."""
    for params in (ROWS, [SamplingParams(seed=3, max_tokens=20)] * 3):
        expected = outcomes(params, None, allowed=STEPS)
        for tokens, _ in expected:
            assert STEPS.accepts(tokens)
            assert len(set(tokens)) > 3
        assert outcomes(params, DRAFTERS[drafter], allowed=STEPS) == expected


def test_a_draft_outside_the_grammar_is_never_taken():
    """Case 169: the fork drafts ids that are 1 or 2 more than the newest."""
    drafted = completions([SamplingParams(seed=3, max_tokens=20)] * 3, DRAFTERS["fork"], allowed=STEPS)
    for completion in drafted:
        assert completion.stats.num_draft_tokens > 0
        assert completion.stats.num_accepted_tokens == 0
        assert len(completion.token_ids) == 20


@pytest.mark.parametrize("drafter", ["none", "draft-4", "lookup-4", "fork"])
def test_a_row_ends_where_only_the_end_token_is_left(drafter):
    target = tiny.model(TABLE, stop_token_ids=(40,))
    for tokens, reason in outcomes([SamplingParams(seed=3, max_tokens=20)] * 3, DRAFTERS[drafter], target, allowed=SHORT):
        assert reason == "stop"
        assert len(tokens) == 4
        assert tokens[3] == 40
        assert max(tokens[:3]) < 20


def test_top_k_of_one_is_greedy():
    """Case 79."""
    sampled = [SamplingParams(seed=1, top_k=1, max_tokens=12, frequency_penalty=0.5)] * 3
    greedy = [dataclasses.replace(p, temperature=0.0, top_k=0) for p in sampled]
    assert outcomes(sampled, DRAFTERS["draft-4"]) == outcomes(greedy, DRAFTERS["draft-4"]) == outcomes(greedy, None)


def test_settings_share_one_program(plain):
    outcomes(ROWS, DRAFTERS["draft-4"])
    traces = run_rounds._cache_size()
    for params in (
        [SamplingParams(seed=1)] * 3,
        ROWS[::-1],
        [dataclasses.replace(p, min_tokens=3, logit_bias={1: 1}) for p in ROWS],
    ):
        outcomes(params, DRAFTERS["draft-4"])
        outcomes(params, DRAFTERS["draft-4"], allowed=STEPS)
    assert run_rounds._cache_size() == traces


def test_rows_are_independent(plain):
    order = [2, 0, 1]
    assert outcomes([ROWS[i] for i in order], DRAFTERS["draft-4"], prompts=[PROMPTS[i] for i in order]) == [
        plain[i] for i in order
    ]


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"params\[2\]: logit_bias holds 50; ids of this model are below 50",
         {"params": [*ROWS[:2], SamplingParams(logit_bias={50: 1})]}),
        (r"allowed_tokens is list; it must be a specjax.AllowedTokens", {"allowed_tokens": [[0]]}),
        (r"allowed_tokens has 51 columns; ids of this model are below 50",
         {"allowed_tokens": AllowedTokens(np.zeros((1, 51), int))}),
        (r"logits_processor is 3; it must be a hashable function", {"logits_processor": 3}),
        (r"logits_processor is .*; it must return float32\[52\], not", {"logits_processor": lambda t, p, n, logits: logits[:50]}),
        (r"logits_processor is .*; it must return float32\[52\], not", {"logits_processor": lambda t, p, n, logits: logits > 0}),
        (r"logits_processor is .*; it must return float32\[52\], not", {"logits_processor": lambda t, p, n, logits: [logits]}),
        (r"logits_processor is .*; traced by JAX it fails: .*positional", {"logits_processor": lambda logits: logits}),
    ],
)  # fmt: skip
def test_wrong_arguments_are_told_before_any_model_runs(message, arguments, monkeypatch):
    monkeypatch.setattr(Batch, "run", lambda *_: pytest.fail("a model ran"))
    arguments = {"params": ROWS, **arguments}
    with pytest.raises(ValueError, match=message):
        specjax.generate(TARGET, PROMPTS, **arguments)


def test_rows_that_may_emit_nothing_say_so_in_a_batch_of_any_size():
    """Half of 16 rows forbid every id: not one of theirs comes out, with drafts or without."""
    nothing = SamplingParams(max_tokens=4, seed=1, logit_bias=dict.fromkeys(range(tiny.VOCAB), -math.inf))
    rows = [nothing, SamplingParams(max_tokens=4, seed=2, temperature=0.0)] * 8
    completions = specjax.generate(TARGET, [[1, 2, 1, 2]] * 16, rows, prompt_lookup(4, prompt_lookup_min=1), rule="gumbel")
    assert [(c.finish_reason, len(c.token_ids)) for c in completions] == [("nan", 0), ("length", 4)] * 8
