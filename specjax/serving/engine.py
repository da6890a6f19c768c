"""The engine: a batch of fixed shape whose slots requests join and leave between rounds.

A step of the host, while the device runs what the step before sent it::

    admit      requests from the queue move into free slots           admit()
    read       a few passes over prompts that are not in              prefill_rows()
    round      one or more rounds of all slots whose prompt is in     run_slots()       -> in flight
    collect    tokens of the dispatch before: text, stop strings, finished requests, free slots

What is collected is one dispatch old, so a row that the host ends (a stop string, a cancelled request) may have run once more;
those tokens are dropped. Every row is answered as if it were alone: nothing that its tokens are drawn from depends on
the others.
"""

import collections
import dataclasses
import itertools
import logging
import random
import secrets
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from specjax.decoding.completions import LOGPROBS_SIZES, Completion, Piece, excess_counters, row_counters, row_stats
from specjax.decoding.compose import compose
from specjax.decoding.round_costs import with_depths
from specjax.decoding.state import NO_TOKEN, Counters, DispatchInfo
from specjax.models.loaded import Model
from specjax.parallel import Processes, as_mesh, place_params, sizes_of, spread_round
from specjax.sampling.allowed_tokens import AllowedTokens
from specjax.sampling.params import MAX_LOGPROBS
from specjax.sampling.path import LogitsProcessor
from specjax.serving.memory import MemoryPlan, check_whole, fit_slots
from specjax.serving.metrics import EngineMetrics, Meter
from specjax.serving.requests import Job, QueueFull, Request, Room, check_request
from specjax.serving.schedule import MAX_PREFILLS, Slot, check_schedule, draft_depth, filling_order, next_prefill
from specjax.serving.slot_batch import MOST_ARRIVALS, SlotBatch
from specjax.statistics import RequestMetrics

LOG = logging.getLogger(__name__)

DEFAULT_CAPACITY = 1024
"""Tokens of a slot, where the model has so many positions."""


@dataclasses.dataclass(frozen=True)
class Event:
    """News of one completion.

    Attributes:
      id: of the request.
      index: which of its completions.
      token_ids: new tokens.
      text: new text that has become certain; always "" unless the request is streamed.
      completion: the whole, with the last event; None before.
      num_prompt_tokens: tokens of the prompt.
    """

    id: Any
    index: int
    token_ids: list[int]
    text: str = ""
    completion: Completion | None = None
    num_prompt_tokens: int = 0


@dataclasses.dataclass
class _InFlight:
    """A dispatch whose outcome the host has not seen."""

    occupants: list[Slot | None]
    info: DispatchInfo
    counters: Counters


