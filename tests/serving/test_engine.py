"""What the engine offers beside exact tokens: queue, order, streams, metrics, memory, and what it refuses."""

import dataclasses

import jax
import numpy as np
import pytest

import specjax
from specjax import Engine, Request, SamplingParams
from specjax.drafters import draft_model, prompt_lookup
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.serving import QueueFull
from specjax.serving.device import run_slots
from specjax.serving.schedule import Slot, check_schedule, draft_depth, next_prefill, rows_of
from specjax.tree import DraftTree
from tests import hash_model as tiny

TABLE = tiny.random_table(0)
TARGET = tiny.model(TABLE, tokenizer=tiny.Pieces(), stop_token_ids=(49,))
PERFECT = draft_model(tiny.model(TABLE), 4)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def engine(**settings):
    return Engine(TARGET, **{"rule": "gumbel", "slots": 2, "capacity": 64} | settings)


def request(prompt=(1, 2, 3), id=None, **settings):
    return Request(list(prompt), dataclasses.replace(GREEDY, **settings), id)


# Requests and their answers


def test_submit_step_and_drain():
    with engine() as e:
        ids = [e.submit(request([n])) for n in range(5)]
        assert (ids, e.num_waiting, e.unfinished) == ([0, 1, 2, 3, 4], 5, True)
        assert e.step() == []
        assert (e.num_waiting, e.metrics.num_requests_running) == (3, 2)
        done = e.drain()
        assert not e.unfinished
        assert e.step() == []
    # First come, first served.
    assert [c.prompt_index for c in done] == ids
    assert [c.token_ids for c in done] == [tiny.greedy(TABLE, [n], 12) for n in range(5)]


def test_a_stream_gives_the_text_as_it_comes_beside_other_requests():
    with engine() as e:
        other = e.submit(request([9]))
        id = e.submit(request([5], stop=["ca"], max_tokens=30))
        pieces = list(e.stream(id))
        (rest,) = e.drain()
        (alone,) = specjax.generate(TARGET, [[5]], dataclasses.replace(GREEDY, stop=["ca"], max_tokens=30))
    assert pieces[-1].completion.text == "".join(piece.text for piece in pieces) == alone.text
    assert len([piece for piece in pieces if piece.text]) > 1
    assert [token for piece in pieces for token in piece.token_ids] == alone.token_ids
    assert rest.prompt_index == other
    assert rest.token_ids == tiny.greedy(TABLE, [9], 12)


def test_a_stream_that_is_asked_for_late_has_all_the_text():
    with engine() as e:
        id = e.submit(request([5]))
        early = [token for _ in range(4) for event in e.step() for token in event.token_ids]
        pieces = list(e.stream(id))
        assert early
        assert pieces[-1].completion.text == "".join(piece.text for piece in pieces)
        with pytest.raises(ValueError, match=r"stream: there is no request 0 in the engine"):
            e.stream(id)


def test_events_of_others_are_kept_while_a_run_or_a_stream_goes_on():
    with engine() as e:
        mine = e.submit(request([9], max_tokens=3))
        (ran,) = e.run([request([5])])
        streamed = e.submit(request([6], max_tokens=30))
        pieces = list(e.stream(streamed))
        assert e.unfinished
        events = e.step()
        assert not e.unfinished
    assert [event.id for event in events] == [mine] * len(events)
    assert [token for event in events for token in event.token_ids] == tiny.greedy(TABLE, [9], 3)
    assert events[-1].completion.token_ids == tiny.greedy(TABLE, [9], 3)
    assert ran.token_ids == tiny.greedy(TABLE, [5], 12)
    assert pieces[-1].completion.token_ids == tiny.greedy(TABLE, [6], 30)


def test_case_166_several_completions_take_a_slot_each():
    table = np.zeros_like(TABLE)
    with Engine(tiny.model(table), slots=3, capacity=32) as e:
        greedy = e.run([Request([1], SamplingParams(temperature=0, n=3))])
        drawn, again = (e.run([Request([1], SamplingParams(n=3, seed=1))]) for _ in range(2))
    assert [c.index for c in greedy] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in greedy}) == 1
    assert len({tuple(c.token_ids) for c in drawn}) == 3
    assert [c.token_ids for c in drawn] == [c.token_ids for c in again]


def test_requests_are_taken_as_there_is_room_and_yielded_as_they_finish():
    taken = []

    def endless():
        for number in range(10**9):
            taken.append(number)
            yield request([number % 50], id=f"r{number}", max_tokens=3 if number % 2 else 20)

    with engine() as e:
        answers = e.as_completed(endless())
        first = [next(answers) for _ in range(6)]
    assert len(taken) < 20
    assert [id for id, _ in first] != [f"r{number}" for number in range(6)]  # the short ones are sooner
    for id, (completion,) in first:
        number = int(id[1:])
        assert completion.token_ids == tiny.greedy(TABLE, [number % 50], 3 if number % 2 else 20)


