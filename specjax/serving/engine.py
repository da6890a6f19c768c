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

from specjax.decoding.completions import LOGPROBS_SIZES, Completion, Piece
from specjax.decoding.compose import compose
from specjax.decoding.round_costs import with_depths
from specjax.models.loaded import Model
from specjax.parallel import Processes, as_mesh, place_params, sizes_of, spread_round
from specjax.sampling.allowed_tokens import AllowedTokens
from specjax.sampling.params import MAX_LOGPROBS
from specjax.sampling.path import LogitsProcessor
from specjax.serving.memory import MemoryPlan, check_whole, fit_slots
from specjax.serving.metrics import EngineMetrics, Meter
from specjax.serving.requests import Job, QueueFull, Request, Room, check_request
from specjax.serving.running import Event, RequestQueue, RunningRequests
from specjax.serving.schedule import check_schedule
from specjax.serving.slot_batch import SlotBatch

LOG = logging.getLogger(__name__)

DEFAULT_CAPACITY = 1024
"""Tokens of a slot, where the model has so many positions."""


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
        program, params, law = compose(
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
        parts = 1 if mesh is None else sizes_of(mesh).data
        schedule = check_schedule(draft_len_schedule, program.drafter.tree.depth)
        depths = tuple(sorted(set((schedule or {}).values())))
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
        self.memory: MemoryPlan = fit_slots(program, params, slots, self._room, memory_limit, parts, self.processes)
        """What the engine needs; made before anything was allocated."""
        LOG.info("%s", self.memory)

        def place(params):
            return params if mesh is None else place_params(program, params)

        self._batch = SlotBatch(model, program, place(params), self.memory.slots, self._room, parts)
        if not measured:
            self._batch.measure_rounds(place, self.processes.broadcast)
        self._max_queue = max_queue
        self._meter = Meter()
        self._queue = RequestQueue(self._meter)
        self._running = RunningRequests(self._batch, law, schedule, parts, self._meter)
        self._jobs: dict[Hashable, Job] = {}
        self._news: list[Event] = []
        # Events go to whoever has asked for those of a request, else to the next step.
        self._readers: dict[Hashable, collections.deque[Event]] = {}
        self._unclaimed: list[Event] = []
        self._numbers = itertools.count()
        # Drawn alike by all processes.
        self._seeds = random.Random(self.processes.broadcast(secrets.randbits(128)))
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
        self._queue.push(job)

    def cancel(self, id: Any) -> None:
        """Gives a request up; its completions so far come as its last events, with ``finish_reason`` "cancelled".

        Raises:
          ValueError: no request of this id is in the engine.
        """
        self._check_open()
        job = self._jobs.get(id)
        if job is None:
            raise ValueError(f"cancel: there is no request {id!r} in the engine")
        self._queue.remove(job)
        self._note(self._running.cancel(job))
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
        self._running.admit(self._queue)
        self._running.read_prompts()
        sent = self._running.send_rounds()
        if self._running.num_in_flight > sent:
            self._note(self._running.collect())
        news, self._news = self._news, []
        for event in news:
            self._readers.get(event.id, self._unclaimed).append(event)
        self._meter.host_seconds += time.perf_counter() - start - (self._meter.wait_seconds - waited)

    def _note(self, events: Iterable[Event]) -> None:
        """Keeps news for their readers, and forgets requests that are answered."""
        for event in events:
            self._news.append(event)
            job = self._jobs.get(event.id)
            if event.completion is not None and job is not None and job.done:
                del self._jobs[event.id]
                self._meter.counts["finished"] += 1

    @property
    def unfinished(self) -> bool:
        """Whether more events will come."""
        return bool(self._jobs or self._running.num_in_flight or self._news or self._unclaimed)

    @property
    def num_waiting(self) -> int:
        """Requests none of whose completions has a slot yet."""
        return self._queue.num_requests

    @property
    def waiting(self) -> list[Any]:
        """Ids of the requests none of whose completions has a slot yet, in their order."""
        return self._queue.ids

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
                while more and self.num_waiting < min(self._max_queue, 2 * self.num_slots):
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
        return self._meter.report(self._running.num_requests, self.num_waiting)

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
        for pending in (self._running, self._queue, self._jobs, self._readers):
            pending.clear()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed; make a new one")