class Engine:
    """Continuous batching with speculation in every slot.

    Args:
      model: the target.
      drafter: from ``specjax.drafters``, or None for plain decoding.
      rule: a rule's name, a rule object, or ``"auto"``: the lossless rule that accepts most of what the drafter proposes.
      slots: rows of the running batch; ``"auto"`` takes as many as fit, up to 16 on a CPU and 128 elsewhere.
      capacity: tokens of a slot, prompt and completion together; None: 1024, or the model's positions if they are fewer.
      rounds_per_dispatch: rounds that the device runs before the host looks; one whenever a stop string may come.
      max_queue: requests that may wait; more are refused with :class:`QueueFull`.
      max_logprobs: the most that a request's ``logprobs`` may be; None: no request may ask for them, and rounds make none.
      max_stop_token_ids: the most ids that may end a row, the model's own included.
      max_logit_bias: the most ids that a request may bias.
      draft_len_schedule: draft lengths by load, ``{4: 8, 16: 2}``: with up to 4 rows being answered drafts of up to 8, with up to
        16 of up to 2, with more none. A verify pass is compiled for each length. None: always the drafter's.
      adaptive: True: every round drafts only as deep as pays for the rows that are being answered, see :func:`specjax.generate`;
        what rounds cost is measured before the first request, once for each number of slots. Instead of a schedule.
      logits_processor: see :func:`specjax.generate`; of all requests.
      allowed_tokens: a grammar that all outputs keep to.
      allow_lossy: whether a rule that changes the distribution may be used.
      memory_limit: bytes that weights, caches and scratch may take, on a mesh on each device; None: what the device has.
      mesh: devices to run on, from :func:`specjax.parallel.make_mesh` or as text, ``"data=4,model=2"``: rows over ``data``, the
        target's heads, MLPs and vocabulary over ``model``, and those of a draft model that says ``split=True``. ``slots`` are
        those of all; "auto" takes so many for each part of ``data``. None: the default device alone. Over the devices of several
        processes (``jax.distributed.initialize``) each of them makes the same engine and calls the same methods with the same
        arguments in the same order; all get all events.

    Raises:
      ValueError: names the argument, its value and what would be right.

    Example:
      >>> from specjax.models.config import DecoderConfig
      >>> from specjax.models.decoder import Decoder
      >>> from specjax.sampling.params import SamplingParams
      >>> config = DecoderConfig(vocab_size=11, num_layers=1, width=8, num_query_heads=2, num_kv_heads=1, head_dim=4,
      ...                        mlp_width=16, max_positions=32)
      >>> model = Model(functions=Decoder(config), params=Decoder(config).init(jax.random.key(0)), vocab_size=11,
      ...               max_positions=32)
      >>> with Engine(model, slots=2) as engine:
      ...     done = engine.run([Request([1, 2, 3], SamplingParams(max_tokens=n)) for n in (4, 5, 6)])
      >>> [len(completion.token_ids) for completion in done]
      [4, 5, 6]
    """

    def __init__(
        self,
        model: Model,
        *,
        drafter: Any = None,
        rule: Any = "auto",
        slots: int | str = "auto",
        capacity: int | None = None,
        rounds_per_dispatch: int = 1,
        max_queue: int = 1024,
        max_logprobs: int | None = None,
        max_stop_token_ids: int = 8,
        max_logit_bias: int = 8,
        draft_len_schedule: Mapping[int, int] | None = None,
        adaptive: bool | Mapping[int, float] = False,
        logits_processor: LogitsProcessor | None = None,
        allowed_tokens: AllowedTokens | None = None,
        allow_lossy: bool = False,
        memory_limit: int | None = None,
        mesh: jax.sharding.Mesh | str | None = None,
    ):
        for name, value, least in (
            ("rounds_per_dispatch", rounds_per_dispatch, 1),
            ("max_queue", max_queue, 1),
            ("max_stop_token_ids", max_stop_token_ids, 0),
            ("max_logit_bias", max_logit_bias, 0),
            ("memory_limit", memory_limit, 1),
            ("max_logprobs", max_logprobs, 0),
        ):
            if value is not None:
                check_whole(name, value, least)
        if max_logprobs is not None and max_logprobs > MAX_LOGPROBS:
            raise ValueError(f"Engine: max_logprobs is {max_logprobs}; it must be None or from 0 to {MAX_LOGPROBS}")
        num_logprobs = None if max_logprobs is None else next(size for size in LOGPROBS_SIZES if max_logprobs <= size)
        mesh = as_mesh(mesh)
        self.processes = Processes.of(mesh)
        """Those that run this engine together."""
        program, params, self._law = compose(
            model,
            drafter,
            rule,
            greedy=False,
            allow_lossy=allow_lossy,
            logits_processor=logits_processor,
            allowed_tokens=allowed_tokens,
            num_logprobs=num_logprobs,
        )
        if mesh is not None:
            program = spread_round(program, mesh)
        self._parts = 1 if mesh is None else sizes_of(mesh).data
        self._schedule = check_schedule(draft_len_schedule, program.drafter.tree.depth)
        depths = tuple(sorted(set((self._schedule or {}).values())))
        program = dataclasses.replace(program, rounds_per_dispatch=rounds_per_dispatch, depths=depths)
        measured = True
        if adaptive is not False:
            if draft_len_schedule is not None:
                raise ValueError(f"Engine: adaptive is {adaptive!r:.200} beside a draft_len_schedule; give one of them")
            program, params, measured = with_depths("Engine", program, params, adaptive)
        if capacity is None:
            capacity = min(DEFAULT_CAPACITY, model.max_positions)
        check_whole("capacity", capacity, 2)
        if capacity > model.max_positions:
            raise ValueError(f"Engine: capacity is {capacity}; model {model.name!r} has {model.max_positions} positions")
        self._model = model
        self._room = Room(
            capacity=capacity,
            stop_ids=max(max_stop_token_ids, len(model.stop_token_ids)),
            biases=max_logit_bias,
            logprobs=max_logprobs,
        )
        self.memory: MemoryPlan = fit_slots(program, params, slots, self._room, memory_limit, self._parts, self.processes)
        """What the engine needs; made before anything was allocated."""
        LOG.info("%s", self.memory)

        def place(params):
            return params if mesh is None else place_params(program, params)

        self._batch = SlotBatch(model, program, place(params), self.memory.slots, self._room, self._parts)
        if not measured:
            self._batch.measure_rounds(place, self.processes.broadcast)
        self._max_queue = max_queue
        self._slots: list[Slot | None] = [None] * self.memory.slots
        self._queue: collections.deque[tuple[Job, int]] = collections.deque()
        self._jobs: dict[Hashable, Job] = {}
        self._in_flight: collections.deque[_InFlight] = collections.deque()
        self._num_waiting = 0
        self._news: list[Event] = []
        # Events go to whoever has asked for those of a request, else to the next step.
        self._readers: dict[Hashable, collections.deque[Event]] = {}
        self._unclaimed: list[Event] = []
        self._numbers, self._turns = itertools.count(), itertools.count()
        # Drawn alike by all processes.
        self._seeds = random.Random(self.processes.broadcast(secrets.randbits(128)))
        self._meter = Meter()
        self._closed = False

    # ---------------------------------------------------------------- requests

    def submit(self, request: Request) -> Any:
        """Puts a request into the queue and returns its id.

        Raises:
          ValueError: it cannot be answered here; nothing else is disturbed.
          QueueFull: the queue is full.
          RuntimeError: the engine is closed.
        """
        return self._submit(request).id

    def _submit(self, request: Request) -> Job:
        job = self._check(request)
        if self.num_waiting >= self._max_queue:
            raise QueueFull(f"the queue holds {self.num_waiting} requests, and max_queue is {self._max_queue}")
        self._enqueue(job)
        return job

    def _check(self, request: Request) -> Job:
        self._check_open()
        number = next(self._numbers)
        id = getattr(request, "id", None)
        id = number if id is None else id
        if not isinstance(id, Hashable):
            raise ValueError(f"request {id!r}: id is a {type(id).__name__}; it must be hashable")
        if id in self._jobs:
            raise ValueError(f"request {id!r}: there is a request of this id in the engine")
        return check_request(request, self._model, self._room, id, number, lambda: self._seeds.getrandbits(32))

    def _enqueue(self, job: Job) -> None:
        self._jobs[job.id] = job
        self._num_waiting += 1
        self._queue.extend((job, index) for index in range(len(job.rows)))

    def cancel(self, id: Any) -> None:
        """Gives a request up; its completions so far come as its last events, with ``finish_reason`` "cancelled".

        Raises:
          ValueError: no request of this id is in the engine.
        """
        self._check_open()
        job = self._jobs.get(id)
        if job is None:
            raise ValueError(f"cancel: there is no request {id!r} in the engine")
        here = {slot.row.index: slot for slot in self._slots if slot is not None and slot.job is job}
        self._queue = collections.deque(entry for entry in self._queue if entry[0] is not job)
        self._num_waiting -= job.admitted is None
        for row in job.rows:
            if row.running:
                row.cancel()
                slot = here.get(row.index)
                if slot is not None:
                    self._batch.end(slot.index)
                self._finish(job, row, slot)
        self._meter.counts["cancelled"] += 1

    # ---------------------------------------------------------------- running

    def step(self) -> list[Event]:
        """Sends the device its next work and returns what came of the work before.

        An empty list says nothing about the end: see :attr:`unfinished`. Events of requests that are streamed, or answered by
        :meth:`run`, go there.
        """
        self._check_open()
        self._advance()
        events, self._unclaimed = self._unclaimed, []
        return events

    def _advance(self) -> None:
        start, waited = time.perf_counter(), self._meter.wait_seconds
        self._admit()
        self._read_prompts()
        sent = self._send_rounds()
        if len(self._in_flight) > sent:
            self._collect(self._in_flight.popleft())
        news, self._news = self._news, []
        for event in news:
            self._readers.get(event.id, self._unclaimed).append(event)
        self._meter.host_seconds += time.perf_counter() - start - (self._meter.wait_seconds - waited)

    @property
    def unfinished(self) -> bool:
        """Whether more events will come."""
        return bool(self._jobs or self._in_flight or self._news or self._unclaimed)

    @property
    def num_waiting(self) -> int:
        """Requests none of whose completions has a slot yet."""
        return self._num_waiting

    @property
    def waiting(self) -> list[Any]:
        """Ids of the requests none of whose completions has a slot yet, in their order."""
        return list(dict.fromkeys(job.id for job, _ in self._queue if job.admitted is None))

    def stream(self, id: Any) -> Iterator[Piece]:
        """The text of a request as it comes; runs the engine whenever the next piece is asked for.

        Events of others that come meanwhile are kept for them; :meth:`step` is not needed beside it.

        Raises:
          ValueError: no request of this id is in the engine, or it has several completions.
        """
        self._check_open()
        job = self._jobs.get(id)
        if job is None:
            raise ValueError(f"stream: there is no request {id!r} in the engine")
        if len(job.rows) > 1:
            raise ValueError(f"stream: n of request {id!r} is {len(job.rows)}; it must be 1, a stream has one completion")
        job.rows[0].follow_text()
        return self._pieces(id, self._readers.setdefault(id, collections.deque()))

    def _pieces(self, id, events) -> Iterator[Piece]:
        try:
            while True:
                while not events:
                    self._check_open()
                    self._advance()
                event = events.popleft()
                yield Piece(event.text, event.token_ids, event.completion)
                if event.completion is not None:
                    return
        finally:
            self._readers.pop(id, None)

    def run(self, requests: Iterable[Request]) -> list[Completion]:
        """Answers requests and returns their completions in the order of the requests, ``n`` of each side by side.

        All are checked before any is started.

        Raises:
          ValueError: a request cannot be answered.
        """
        self._check_open()
        jobs, known = [], set()
        for request in requests:
            job = self._check(request)
            if job.id in known:
                raise ValueError(f"request {job.id!r}: two of the requests have this id")
            known.add(job.id)
            jobs.append(job)
        by_id = dict(self._as_completed(iter(jobs)))
        return [completion for job in jobs for completion in by_id[job.id]]

    def as_completed(self, requests: Iterable[Request]) -> Iterator[tuple[Any, list[Completion]]]:
        """Answers requests and yields (id, completions) as they finish.

        Requests are taken from the iterable as the queue has room, so it may be endless.

        Raises:
          ValueError: a request cannot be answered.
        """
        self._check_open()
        return self._as_completed(map(self._check, requests))

    def _as_completed(self, jobs: Iterator[Job]) -> Iterator[tuple[Any, list[Completion]]]:
        ours: dict[Any, Job] = {}
        events: collections.deque[Event] = collections.deque()
        more = True
        try:
            while more or ours:
                self._check_open()
                while more and self.num_waiting < min(self._max_queue, 2 * len(self._slots)):
                    job = next(jobs, None)
                    if job is None:
                        more = False
                    else:
                        ours[job.id] = job
                        self._readers[job.id] = events
                        self._enqueue(job)
                if ours:
                    self._advance()
                while events:
                    job = ours.get(events.popleft().id)
                    if job is not None and job.done:
                        del ours[job.id], self._readers[job.id]
                        yield job.id, [job.finished[index] for index in range(len(job.rows))]
        finally:
            for id in ours:
                self._readers.pop(id, None)

    def drain(self) -> list[Completion]:
        """Runs until every request in the engine is answered, and returns the completions that came meanwhile."""
        self._check_open()
        done: list[Completion] = []
        while self.unfinished:
            done.extend(event.completion for event in self.step() if event.completion is not None)
        return done

    # ---------------------------------------------------------------- around it

    @property
    def metrics(self) -> EngineMetrics:
        """What the engine did so far."""
        running = len({id(slot.job) for slot in self._slots if slot is not None})
        return self._meter.report(running, self.num_waiting)

    @property
    def model(self) -> Model:
        """The target."""
        return self._model

    @property
    def num_slots(self) -> int:
        """Rows of the running batch."""
        return self.memory.slots

    @property
    def rule(self) -> Any:
        """The verification rule in use."""
        return self._batch.program.rule

    def close(self) -> None:
        """Gives the memory of the slots back; requests that are not answered are dropped."""
        self._closed = True
        self._batch.close()
        self._slots = []
        for pending in (self._in_flight, self._queue, self._jobs, self._readers):
            pending.clear()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed; make a new one")

    # ---------------------------------------------------------------- parts of a step

    def _admit(self) -> None:
        free = [index for index, slot in enumerate(self._slots) if slot is None]
        free = filling_order(free, len(self._slots), self._parts)
        while free and self._queue:
            arriving: list[Slot] = []
            while free and self._queue and len(arriving) < MOST_ARRIVALS:
                job, index = self._queue.popleft()
                slot = Slot(free.pop(0), job, job.rows[index], len(job.prompt) - 1)
                if job.admitted is None:
                    job.admitted, job.turn = time.perf_counter(), next(self._turns)
                    self._num_waiting -= 1
                    self._meter.times["queue"].append(job.admitted - job.arrived)
                self._slots[slot.index] = slot
                arriving.append(slot)
            self._batch.admit(arriving)

    def _read_prompts(self) -> None:
        for _ in range(MAX_PREFILLS):
            taken = [slot for slot in self._slots if slot is not None and slot.row.running]
            waiting = sorted((slot for slot in taken if not slot.prompt_in), key=lambda slot: slot.job.turn)
            if not waiting:
                return
            width, chosen = next_prefill(waiting, len(self._slots) // self._parts)
            self._batch.read(width, [slot.index for slot in chosen])
            for slot in chosen:
                fed = min(slot.to_feed, width)
                slot.to_feed -= fed
                self._meter.counts["prompt"] += fed
                slot.prompt_in = slot.to_feed == 0
                if slot.prompt_in:
                    slot.prompt_read = time.perf_counter()
            # Rows that are being answered wait for one pass at a time, unless most slots still do nothing.
            if 2 * sum(slot.prompt_in for slot in taken) >= len(taken):
                return

    def _send_rounds(self) -> bool:
        answering = [slot for slot in self._slots if slot is not None and slot.answering]
        if not answering:
            return False
        stops = any(slot.row.looks_for_stops for slot in answering)
        # The device knows no stop strings: where one may come, the host looks at every round.
        rounds = 1 if stops else self._batch.program.rounds_per_dispatch
        depth = draft_depth(self._schedule, len(answering), self._batch.program.drafter.tree.depth)
        info, counters = self._batch.run(depth, rounds)
        for leaf in jax.tree.leaves((info, counters)):
            leaf.copy_to_host_async()
        occupants = [slot if slot is not None and slot.answering else None for slot in self._slots]
        self._in_flight.append(_InFlight(occupants, info, counters))
        return True

    def _collect(self, dispatch: _InFlight) -> None:
        start = time.perf_counter()
        info, counters = jax.device_get((dispatch.info, dispatch.counters))
        now = time.perf_counter()
        self._meter.wait_seconds += now - start
        rounds = int(info.rounds)
        self._meter.counts.update(
            rounds=rounds, slots=rounds * len(self._slots), used=int(np.sum(info.tokens[..., 0] != NO_TOKEN))
        )
        for place, slot in enumerate(dispatch.occupants):
            # What came behind the end of a row, or after it was given up, belongs to nobody.
            if slot is not None and slot.row.running:
                self._take(slot, info, place, row_counters(counters, place), now)

    def _take(self, slot: Slot, info: DispatchInfo, place: int, counters: Counters, now: float) -> None:
        emitted = int(np.sum(info.tokens[place] != NO_TOKEN))
        tokens = slot.row.extend(info, place)
        if len(tokens) < emitted:
            before = jax.tree.map(np.zeros_like, counters) if slot.counters is None else slot.counters
            counters = jax.tree.map(np.subtract, counters, excess_counters(before, counters, len(tokens)))
        slot.counters = counters
        if tokens:
            self._meter.counts["tokens"] += len(tokens)
            if slot.last_tokens is None:
                slot.first_tokens = now
                self._meter.times["first"].append(now - slot.job.arrived)
            else:
                self._meter.times["between"].append(now - slot.last_tokens)
            slot.last_tokens = now
        if slot.row.running:
            if tokens:
                text, length = slot.row.take_text(), len(slot.job.prompt)
                self._news.append(Event(slot.job.id, slot.row.index, tokens, text, None, length))
        else:
            self._finish(slot.job, slot.row, slot, tokens)

    def _finish(self, job: Job, row, slot: Slot | None, tokens: Iterable[int] = ()) -> None:
        now = time.perf_counter()
        counters = self._no_counters() if slot is None or slot.counters is None else slot.counters
        first = now if slot is None or slot.first_tokens is None else slot.first_tokens
        read = now if slot is None or slot.prompt_read is None else slot.prompt_read
        admitted = now if job.admitted is None else job.admitted
        stats = row_stats(
            self._batch.program, self._law, counters, row.num_tokens, prefill_seconds=read - admitted, decode_seconds=now - read
        )
        metrics = RequestMetrics(
            queue_time=admitted - job.arrived,
            time_to_first_token=first - job.arrived,
            time_per_output_token=(now - first) / (row.num_tokens - 1) if row.num_tokens > 1 else None,
            e2e_latency=now - job.arrived,
        )
        text = row.take_text()
        job.finished[row.index] = completion = row.completion(stats, metrics)
        self._news.append(Event(job.id, row.index, list(tokens), text, completion, len(job.prompt)))
        if slot is not None:
            self._slots[slot.index] = None
        if job.done:
            del self._jobs[job.id]
            self._meter.counts["finished"] += 1

    def _no_counters(self) -> Counters:
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape[1:], leaf.dtype), self._batch.state.counters)
