"""Whatever else the engine is asked, each request gets the tokens of its solo run (invariants 2, 3 and 7 under load)."""

import collections
import dataclasses
import functools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import specjax
from specjax import Engine, Request, SamplingParams
from specjax.drafters import draft_model, eagle, medusa, prompt_lookup, stacked
from specjax.row_trees import TreeBounds
from specjax.serving.device import admit, prefill_rows, run_slots
from specjax.tree import DraftTree
from tests import hash_model as tiny
from tests import heads

TABLE = tiny.random_table(0)
TARGET = tiny.model(TABLE, tokenizer=tiny.Pieces())
CLOSE = tiny.model(TABLE + 0.7 * tiny.random_table(1))
"""A draft model that is right about half of the time."""
TREE = DraftTree((-1, 0, 0, 1, 1, 2))
LOOKUP = prompt_lookup(4, prompt_lookup_min=1)
DRAFTERS = {
    "none": None,
    "lookup": LOOKUP,
    "chain": draft_model(CLOSE, 3),
    "tree": draft_model(CLOSE, tree=TREE),
    "row trees": draft_model(CLOSE, tree=TreeBounds(5, 3), branching=2),
    "stack": stacked(LOOKUP, draft_model(CLOSE, 3)),
}
CAPACITY = 64


def settings_of(number: int) -> SamplingParams:
    """Settings that differ from request to request: greedy and not, filters, penalties, ends of all kinds."""
    random = np.random.default_rng(number)
    return SamplingParams(
        temperature=float(random.choice([0.0, 0.8, 1.3])),
        top_k=int(random.choice([0, 7])),
        repetition_penalty=float(random.choice([1.0, 1.3])),
        stop_token_ids=tuple(random.choice(50, size=2).tolist()) if number % 3 == 0 else (),
        stop=["ca"] if number % 4 == 1 else None,
        max_tokens=int(random.integers(1, 24)),
        seed=number,
        n=2 if number % 5 == 4 else 1,
    )


