"""Arithmetic: rates, speedups over the fastest plain decoding, and the formula's prediction. No clock decides anything here."""

import pytest

from specjax.benchmark.answers import Answers
from specjax.benchmark.cases import Case
from specjax.benchmark.clock import Spread
from specjax.benchmark.parts import PARTS, RoundParts
from specjax.benchmark.report import baselines, predicted, predictions, rates, result_row
from specjax.drafters import prompt_lookup
from specjax.statistics import Stats, expected_tokens, predicted_speedup, total


def case(drafter="none", made=None, slots=1, temperature=0.0, dtype="float32"):
    return Case(drafter, made, "gumbel", slots, temperature, dtype)


def answers(lengths, seconds, **stats):
    """Answers of these lengths."""
    each = [Stats(num_drafts=length, num_tokens=length, **stats) for length in lengths]
    return Answers([[7] * length for length in lengths], each, seconds)


def parts(seconds, plain=1.0, draft=0.0):
    each = dict.fromkeys(PARTS, 0.0) | {"draft": draft, "verify": seconds - draft}
    return RoundParts(Spread(seconds, seconds, seconds), each, Spread(plain, plain, plain), 4, 10, (1, 1))


def test_a_rate_is_all_tokens_over_all_seconds_of_a_repeat():
    found = answers([10, 20], [[1.0, 4.0], [2.0, 8.0]])
    assert rates(found) == [6.0, 3.0]
    assert rates(found, [1]) == [5.0, 2.5]


def test_an_engine_is_timed_as_a_whole():
    assert rates(answers([10, 20], [[5.0], [3.0], [6.0]])) == [6.0, 10.0, 5.0]


def test_the_baseline_is_the_fastest_plain_decoding_of_the_same_setting_over_all_dtypes():
    slow, fast, many, drafting = case(), case(dtype="bfloat16"), case(slots=4), case("lookup", prompt_lookup(4))
    found = {
        slow: answers([10], [[1.0], [1.0], [0.1]]),  # once by chance the fastest
        fast: answers([10], [[0.9], [0.9], [0.9]]),
        many: answers([10], [[0.2]]),
        drafting: answers([10], [[0.5], [0.25], [0.5]]),
    }
    base = baselines(found)
    assert base == {(1, 0.0): fast, (4, 0.0): many}
    row = result_row(drafting, found[drafting], found[base[drafting.setting]], ["x"], "p")
    assert row["tokens_per_second"] == 20.0
    assert row["tokens_per_second_spread"] == [20.0, 40.0]
    assert row["speedup"] == pytest.approx(20 / (10 / 0.9))
    assert row["speedup_spread"] == pytest.approx([1.8, 3.6])
    row = result_row(slow, found[slow], found[fast], ["x"], "p")
    assert row["speedup"] == pytest.approx(0.9)


def test_kinds_are_counted_apart():
    found = answers([10, 20, 30], [[1.0, 1.0, 1.0]])
    base = answers([10, 20, 30], [[2.0, 1.0, 4.0]])
    row = result_row(case(), found, base, ["x", "y", "x"], "p")
    assert {kind: each["speedup"] for kind, each in row["by_kind"].items()} == {"x": 3.0, "y": 1.0}
    assert row["by_kind"]["x"]["tokens_per_second"] == 20.0
    assert row["num_tokens"] == 60


def test_acceptance_is_accepted_over_really_drafted():
    # Four drafts in all, the last cut to one token; two were accepted whole, one not at all, the cut one too.
    stats = Stats(
        num_drafts=4, num_draft_tokens=13, num_accepted_tokens=9, num_accepted_tokens_per_pos=(3, 2, 2, 2), num_tokens=13
    )
    row = result_row(case(), Answers([[7] * 13], [stats], [[1.0]]), answers([13], [[1.0]]), ["x"], "p")
    assert row["draft_acceptance_rate"] == 9 / 13
    assert row["mean_acceptance_length"] == 13 / 4
    assert row["accepted_per_pos"] == [0.75, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(("accepted", "rate", "length"), [(12, 1.0, 5.0), (0, 0.0, 1.0)])
def test_all_and_nothing_accepted(accepted, rate, length):
    stats = Stats(num_drafts=3, num_draft_tokens=12, num_accepted_tokens=accepted, num_tokens=3 + accepted)
    row = result_row(case(), Answers([[7] * stats.num_tokens], [stats], [[1.0]]), answers([9], [[1.0]]), ["x"], "p")
    assert (row["draft_acceptance_rate"], row["mean_acceptance_length"]) == (rate, length)


def test_nothing_drafted_is_no_division_by_zero():
    row = result_row(case(), Answers([[7]], [Stats()], [[1.0]]), answers([1], [[1.0]]), ["x"], "p")
    assert (row["draft_acceptance_rate"], row["mean_acceptance_length"], row["accepted_per_pos"]) == (0.0, 0.0, [])
    assert predicted(Stats(), 4, True, 1.0, 1.0) == 0.0


def test_the_prediction_is_the_formula_where_every_round_drafts():
    stats = Stats(num_drafts=10, num_draft_tokens=40, num_accepted_tokens=18, num_tested=24, num_tokens=28)
    for draft_cost, verify_cost in ((0.05, 1.0), (0.1, 1.7)):
        full = 4 * draft_cost + verify_cost
        wanted = predicted_speedup(18 / 24, 4, draft_cost, verify_cost)
        assert predicted(stats, 4, True, full, 99.0) == pytest.approx(wanted)
        one = predictions(case("eagle", prompt_lookup(4)), stats, parts(full, draft=4 * draft_cost), parts(1.0), False)
        assert one == pytest.approx(wanted)


def test_the_prediction_knows_of_rounds_without_a_draft():
    # A quarter of the rounds drafted: the others cost a plain step and a search, and emit one token.
    stats = Stats(num_drafts=40, num_draft_tokens=40, num_accepted_tokens=16, num_tested=20, num_tokens=56)
    wanted = (0.25 * expected_tokens(0.8, 4) + 0.75) / (0.25 * 2.0 + 0.75 * 1.1)
    assert predicted(stats, 4, True, 2.0, 1.1) == pytest.approx(wanted)
    # In a dtype whose plain step costs 1.3 of the fastest, an empty round costs 1.3 and the search.
    slow = predictions(case("lookup", prompt_lookup(4)), stats, parts(2.0, draft=0.1), parts(1.3), False)
    assert slow == pytest.approx((0.25 * expected_tokens(0.8, 4) + 0.75) / (0.25 * 2.0 + 0.75 * 1.4))


def test_a_stack_is_predicted_by_the_tokens_that_its_rounds_emitted():
    stats = Stats(num_drafts=10, num_draft_tokens=40, num_accepted_tokens=18, num_tested=24, num_tokens=28)
    assert predictions(case("stack", prompt_lookup(4)), stats, parts(2.0), parts(1.0), True) == pytest.approx(2.8 / 2.0)


def test_plain_decoding_in_another_dtype_is_predicted_by_its_round():
    stats = total([Stats(num_drafts=4, num_tokens=4)])
    assert predictions(case(), stats, parts(2.0), parts(2.0), False) == 0.5
    assert predictions(case(), stats, parts(1.01), parts(1.01), False, fastest=True) == 1.0