def test_log_probabilities_are_those_of_generate():
    asked = [request([3], logprobs=3), request([4], logprobs=0), request([5])]
    with engine(max_logprobs=3) as e:
        done = e.run(asked)
    alone = [specjax.generate(TARGET, [r.prompt], r.params, rule="gumbel")[0] for r in asked]
    assert [c.logprobs for c in done] == [c.logprobs for c in alone]
    assert done[2].logprobs is None


def test_a_request_that_is_cancelled_in_the_queue_never_runs():
    with engine(slots=1) as e:
        first, second = e.submit(request([1], id="a")), e.submit(request([2], id="b", n=2))
        e.cancel(second)
        events = e.step()
        assert [(event.id, event.index, event.completion.finish_reason) for event in events] == [
            ("b", 0, "cancelled"),
            ("b", 1, "cancelled"),
        ]
        assert [event.completion.token_ids for event in events] == [[], []]
        (done,) = e.drain()
        assert done.token_ids == tiny.greedy(TABLE, [1], 12)
        assert (e.metrics.num_requests_cancelled, first) == (1, "a")
        with pytest.raises(ValueError, match=r"cancel: there is no request 'b'"):
            e.cancel("b")


# Order, and how long others wait


def test_case_154_long_answers_and_a_stream_of_new_prompts_all_finish():
    with engine(slots=5) as e:
        long = [e.submit(request([n], max_tokens=60)) for n in range(4)]
        short = [e.submit(request([n] * 30, max_tokens=2)) for n in range(30)]
        steps, finished = 0, {}
        while e.unfinished:
            steps += 1
            finished |= {event.id: steps for event in e.step() if event.completion is not None}
    assert finished.keys() == {*long, *short}
    # One slot is left for the short ones, and each takes it for a few steps; the long ones are done in the meantime.
    assert max(finished[id] for id in long) < 100
    assert steps < 200


def slot(number, to_feed):
    return Slot(number, None, None, to_feed)


def test_prompts_are_read_in_order_and_in_few_sizes():
    # Four short ones at once, three too; of two, one at a time.
    assert next_prefill([slot(n, 10) for n in range(5)])[0] == 64
    assert [s.index for s in next_prefill([slot(n, 10) for n in range(5)])[1]] == [0, 1, 2, 3]
    assert [s.index for s in next_prefill([slot(n, 10) for n in range(3)])[1]] == [0, 1, 2]
    assert [s.index for s in next_prefill([slot(n, 10) for n in range(2)])[1]] == [0]
    # A long one is first when it came first, by pieces of 256; short ones behind it wait, and go together when it is their turn.
    width, chosen = next_prefill([slot(0, 1000), *(slot(n, 3) for n in range(1, 5))])
    assert (width, [s.index for s in chosen]) == (256, [0])
    width, chosen = next_prefill([slot(0, 3), slot(1, 1000), slot(2, 64), slot(3, 65), slot(4, 9)])
    assert (width, [s.index for s in chosen]) == (64, [0, 2, 4])
    assert [rows_of(64, 1), rows_of(64, 3), rows_of(256, 1)] == [1, 4, 1]


def test_a_row_that_is_answered_waits_for_one_pass_of_a_long_prompt_at_a_time():
    model = tiny.model(TABLE, max_positions=2048)
    with Engine(model, rule="gumbel", slots=2, capacity=2048) as e:
        e.submit(request([1], id="short", max_tokens=40))
        for _ in range(3):
            e.step()
        e.submit(request([2] * 1500, id="long", max_tokens=2))
        order = []
        while e.unfinished:
            order += [event.id for event in e.step()]
    # Six passes of 256 tokens; a token of the short one between any two of them.
    assert order.index("long") >= 6
    assert set(order[: order.index("long")]) == {"short"}


# Draft lengths by load


@pytest.mark.parametrize("schedule", [{1: 4, 2: 2}, {2: 0}, {1: 1}])
def test_the_schedule_turns_drafts_down_without_changing_a_token(schedule):
    requests = [request([n], id=n, max_tokens=20 + 15 * n) for n in range(3)]
    before, target = run_slots._cache_size(), tiny.model(TABLE, max_positions=96)
    with Engine(target, rule="gumbel", drafter=PERFECT, slots=3, capacity=96, draft_len_schedule=schedule) as e:
        done = e.run(requests)
    assert run_slots._cache_size() - before == 1
    assert [c.token_ids for c in done] == [tiny.greedy(TABLE, [n], 20 + 15 * n) for n in range(3)]
    depth = max(schedule.values())
    lengths = [c.stats.mean_acceptance_length for c in done]
    # With three rows nothing is drafted; the longest answer is alone at the end, where drafts are as long as they may be.
    assert max(lengths) <= 1 + depth
    assert (lengths[2] > lengths[0]) == (depth > 0)
    assert all(count == 0 for c in done for count in c.stats.num_accepted_tokens_per_pos[depth:])