def prompt_of(number: int) -> list[int]:
    """Prompts of one token up to more than a small pass holds; some repeat themselves."""
    random = np.random.default_rng(1000 + number)
    length = int(random.choice([1, 2, 5, 17, 40]))
    return np.resize(random.integers(0, 50, size=max(1, length // 2)), length).tolist()


@functools.cache
def solo(number: int) -> list[specjax.Completion]:
    """The request alone, without speculation."""
    return specjax.generate(TARGET, [prompt_of(number)], settings_of(number), rule="gumbel")


def assert_same(done: list[specjax.Completion], alone: list[specjax.Completion]) -> None:
    for ours, theirs in zip(done, alone, strict=True):
        assert (ours.token_ids, ours.text, ours.finish_reason) == (theirs.token_ids, theirs.text, theirs.finish_reason)
        assert (ours.index, ours.seed, ours.stats.num_tokens) == (theirs.index, theirs.seed, theirs.stats.num_tokens)


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_every_request_gets_the_tokens_of_its_solo_run(drafter):
    numbers = list(range(14))
    sizes = [function._cache_size() for function in (run_slots, admit, prefill_rows)]
    with Engine(TARGET, drafter=drafter, rule="gumbel", slots=3, capacity=CAPACITY) as engine:
        done = iter(engine.run([Request(prompt_of(number), settings_of(number)) for number in numbers]))
    # One program for rounds, one for arrivals, one for each size of a pass over prompts, whatever came and went.
    new = [function._cache_size() - size for function, size in zip((run_slots, admit, prefill_rows), sizes, strict=True)]
    assert new[0] == 1
    assert new[1] <= 1
    assert new[2] <= 2
    for number in numbers:
        alone = solo(number)
        assert_same([next(done) for _ in alone], alone)


@pytest.mark.parametrize("rounds_per_dispatch", [1, 4])
def test_statistics_are_those_of_the_solo_run(rounds_per_dispatch):
    drafter, numbers = DRAFTERS["stack"], list(range(8))
    with Engine(TARGET, drafter=drafter, rule="gumbel", slots=3, capacity=CAPACITY, rounds_per_dispatch=rounds_per_dispatch) as e:
        done = iter(e.run([Request(prompt_of(number), settings_of(number)) for number in numbers]))
    for number in numbers:
        for alone in specjax.generate(TARGET, [prompt_of(number)], settings_of(number), drafter, rule="gumbel"):
            ours, theirs = (completion.stats.to_dict() for completion in (next(done), alone))
            assert ours["overlap"] == pytest.approx(theirs["overlap"])
            for name in theirs:
                if name.startswith(("num_", "by_")):
                    assert ours[name] == theirs[name], name


@pytest.mark.parametrize("kind", ["eagle", "growing eagle", "medusa"])
def test_heads_in_an_engine(kind):
    model = heads.cycling_target()
    drafter = {
        "eagle": lambda: eagle(heads.eagle_head(model), tree=TREE),
        "growing eagle": lambda: eagle(heads.eagle_head(model), tree=TreeBounds(4, 3), branching=2),
        "medusa": lambda: medusa(heads.medusa_heads(model), tree=TREE),
    }[kind]()
    prompts = [[1, 2, 3], [4] * 20, [5, 6], [7, 8, 9, 10, 11], [12]]
    settings = [SamplingParams(temperature=t, max_tokens=9 + i, seed=i) for i, t in enumerate((0.0, 0.7, 1.0, 0.7, 0.0))]
    rule_name = "gumbel" if kind != "growing eagle" else "match"
    if rule_name == "match":
        settings = [dataclasses.replace(s, temperature=0.0) for s in settings]
    with Engine(model, drafter=drafter, rule=rule_name, slots=2, capacity=48) as engine:
        done = engine.run([Request(prompt, s) for prompt, s in zip(prompts, settings, strict=True)])
    alone = [specjax.generate(model, [p], s, rule="gumbel")[0] for p, s in zip(prompts, settings, strict=True)]
    assert [c.token_ids for c in done] == [c.token_ids for c in alone]


def test_case_152_a_late_result_is_not_applied_to_the_next_request():
    with Engine(TARGET, rule="gumbel", slots=1, capacity=CAPACITY) as engine:
        first = engine.submit(Request([1, 2, 3], SamplingParams(temperature=0, max_tokens=30)))
        events = [*engine.step(), *engine.step()]
        # A round of the first is in flight now.
        assert engine._running.num_in_flight == 1
        engine.cancel(first)
        second = engine.submit(Request([7], SamplingParams(temperature=0, max_tokens=12)))
        while engine.unfinished:
            events.extend(engine.step())
    ours = {id: [event for event in events if event.id == id] for id in (first, second)}
    assert ours[first][-1].completion.finish_reason == "cancelled"
    assert [token for event in ours[first] for token in event.token_ids] == ours[first][-1].completion.token_ids
    assert ours[second][-1].completion.token_ids == tiny.greedy(TABLE, [7], 12)
    assert [token for event in ours[second] for token in event.token_ids] == tiny.greedy(TABLE, [7], 12)


class Traffic(RuleBasedStateMachine):
    """Requests come, are cancelled, and share slots in any order; what is answered is compared with solo runs."""

    drafter_name = "tree"
    steps = 0

    # Few sizes: each is compiled.
    @initialize(sizes=st.sampled_from([(1, 1), (3, 2)]))
    def start(self, sizes):
        slots, rounds = sizes
        drafter = DRAFTERS[self.drafter_name]
        self.engine = Engine(
            TARGET, drafter=drafter, rule="gumbel", slots=slots, capacity=CAPACITY, rounds_per_dispatch=rounds, max_queue=6
        )
        self.numbers = {}
        self.cancelled = set()
        self.tokens = collections.defaultdict(list)
        self.completions = collections.defaultdict(dict)

    @rule(number=st.integers(0, 11))
    def submit(self, number):
        if self.engine.num_waiting == 6:
            with pytest.raises(specjax.serving.QueueFull, match=r"max_queue is 6"):
                self.engine.submit(Request(prompt_of(number), settings_of(number)))
        else:
            self.numbers[self.engine.submit(Request(prompt_of(number), settings_of(number)))] = number

    @rule(prompt=st.sampled_from([[], [50], [1] * 60, None]))
    def submit_what_cannot_be_answered(self, prompt):
        with pytest.raises(ValueError, match=r"request"):
            self.engine.submit(Request(prompt, SamplingParams(max_tokens=10)))

    @rule(data=st.data())
    def cancel(self, data):
        open_ids = sorted(self.engine._jobs)
        if open_ids:
            id = data.draw(st.sampled_from(open_ids))
            self.engine.cancel(id)
            self.cancelled.add(id)

    @rule(count=st.integers(1, 20))
    def step(self, count):
        for _ in range(count):
            type(self).steps += 1
            for event in self.engine.step():
                self.tokens[event.id, event.index] += event.token_ids
                if event.completion is not None:
                    assert event.index not in self.completions[event.id]
                    self.completions[event.id][event.index] = event.completion

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        while self.engine.unfinished:
            self.step(1)
        assert self.completions.keys() == self.numbers.keys()
        for id, number in self.numbers.items():
            done = [self.completions[id][index] for index in sorted(self.completions[id])]
            assert len(done) == settings_of(number).n
            for ours, theirs in zip(done, solo(number), strict=True):
                assert self.tokens[id, ours.index] == ours.token_ids
                if ours.finish_reason == "cancelled":
                    assert id in self.cancelled
                    assert ours.token_ids == theirs.token_ids[: len(ours.token_ids)]
                else:
                    assert_same([ours], [theirs])
        assert self.engine.metrics.num_requests_running == 0
        self.engine.close()


# The same traffic every time, so that its amount can be asked for.
FEW = hypothesis.settings(
    derandomize=True, max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)


@pytest.mark.parametrize("drafter_name", ["tree", "stack"])
def test_any_schedule_gives_solo_runs(drafter_name):
    machine = type("Traffic", (Traffic,), {"drafter_name": drafter_name, "steps": 0})
    hypothesis.stateful.run_state_machine_as_test(machine, settings=FEW)
    assert machine.steps > 2000
