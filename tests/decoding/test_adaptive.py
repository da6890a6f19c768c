"""Drafts as deep as pays: the choice itself, and rounds that follow it."""

import itertools
import time

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import SamplingParams
from specjax.decoding.adaptive import GUESS, RecentAcceptance, acceptance_rates, best_depth, depth_that_pays
from specjax.decoding.layout import ONE_DEVICE
from specjax.decoding.round_costs import kept_rounds, measure_rounds
from specjax.decoding.state import DispatchInfo
from specjax.drafters import draft_model, prompt_lookup, stacked
from specjax.drafters.base import source_depths
from specjax.measurements import Measured
from specjax.tree import DraftTree
from tests import hash_model as tiny

TABLE = tiny.random_table(0)
TARGET = tiny.model(TABLE, max_positions=256)
WRONG = tiny.model(-TABLE, max_positions=256)
"""A draft model whose most likely token is the target's least likely one."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
MIXED = [GREEDY, SamplingParams(temperature=0.9, top_p=0.9, max_tokens=60, seed=3), SamplingParams(max_tokens=33, seed=4)]
PROMPTS = [[1, 2, 3], [5, 1, 2, 9], [7]]
COSTS = {0: 1.0, 1: 1.2, 2: 1.3, 4: 1.6}


def stats_of(drafter, costs=None, prompt=(1, 2, 3), rule="gumbel", **settings):
    settings = GREEDY if not settings else SamplingParams(**settings)
    (done,) = specjax.generate(TARGET, [list(prompt)], settings, drafter=drafter, rule=rule, adaptive=costs or COSTS)
    return done.stats


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=60, deadline=None)
def test_the_best_depth_is_that_of_the_formula(data):
    rows, sources, depth = (data.draw(st.integers(1, most)) for most in (3, 2, 4))
    depths = tuple(sorted({0, depth, *data.draw(st.sets(st.integers(1, depth)))}))
    own = [data.draw(st.sampled_from(depths[1:])) for _ in range(sources)]

    def shares(shape, most):
        numbers = st.lists(st.floats(0.05, most), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))
        return np.array(data.draw(numbers)).reshape(shape)

    rates, offered = shares((rows, sources, depth), 0.95), shares((rows, sources), 0.95 / sources)
    room = np.array(data.draw(st.lists(st.integers(-1, 6), min_size=rows, max_size=rows)))
    room[0] = max(room[0], 0)
    seconds = np.array(data.draw(st.lists(st.floats(0.1, 3), min_size=len(depths), max_size=len(depths))))
    running = [row for row in range(rows) if room[row] >= 0]

    def rate(place):
        tokens, took = 0.0, 0.0
        # Every way in which each row's draft comes from one of the sources, or from none.
        for said in itertools.product(range(-1, sources), repeat=len(running)):
            chances = [1 - offered[row].sum() if s < 0 else offered[row, s] for row, s in zip(running, said, strict=True)]
            deepest = max((min(depths[place], own[s]) for s in said if s >= 0), default=0)
            took += np.prod(chances) * seconds[depths.index(deepest)]
        for row in running:
            tokens += 1
            for source in range(sources):
                most = min(depths[place], room[row], own[source])
                tokens += offered[row, source] * sum(np.prod(rates[row, source, :n]) for n in range(1, most + 1))
        return tokens / took

    known = (jnp.float32(rates), jnp.float32(offered), jnp.asarray(room))
    found = best_depth(jnp.float32(seconds), depths, tuple(own), *known, ONE_DEVICE)
    speeds = [rate(place) for place in range(len(depths))]
    assert speeds[depths.index(int(found))] >= max(speeds) * (1 - 1e-4)


def test_what_is_known_comes_from_the_row_then_from_all_rows_then_from_the_depth_above():
    recent = RecentAcceptance.zeros(2, 1, 2)
    rates, offered = acceptance_rates(recent, ONE_DEVICE)
    np.testing.assert_allclose(rates, GUESS)
    np.testing.assert_allclose(offered, 1.0)
    yes, no = jnp.array([True, False]), jnp.array([False, False])
    # Row 0 drafts in vain, and row 1 takes no part.
    for _ in range(40):
        recent = recent.after(running=yes, asked=yes, tested=jnp.array([[1, 0], [0, 0]]), accepted=jnp.zeros((2, 2)), offered=yes)
    rates, _ = acceptance_rates(recent, ONE_DEVICE)
    assert rates[0, 0, 0] < 0.01
    assert rates[1, 0, 0] < 0.08
    # Nothing was seen of the second depth: it is believed to be no better than the first, and no worse than that.
    np.testing.assert_allclose(rates[:, 0, 1], rates[1, 0, 0], rtol=1e-5)
    # A new request in row 0 starts from what was seen of all.
    moved_in = recent.of_new_rows(yes)
    np.testing.assert_allclose(acceptance_rates(moved_in, ONE_DEVICE)[0][0], rates[1], rtol=1e-5)
    # With rounds in which nothing is tried hope comes back.
    for _ in range(400):
        recent = recent.after(running=yes, asked=no, tested=jnp.zeros((2, 2)), accepted=jnp.zeros((2, 2)), offered=no)
    np.testing.assert_allclose(acceptance_rates(recent, ONE_DEVICE)[0], GUESS, atol=0.03)


def test_the_sources_of_a_stack_are_judged_apart():
    recent = RecentAcceptance.zeros(1, 2, 2)
    yes = jnp.array([True])
    # In turns the first drafts two tokens in vain and the second one that is accepted.
    for turn in range(60):
        accepted = jnp.array([[turn % 2, 0]])
        recent = recent.after(yes, yes, jnp.ones((1, 2), int) * jnp.array([[1, 0]]), accepted, yes, jnp.array([turn % 2]))
    rates, offered = acceptance_rates(recent, ONE_DEVICE)
    assert rates[0, 0, 0] < 0.1
    assert rates[0, 1, 0] > 0.9
    np.testing.assert_allclose(offered, 0.5, atol=0.05)
    # A round of depth 1 serves the second; what goes beyond it serves the first alone, and does not pay.
    settings = (jnp.array([1.0, 1.1, 1.3]), (0, 1, 2), (2, 1))
    assert depth_that_pays(*settings, recent, jnp.array([9]), ONE_DEVICE) == 1
    lookup, head = prompt_lookup(5), draft_model(TARGET, 2)
    assert source_depths(stacked(lookup, head).functions) == (5, 2)
    assert source_depths(stacked(lookup, stacked(prompt_lookup(3), head)).functions) == (5, 3, 2)
    assert source_depths(head.functions) == (2,)


@pytest.mark.parametrize("drafter", [draft_model(WRONG, 4), draft_model(TARGET, 4), prompt_lookup(4)], ids=lambda d: d.name)
def test_tokens_do_not_depend_on_it(drafter):
    plain = specjax.generate(TARGET, PROMPTS, MIXED)
    adaptive = specjax.generate(TARGET, PROMPTS, MIXED, drafter=drafter, rule="gumbel", adaptive=COSTS)
    assert [c.token_ids for c in adaptive] == [c.token_ids for c in plain]


def test_a_useless_drafter_is_left_out():
    stats = stats_of(draft_model(WRONG, 4))
    assert stats.num_accepted_tokens == 0
    assert stats.num_drafts == 120
    # A few rounds find it out, and a few later ones look whether it is still so.
    assert 1 <= stats.num_draft_tokens <= 24


def test_a_perfect_drafter_is_used_whole():
    stats = stats_of(draft_model(TARGET, 4))
    assert stats.num_drafts == 24
    assert stats.num_accepted_tokens == 96


def test_what_costs_too_much_is_never_tried():
    assert stats_of(draft_model(TARGET, 4), {0: 1.0, 4: 9.0}).num_draft_tokens == 0
    # Of two depths the dear one alone is left out.
    assert stats_of(draft_model(TARGET, 4), {0: 1.0, 2: 1.1, 4: 9.0}).num_draft_tokens == 80


def test_a_drafter_that_becomes_good_is_found():
    tokens = tiny.greedy(TABLE, [1, 2, 3], 200)
    late = tiny.model(tiny.rejected_at(TABLE, [1, 2, 3], tokens, range(100)), max_positions=256)
    stats = stats_of(draft_model(late, 4), temperature=0.0, max_tokens=200, ignore_eos=True)
    # 100 rounds of no use; then at best 20 of five tokens, and some until it is noticed.
    assert stats.num_draft_tokens - stats.num_accepted_tokens <= 20
    assert 120 <= stats.num_drafts <= 165


def test_trees_are_cut_by_depth():
    tree = DraftTree((-1, 0, 0, 1, 1, 2, 3))
    plain = specjax.generate(TARGET, PROMPTS, MIXED)
    adaptive = specjax.generate(
        TARGET, PROMPTS, MIXED, drafter=draft_model(TARGET, tree=tree), rule="gumbel", adaptive={0: 1, 2: 1.2, 3: 5}
    )
    assert [c.token_ids for c in adaptive] == [c.token_ids for c in plain]
    # The third depth is never asked for.
    assert all(c.stats.num_accepted_tokens_per_pos[2] == 0 < c.stats.num_accepted_tokens_per_pos[1] for c in adaptive)


@pytest.mark.parametrize("adaptive", [COSTS, True], ids=["given", "measured"])
def test_an_engine_drafts_as_deep_as_pays(adaptive, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    alone = [specjax.generate(TARGET, [p], s)[0].token_ids for p, s in zip(PROMPTS * 2, MIXED * 2, strict=True)]
    with specjax.Engine(TARGET, drafter=draft_model(WRONG, 4), rule="gumbel", slots=2, capacity=128, adaptive=adaptive) as engine:
        requests = [specjax.Request(p, s) for p, s in zip(PROMPTS * 2, MIXED * 2, strict=True)]
        done = engine.run(requests)
    assert [c.token_ids for c in done] == alone
    assert (tmp_path / "specjax" / "rounds.json").exists() == (adaptive is True)
    if adaptive is COSTS:
        # What one request has shown holds for the next in the same slot.
        assert sum(c.stats.num_draft_tokens for c in done) < 60


def test_costs_are_measured_round_by_round_and_kept(tmp_path):
    batch = tiny.start(TARGET, PROMPTS[:1], GREEDY, draft_model(TARGET, 4))[0]
    program = batch.program
    asked = []

    def run(seconds, num_rounds):
        (place,) = np.flatnonzero(np.isfinite(seconds))
        depth = program.draft_depths[place]
        asked.extend([depth] * num_rounds)
        # So long that the clock sees it.
        time.sleep(0.002 + 0.002 * num_rounds * (1 + depth))
        return DispatchInfo(tokens=None, finish=None, rounds=num_rounds, drafted=np.array([depth]))

    measured, _ = measure_rounds(program, lambda prompt: None, run, capacity=64)
    assert set(asked) == set(program.draft_depths) == {0, 4}
    # Of the same order as what was slept, less what a call takes that runs nothing.
    assert 0.001 <= measured[0] <= measured[1]
    first = kept_rounds(TARGET, program, 1, True, lambda: Measured([1.0, 2.0], True), cache_folder=tmp_path)
    again = kept_rounds(TARGET, program, 1, True, lambda: pytest.fail("measured twice"), cache_folder=tmp_path)
    assert first == again == [1.0, 2.0]
    assert kept_rounds(TARGET, program, 2, True, lambda: Measured([3.0, 4.0], True), cache_folder=tmp_path) == [3.0, 4.0]


@pytest.mark.parametrize(
    ("adaptive", "message"),
    [
        ("yes", "adaptive is 'yes'; it must be False, True, or seconds of a round by draft depth, for 0 and 4 at least"),
        ({0: 1.0}, r"adaptive holds the depths \[0\]; it must be"),
        ({0: 1.0, 4: -1.0}, "adaptive holds 4: -1.0; it must be"),
        ({0: 1.0, 4: 2.0, 5: 3.0}, "adaptive holds 5: 3.0; it must be"),
        ({0: 1.0, 4: float("inf")}, "adaptive holds 4: inf; it must be"),
    ],
)
def test_what_costs_cannot_be_is_refused(adaptive, message):
    with pytest.raises(ValueError, match=message):
        specjax.generate(TARGET, PROMPTS, GREEDY, drafter=draft_model(TARGET, 4), adaptive=adaptive)
    with pytest.raises(ValueError, match=message):
        specjax.Engine(TARGET, drafter=draft_model(TARGET, 4), adaptive=adaptive)


def test_a_schedule_beside_it_is_refused():
    with pytest.raises(ValueError, match="beside a draft_len_schedule"):
        specjax.Engine(TARGET, drafter=draft_model(TARGET, 4), adaptive=True, draft_len_schedule={1: 2})