@pytest.mark.parametrize("settings", [{"draft_len_schedule": {1: 4, 2: 0}}, {"adaptive": {0: 1.0, 1: 1.6, 4: 2.2}}])
def test_case_142_a_load_that_comes_and_goes_compiles_nothing(settings):
    before, target = run_slots._cache_size(), tiny.model(TABLE, max_positions=80)
    with Engine(target, rule="gumbel", drafter=PERFECT, slots=3, capacity=80, **settings) as e:
        for wave, rows in enumerate((1, 3, 1, 3, 2, 1)):
            done = e.run([request([wave, n], id=(wave, n)) for n in range(rows)])
            assert [c.token_ids for c in done] == [tiny.greedy(TABLE, [wave, n], 12) for n in range(rows)]
    assert run_slots._cache_size() - before == 1


def test_case_139_a_draft_of_the_same_weights_is_accepted_whole_in_every_new_engine():
    for turn in range(20):
        with engine(drafter=PERFECT) as e:
            (done,) = e.run([request([turn], max_tokens=21)])
        assert (done.stats.num_draft_tokens, done.stats.num_accepted_tokens, done.stats.num_drafts) == (16, 16, 5)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [([4], r"draft_len_schedule is \[4\]; it must be None or a dict"), ({0: 2}, r"holds 0: 2"), ({4: 9}, r"holds 4: 9; .* 4")],
)
def test_a_schedule_that_means_nothing_is_refused(schedule, message):
    with pytest.raises(ValueError, match=message):
        check_schedule(schedule, 4)


def test_the_schedule_is_by_rows():
    assert [draft_depth({2: 8, 16: 3}, rows, 5) for rows in (1, 2, 3, 16, 17)] == [5, 5, 3, 3, 0]
    assert draft_depth(None, 100, 5) == 5


# Metrics


def test_case_135_metrics_of_a_fresh_engine_are_defined():
    with engine() as e:
        metrics = e.metrics.to_dict()
    assert (metrics["slot_use"], metrics["time_to_first_token"], metrics["generation_tokens"]) == (0, None, 0)


def test_metrics_count_what_was_done():
    with engine(drafter=prompt_lookup(4)) as e:
        done = e.run([request([n] * 5, max_tokens=7 + n) for n in range(4)])
        metrics = e.metrics
    assert metrics.generation_tokens == sum(len(c.token_ids) for c in done) == 7 + 8 + 9 + 10
    assert metrics.prompt_tokens == 4 * 4
    assert metrics.num_requests_finished == 4
    assert 0.5 < metrics.slot_use <= 1
    for c in done:
        m = c.metrics
        assert 0 <= m.queue_time <= m.time_to_first_token <= m.e2e_latency
        assert m.time_per_output_token * (len(c.token_ids) - 1) <= m.e2e_latency
    # The later two waited for a slot of the first two.
    assert min(c.metrics.queue_time for c in done[2:]) > max(c.metrics.queue_time for c in done[:2])


# Memory


CONFIG = DecoderConfig(
    vocab_size=512, num_layers=8, width=64, num_query_heads=4, num_kv_heads=2, head_dim=16, mlp_width=128, max_positions=256
)


def decoder(**changes):
    config = dataclasses.replace(CONFIG, **changes)
    params = Decoder(config).init(jax.random.key(0))
    return specjax.Model(functions=Decoder(config), params=params, vocab_size=512, max_positions=256)


def test_cases_146_148_the_plan_counts_both_models_and_caches():
    target, draft = decoder(), decoder(num_layers=2)
    with Engine(target, drafter=draft_model(draft, 3), slots=4, capacity=128, memory_limit=10**9) as e:
        plan = e.memory
        batch = e._batch
        state = batch.state
        # 128 entries of both models: the newest of 128 tokens is in neither cache, and caches hold whole tiles of eight.
        entry = 2 * 2 * 16 * 4
        assert plan.caches == 4 * 128 * (8 + 2) * entry + sum(
            leaf.nbytes for leaf in (state.cache.lengths, *_small(state.drafter))
        )
        assert plan.weights == sum(leaf.nbytes for leaf in jax.tree.leaves((target.params, draft.params)))
        assert plan.block == 4 * 4 * 8 * entry
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        assert plan.caches + plan.rows == held
        lowered = run_slots.lower(batch.program, batch.params, state, np.zeros(4, bool), np.int32(3), np.int32(1))
        scratch = lowered.compile().memory_analysis().temp_size_in_bytes
        # An estimate, but not a small part nor a large multiple of what the compiler asks for.
        assert scratch / 3 < plan.scratch + plan.block < 3 * scratch


