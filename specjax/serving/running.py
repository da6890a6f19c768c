"""The requests that have a slot: moving in, reading of prompts, rounds, and what came of them.

A dispatch of rounds is sent before the outcome of the one before it is looked at, so that the device never waits for the host.
"""

import collections
import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from specjax.decoding.completions import Completion, Row, excess_counters, row_counters, row_stats
from specjax.decoding.state import NO_TOKEN, Counters, DispatchInfo
from specjax.serving.metrics import Meter
from specjax.serving.requests import Job
from specjax.serving.schedule import MAX_PREFILLS, Slot, draft_depth, filling_order, next_prefill
from specjax.serving.slot_batch import MOST_ARRIVALS, SlotBatch
from specjax.statistics import RequestMetrics


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


class RequestQueue:
    """Completions that wait for a slot, first come first served.

    Args:
      meter: is told how long they waited.
    """

    def __init__(self, meter: Meter):
        self._meter = meter
        self._entries: collections.deque[tuple[Job, int]] = collections.deque()
        self._turns = itertools.count()
        self.num_requests = 0
        """Requests none of whose completions has a slot yet."""

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def ids(self) -> list[Any]:
        """Of these requests, in their order."""
        return list(dict.fromkeys(job.id for job, _ in self._entries if job.admitted is None))

    def push(self, job: Job) -> None:
        """All completions of a request come last."""
        self.num_requests += 1
        self._entries.extend((job, index) for index in range(len(job.rows)))

    def pop(self) -> tuple[Job, int]:
        """The next request, and which of its completions."""
        job, index = self._entries.popleft()
        if job.admitted is None:
            job.admitted, job.turn = time.perf_counter(), next(self._turns)
            self.num_requests -= 1
            self._meter.times["queue"].append(job.admitted - job.arrived)
        return job, index

    def remove(self, job: Job) -> None:
        """Nothing of it waits any longer."""
        self._entries = collections.deque(entry for entry in self._entries if entry[0] is not job)
        self.num_requests -= job.admitted is None

    def clear(self) -> None:
        """Nobody waits."""
        self._entries.clear()
        self.num_requests = 0


@dataclasses.dataclass
class _InFlight:
    """A dispatch whose outcome the host has not seen."""

    occupants: list[Slot | None]
    info: DispatchInfo
    counters: Counters


class RunningRequests:
    """The requests in the slots of a batch, and the host's books about them.

    Args:
      batch: the slots on the device.
      law: that the drafter draws by.
      schedule: draft lengths by load, None: always the drafter's.
      parts: parts of the batch that a mesh makes.
      meter: counts what happens.
    """

    def __init__(self, batch: SlotBatch, law: Any, schedule: Mapping[int, int] | None, parts: int, meter: Meter):
        self._batch, self._law, self._schedule, self._parts, self._meter = batch, law, schedule, parts, meter
        self._slots: list[Slot | None] = [None] * batch.num_slots
        self._in_flight: collections.deque[_InFlight] = collections.deque()

    @property
    def num_requests(self) -> int:
        """Requests that have a slot."""
        return len({id(slot.job) for slot in self._taken()})

    @property
    def num_in_flight(self) -> int:
        """Dispatches whose outcome has not been collected."""
        return len(self._in_flight)

    def clear(self) -> None:
        """Drops everything."""
        self._slots = []
        self._in_flight.clear()

    def _taken(self) -> Iterator[Slot]:
        return (slot for slot in self._slots if slot is not None)

    def admit(self, queue: RequestQueue) -> None:
        """Moves whoever waits into free slots."""
        free = [index for index, slot in enumerate(self._slots) if slot is None]
        free = filling_order(free, len(self._slots), self._parts)
        while free and queue:
            arriving: list[Slot] = []
            while free and queue and len(arriving) < MOST_ARRIVALS:
                job, index = queue.pop()
                slot = Slot(free.pop(0), job, job.rows[index], len(job.prompt) - 1)
                self._slots[slot.index] = slot
                arriving.append(slot)
            self._batch.admit(arriving)

    def read_prompts(self) -> None:
        """A few passes over prompts that are not in."""
        for _ in range(MAX_PREFILLS):
            taken = [slot for slot in self._taken() if slot.row.running]
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

    def send_rounds(self) -> bool:
        """Sends the device rounds of all slots whose prompt is in; False if there are none."""
        answering = [slot for slot in self._taken() if slot.answering]
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

    def collect(self) -> list[Event]:
        """What came of the oldest dispatch that was sent; waits for it."""
        dispatch = self._in_flight.popleft()
        start = time.perf_counter()
        info, counters = jax.device_get((dispatch.info, dispatch.counters))
        now = time.perf_counter()
        self._meter.wait_seconds += now - start
        rounds = int(info.rounds)
        self._meter.counts.update(
            rounds=rounds, slots=rounds * len(self._slots), used=int(np.sum(info.tokens[..., 0] != NO_TOKEN))
        )
        events: list[Event] = []
        for place, slot in enumerate(dispatch.occupants):
            # What came behind the end of a row, or after it was given up, belongs to nobody.
            if slot is not None and slot.row.running:
                events.extend(self._take(slot, info, place, row_counters(counters, place), now))
        return events

    def _take(self, slot: Slot, info: DispatchInfo, place: int, counters: Counters, now: float) -> list[Event]:
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
        if not slot.row.running:
            return [self._finish(slot.job, slot.row, slot, tokens)]
        if not tokens:
            return []
        return [Event(slot.job.id, slot.row.index, tokens, slot.row.take_text(), None, len(slot.job.prompt))]

    def cancel(self, job: Job) -> list[Event]:
        """Gives up what of a request is not answered, whether it has slots or not."""
        here = {slot.row.index: slot for slot in self._taken() if slot.job is job}
        events: list[Event] = []
        for row in job.rows:
            if row.running:
                row.cancel()
                slot = here.get(row.index)
                if slot is not None:
                    self._batch.end(slot.index)
                events.append(self._finish(job, row, slot))
        return events

    def _finish(self, job: Job, row: Row, slot: Slot | None, tokens: Iterable[int] = ()) -> Event:
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
        if slot is not None:
            self._slots[slot.index] = None
        return Event(job.id, row.index, list(tokens), text, completion, len(job.prompt))

    def _no_counters(self) -> Counters:
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape[1:], leaf.dtype), self._batch.state.counters)
