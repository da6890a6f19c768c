"""First differences, and the margin by which the token there was chosen, from a table that the test knows."""

import numpy as np
import pytest

import specjax
from specjax.benchmark.equality import compare, logits_of, margin
from tests import hash_model

TABLE = hash_model.random_table(scale=1.0)
MODEL = hash_model.model(TABLE)
PROMPTS = [[1, 2, 3], [4, 5], [6]]
GREEDY = [specjax.SamplingParams(temperature=0.0, max_tokens=8)] * 3
PLAIN = [hash_model.greedy(TABLE, prompt, 8) for prompt in PROMPTS]


def exact_margin(prompt, emitted):
    """Of the two best tokens behind this text."""
    logits = np.sort(TABLE[hash_model.states([*prompt, *emitted])[-1], : hash_model.VOCAB].astype(np.float64))
    return logits[-1] - logits[-2]


def test_logits_of_a_text_do_not_depend_on_its_padding():
    ids = [3, 1, 4, 1, 5]
    wanted = TABLE[hash_model.states(ids)]
    assert np.array_equal(logits_of(MODEL, ids), wanted)
    assert np.array_equal(logits_of(MODEL, ids, width=9), wanted)


def test_equal_answers():
    found = compare(MODEL, PROMPTS, GREEDY, PLAIN, PLAIN, tolerance=0.0)
    assert found == {"equal": 3, "differ": 0, "largest_margin": 0.0, "passed": True}


def test_a_first_difference_has_its_margin_and_passes_below_the_tolerance():
    others = [list(PLAIN[0]), [*PLAIN[1][:5], 0, 0, 0], [*PLAIN[2][:2], 49, *PLAIN[2][3:]]]
    wanted = max(exact_margin(PROMPTS[1], PLAIN[1][:5]), exact_margin(PROMPTS[2], PLAIN[2][:2]))
    for tolerance, passed in ((wanted * 1.01, True), (wanted * 0.99, False)):
        found = compare(MODEL, PROMPTS, GREEDY, PLAIN, others, tolerance)
        assert (found["equal"], found["differ"], found["passed"]) == (1, 2, passed)
        assert found["largest_margin"] == pytest.approx(wanted, abs=2e-6)


def test_an_answer_that_goes_on_behind_the_others_end_never_passes():
    found = compare(MODEL, PROMPTS, GREEDY, PLAIN, [PLAIN[0][:7], *PLAIN[1:]], tolerance=1e9)
    assert (found["differ"], found["largest_margin"], found["passed"]) == (1, None, False)


def test_the_margin_of_a_sampled_token_is_that_with_its_noise():
    params = specjax.SamplingParams(temperature=0.8, max_tokens=8, seed=3)
    (completion,) = specjax.generate(MODEL, [PROMPTS[0]], params)
    found = [margin(MODEL, PROMPTS[0], completion.token_ids[:n], params) for n in range(4)]
    assert all(0 < value < 20 for value in found)
    greedy = margin(MODEL, PROMPTS[0], [], GREEDY[0])
    assert greedy == pytest.approx(exact_margin(PROMPTS[0], []), abs=2e-6)
    assert abs(found[0] - greedy) > 1e-3
