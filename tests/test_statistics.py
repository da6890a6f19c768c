import dataclasses
import json

import numpy as np
import pytest

from specjax.statistics import SourceStats, Stats, expected_tokens, explain, predicted_speedup, total

STATS = Stats(
    num_drafts=4, num_draft_tokens=16, num_accepted_tokens=8, num_accepted_tokens_per_pos=(4, 2, 1, 1), num_tokens=12,
    num_tested=11, overlap_sum=7.7, prefill_seconds=0.5, decode_seconds=2.0, compile_seconds=9.0,
)  # fmt: skip
PLAIN = Stats(num_drafts=12, num_tokens=12, decode_seconds=3.0, plain_round_seconds=0.04)


def test_rates():
    assert STATS.draft_acceptance_rate == 8 / 16
    assert STATS.mean_acceptance_length == 12 / 4
    assert STATS.tested_acceptance_rate == 8 / 11
    assert STATS.overlap == pytest.approx(0.7)
    # Compilation and prompts are no part of the speed of the rounds.
    assert STATS.tokens_per_second == 6.0


def test_rates_before_anything_happened():
    stats = Stats()
    assert (stats.draft_acceptance_rate, stats.mean_acceptance_length, stats.tested_acceptance_rate) == (0.0, 0.0, 0.0)
    assert (stats.tokens_per_second, stats.overlap) == (0.0, None)
    assert Stats(overlap_sum=0.0).overlap is None


def test_to_dict_is_ready_for_json():
    values = json.loads(json.dumps(STATS.to_dict()))
    assert values["num_accepted_tokens_per_pos"] == [4, 2, 1, 1]
    assert (values["draft_acceptance_rate"], values["mean_acceptance_length"]) == (0.5, 3.0)
    assert values["overlap"] == pytest.approx(0.7)
    assert "overlap_sum" not in values
    assert json.loads(json.dumps(Stats().to_dict()))["overlap"] is None


def test_total():
    other = Stats(
        num_drafts=2, num_draft_tokens=2, num_accepted_tokens=1, num_accepted_tokens_per_pos=(1,), num_tokens=3, num_tested=2,
        overlap_sum=0.3, decode_seconds=1.5, compile_seconds=9.0,
    )  # fmt: skip
    summed = total([STATS, other])
    assert (summed.num_drafts, summed.num_draft_tokens, summed.num_accepted_tokens, summed.num_tokens) == (6, 18, 9, 15)
    assert summed.num_accepted_tokens_per_pos == (5, 2, 1, 1)
    assert summed.overlap == pytest.approx(8.0 / 13)
    assert (summed.prefill_seconds, summed.decode_seconds, summed.compile_seconds) == (0.5, 2.0, 9.0)
    # Where one request's q is unknown, so is the overlap of all.
    assert total([STATS, PLAIN]).overlap is None
    assert total(iter([STATS])) == STATS
    assert total([]) == Stats()


def test_by_source():
    sources = {"lookup": SourceStats(2, 8, 6, 8), "draft": SourceStats(1, 4, 1, 2)}
    stats = dataclasses.replace(STATS, by_source=sources)
    assert (sources["lookup"].mean_acceptance_length, sources["lookup"].draft_acceptance_rate) == (4.0, 0.75)
    assert (SourceStats().mean_acceptance_length, SourceStats().draft_acceptance_rate) == (0.0, 0.0)
    values = json.loads(json.dumps(stats.to_dict()))["by_source"]
    assert values["draft"] == {
        "num_drafts": 1, "num_draft_tokens": 4, "num_accepted_tokens": 1, "num_tokens": 2,
        "draft_acceptance_rate": 0.25, "mean_acceptance_length": 2.0,
    }  # fmt: skip
    assert STATS.to_dict()["by_source"] == {}
    other = dataclasses.replace(STATS, by_source={"draft": SourceStats(1, 1, 1, 2)})
    assert total([stats, STATS, other]).by_source == {"lookup": SourceStats(2, 8, 6, 8), "draft": SourceStats(2, 5, 2, 4)}


@pytest.mark.parametrize(("acceptance", "num_draft"), [(0.0, 4), (0.3, 1), (0.8, 4), (0.99, 32)])
def test_expected_tokens_is_the_published_formula(acceptance, num_draft):
    assert expected_tokens(acceptance, num_draft) == pytest.approx((1 - acceptance ** (num_draft + 1)) / (1 - acceptance))


def test_expected_tokens_by_simulation():
    rng = np.random.default_rng(0)
    passed = rng.random((200_000, 3)) < 0.6
    assert 1 + np.cumprod(passed, axis=1).sum(axis=1).mean() == pytest.approx(expected_tokens(0.6, 3), abs=0.01)


def test_expected_tokens_at_the_ends():
    assert expected_tokens(1.0, 5) == 6.0
    assert expected_tokens(0.7, 0) == 1.0
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"acceptance is .*; it must be in \[0, 1\]"):
            expected_tokens(value, 3)


def test_predicted_speedup():
    # Theorem 3.8: (1 - a^(K+1)) / ((1 - a)(K c + 1)).
    assert predicted_speedup(0.8, 4, draft_cost=0.05) == pytest.approx((1 - 0.8**5) / (0.2 * (4 * 0.05 + 1)))
    assert predicted_speedup(0.8, 0, draft_cost=0.05) == 1.0
    assert predicted_speedup(0.0, 4, draft_cost=0.0, verify_cost=1.25) == pytest.approx(0.8)


def test_explain_a_win():
    # A round that drafts takes 58 ms, 8 of them for drafting: verifying costs 50 / 40 plain steps, a draft token 2 / 40.
    timed = dataclasses.replace(STATS, drafting_round_seconds=0.058)
    words = " ".join(explain(PLAIN, timed, num_draft=4, propose_seconds=0.008))
    assert "16 tokens were drafted and 8 accepted (50%); a round emitted 3.00 tokens" in words
    assert "Measured speedup 1.50 (6.0 over 4.0 tokens/s)" in words
    assert "overlap by 0.70" in words
    assert "Drafting a token costs 0.050 of a plain step (of 40 ms), verifying 4 costs 1.25." in words
    assert f"predicts a speedup of {predicted_speedup(8 / 11, 4, 0.05):.2f} for rounds that draft 4" in words
    assert f"with the measured verify pass it is {predicted_speedup(8 / 11, 4, 0.05, 1.25):.2f}." in words
    assert "lost" not in words
    # Without the measured parts it says nothing about them.
    assert "formula" not in " ".join(explain(PLAIN, STATS, num_draft=4))


def test_explain_a_loss():
    slow = Stats(
        num_drafts=10, num_draft_tokens=40, num_accepted_tokens=2, num_accepted_tokens_per_pos=(2, 0, 0, 0), num_tokens=12,
        num_tested=12, decode_seconds=6.0,
    )  # fmt: skip
    words = explain(PLAIN, slow)
    assert "Measured speedup 0.50" in words[1]
    assert "Speculation lost here: a round emitted only 1.20 tokens, fewer than" in words[-1]
    words = explain(PLAIN, dataclasses.replace(slow, drafting_round_seconds=0.058))
    assert "a round that drafts costs 1.45 plain steps" in words[-1]


def test_explain_that_nothing_was_drafted():
    nothing = Stats(num_drafts=12, num_tokens=12, decode_seconds=3.1)
    words = " ".join(explain(PLAIN, nothing, num_draft=4, propose_seconds=0.01))
    assert "0 tokens were drafted and 0 accepted (0%)" in words
    assert "nothing was drafted" in words