def _small(drafter_state):
    return [leaf for leaf in jax.tree.leaves(drafter_state) if leaf.ndim < 3]


def test_what_does_not_fit_is_refused_with_what_would():
    target = decoder()
    with Engine(target, slots=4, capacity=256, memory_limit=10**9) as e:
        needed = e.memory.total
    with pytest.raises(
        ValueError, match=r"8 slots of 256 tokens: .* MB of .* available .* do not fit; (\d+) slots of 256"
    ) as told:
        Engine(target, slots=8, capacity=256, memory_limit=needed)
    assert "4 slots of 256 tokens or 8 slots of" in str(told.value)
    with Engine(target, slots="auto", capacity=256, memory_limit=needed) as e:
        assert e.memory.slots == 4
    with pytest.raises(ValueError, match=r"the weights take .* MB already"):
        Engine(target, slots=1, memory_limit=1000)


# What is refused


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request([1] * 60), r"request 0: a prompt of 60 tokens and max_tokens 12 do not fit into a slot's capacity of 64"),
        (request([]), r"request 0: .*has no tokens"),
        (request([50]), r"request 0: .*holds 50; token ids are whole numbers from 0 to 49"),
        (request([1], logprobs=1), r"logprobs is 1; this engine reports none at all \(max_logprobs\)"),
        (request([1], stop_token_ids=range(9)), r"stop_token_ids.* has 9 ids; this engine's slots have room for 8"),
        (request([1], logit_bias=dict.fromkeys(range(9), 1.0)), r"logit_bias has 9 ids; .* room for 8"),
        (Request([1], "greedy"), r"request 0: params is 'greedy'"),
        (Request([1], GREEDY, id=[]), r"id is a list; it must be hashable"),
        ([1, 2], r"request is list; it must be a specjax.Request"),
    ],
)
def test_a_refused_request_disturbs_nobody(bad, message):
    with engine() as e:
        with pytest.raises(ValueError, match=message):
            e.submit(bad)
        good = e.submit(request([1]))
        with pytest.raises(ValueError, match=message.replace("request 0", "request .")):
            e.submit(bad)
        with pytest.raises(ValueError, match=rf"request {good}: there is a request of this id in the engine"):
            e.submit(request([2], id=good))
        (done,) = e.drain()
    assert done.token_ids == tiny.greedy(TABLE, [1], 12)


def test_all_requests_of_a_run_are_checked_before_any_is_started():
    with engine() as e:
        with pytest.raises(ValueError, match=r"two of the requests have this id"):
            e.run([request([1], id=7), request([2], id=7)])
        with pytest.raises(ValueError, match=r"do not fit"):
            e.run([request([1]), request([1] * 63)])
        assert not e.unfinished
        assert e.metrics.num_requests_running == 0


def test_a_full_queue_refuses_and_goes_on():
    with engine(max_queue=2) as e:
        ids = [e.submit(request([n])) for n in (1, 2)]
        with pytest.raises(QueueFull, match=r"the queue holds 2 requests, and max_queue is 2"):
            e.submit(request([3]))
        e.step()
        ids.append(e.submit(request([3])))
        assert [c.token_ids for c in e.drain()] == [tiny.greedy(TABLE, [n], 12) for n in (1, 2, 3)]


def test_a_closed_engine_says_so():
    e = engine()
    e.submit(request())
    e.close()
    for use in (e.step, e.drain, lambda: e.submit(request()), lambda: e.run([]), lambda: e.stream(0), lambda: e.cancel(0)):
        with pytest.raises(RuntimeError, match=r"the engine is closed; make a new one"):
            use()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": 0}, r'Engine: slots is 0; it must be a whole number of at least 1 or "auto"'),
        ({"slots": "many"}, r"Engine: slots is 'many'"),
        ({"capacity": 65}, r"Engine: capacity is 65; model 'model' has 64 positions"),
        ({"capacity": 1}, r"Engine: capacity is 1; it must be a whole number of at least 2"),
        ({"rounds_per_dispatch": 0}, r"rounds_per_dispatch is 0"),
        ({"max_queue": 1.5}, r"max_queue is 1.5"),
        ({"max_logprobs": 21}, r"max_logprobs is 21; it must be None or from 0 to 20"),
        ({"rule": "token", "drafter": draft_model(tiny.model(TABLE), tree=DraftTree((-1, 0, 0)))}, r"rule"),
    ],
)
def test_settings_that_make_no_engine(settings, message):
    with pytest.raises(ValueError, match=message):
        engine(**settings)
