"""The default model, real weights, float32: speculation changes no token.

Every draft length compiles a program of its own, so a few stand for all by default; ``--all-lengths`` goes through 0 to 10 with
both drafters (about six minutes more on two cores). For the same reason the tests share drafters where they can.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.models.shallow import keep_layers

PROMPTS = (
    [{"role": "user", "content": "Why is the sky blue?"}],
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the",
    [{"role": "user", "content": "Count from one to ten, then again from one to ten."}],
    "def add(a, b):\n    return a + b\n\n\ndef add3(a, b, c):\n    return a",
    [{"role": "user", "content": "日本の首都はどこですか?"}],
)
MAX_TOKENS = 12
DRAFTERS = {
    "prompt_lookup": lambda shallow, num_draft: specjax.drafters.prompt_lookup(num_draft),
    "draft_model": specjax.drafters.draft_model,
}
USUAL_LENGTHS = {"prompt_lookup": (10,), "draft_model": (4,)}


def pytest_generate_tests(metafunc):
    if "num_draft" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-lengths")
        cases = [(kind, k) for kind in DRAFTERS for k in (range(11) if everything else USUAL_LENGTHS[kind])]
        metafunc.parametrize(("kind", "num_draft"), cases)


def settings(**changes):
    return [specjax.SamplingParams(max_tokens=MAX_TOKENS + row, seed=100 + row, **changes) for row in range(len(PROMPTS))]


GREEDY = settings(temperature=0)
# Every row samples in its own way, and one is greedy.
MIXED = [
    dataclasses.replace(row, **change)
    for row, change in zip(
        settings(temperature=1.0),
        ({"temperature": 0.7, "top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"temperature": 0.0}, {"top_p": 0.8}),
        strict=True,
    )
]


@pytest.fixture(scope="module")
def shallow(smollm2):
    """The first layers of the default model: a bad draft with the right tokenizer."""
    return keep_layers(smollm2, [0, 1])


@pytest.fixture(scope="module")
def plain(smollm2):
    """Tokens of plain decoding of every prompt, one at a time."""
    return {
        name: [specjax.generate(smollm2, [p], s, rule="gumbel")[0].token_ids for p, s in zip(PROMPTS, run, strict=True)]
        for name, run in {"greedy": GREEDY, "mixed": MIXED}.items()
    }


def tokens(completions):
    return [completion.token_ids for completion in completions]


def test_seed_stable(smollm2, shallow, plain, kind, num_draft):
    drafter = DRAFTERS[kind](shallow, num_draft)
    assert tokens(specjax.generate(smollm2, PROMPTS, MIXED, drafter, rule="gumbel")) == plain["mixed"]


def test_every_row_place(smollm2, plain):
    drafter = specjax.drafters.prompt_lookup(10)
    for shift in range(1, len(PROMPTS)):
        order = [(row + shift) % len(PROMPTS) for row in range(len(PROMPTS))]
        completions = specjax.generate(
            smollm2, [PROMPTS[row] for row in order], [MIXED[row] for row in order], drafter, rule="gumbel"
        )
        assert tokens(completions) == [plain["mixed"][row] for row in order]


def test_a_batch_of_one(smollm2, plain):
    drafter = specjax.drafters.prompt_lookup(10)
    for prompt, run, wanted in zip(PROMPTS, MIXED, plain["mixed"], strict=True):
        assert tokens(specjax.generate(smollm2, [prompt], run, drafter, rule="gumbel")) == [wanted]


def test_its_own_draft_is_always_accepted(smollm2, plain):
    """A broken drafter can hide behind right output; full acceptance cannot be had by one.

    At temperature 0 every lossless rule gives the argmax.
    """
    drafter = specjax.drafters.draft_model(smollm2, 3)
    completions = specjax.generate(smollm2, PROMPTS, GREEDY, drafter, rule="token")
    assert tokens(completions) == plain["greedy"]
    assert all(completion.stats.draft_acceptance_rate == 1.0 for completion in completions)


def test_logprobs_are_those_of_teacher_forcing(smollm2):
    params = [dataclasses.replace(run, max_tokens=8, logprobs=2) for run in (MIXED[1], MIXED[3])]
    completions = specjax.generate(smollm2, PROMPTS[1:4:2], params, specjax.drafters.prompt_lookup(2), rule="gumbel")
    assert sum(completion.stats.num_accepted_tokens for completion in completions) > 0
    prompts = [smollm2.tokenizer.encode(prompt) for prompt in PROMPTS[1:4:2]]
    ids = np.zeros((2, 40), np.int32)
    for row, prompt, completion in zip(ids, prompts, completions, strict=True):
        row[: len(prompt) + 8] = [*prompt, *completion.token_ids]
    positions = jnp.broadcast_to(jnp.arange(40), ids.shape)
    hidden = jax.jit(smollm2.apply)(smollm2.params, ids, positions, smollm2.init_cache(2, 1)).hidden
    for row, prompt, completion in zip(hidden, prompts, completions, strict=True):
        text = completion.token_ids
        logits = smollm2.unembed(smollm2.params, row[len(prompt) - 1 :][: len(text)])[:, : smollm2.vocab_size]
        expected = np.asarray(jax.nn.log_softmax(logits))
        assert len(completion.logprobs) == len(text) == 8
        for token, entry, row in zip(text, completion.logprobs, expected, strict=True):
            assert next(iter(entry)) == token
            assert set(entry) == {token, *np.argsort(-row)[:2].tolist()}
            np.testing.assert_allclose(list(entry.values()), row[list(entry)], atol=1e-4)


def test_streamed_text_is_the_completion(smollm2, plain):
    pieces = list(specjax.stream(smollm2, PROMPTS[0], GREEDY[0], specjax.drafters.prompt_lookup(10)))
    completion = pieces[-1].completion
    assert completion.token_ids == plain["greedy"][0]
    assert [token for piece in pieces for token in piece.token_ids] == completion.token_ids
    assert "".join(piece.text for piece in pieces) == completion.text
    assert len(pieces) == completion.stats.num_drafts
