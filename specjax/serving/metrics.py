"""How busy an engine is and how long its requests wait; names are vLLM's."""

import collections
import dataclasses

import numpy as np

RECENT = 10_000
"""Values kept of each time, the newest; percentiles are theirs."""


@dataclasses.dataclass(frozen=True)
class EngineMetrics:
    """What an engine did so far.

    Attributes:
      num_requests_running: requests that have a slot.
      num_requests_waiting: requests in the queue.
      num_requests_finished: those that were answered whole.
      num_requests_cancelled: those that were given up.
      generation_tokens: tokens emitted.
      prompt_tokens: tokens of prompts that were read.
      num_rounds: rounds run.
      slot_use: share of the slots of all rounds that had a request whose prompt was in.
      time_to_first_token: (p50, p99) seconds; None before any.
      inter_token_latency: (p50, p99) seconds between two arrivals of tokens of one row, a round's tokens being one arrival.
      queue_time: (p50, p99) seconds.
      host_seconds: time of :meth:`specjax.Engine.step` that was not spent waiting for the device.
      wait_seconds: time spent waiting for the device.
    """

    num_requests_running: int
    num_requests_waiting: int
    num_requests_finished: int
    num_requests_cancelled: int
    generation_tokens: int
    prompt_tokens: int
    num_rounds: int
    slot_use: float
    time_to_first_token: tuple[float, float] | None
    inter_token_latency: tuple[float, float] | None
    queue_time: tuple[float, float] | None
    host_seconds: float
    wait_seconds: float

    def to_dict(self) -> dict:
        """Ready for JSON."""
        return dataclasses.asdict(self)


class Meter:
    """Counts as the engine goes."""

    def __init__(self):
        self.counts: collections.Counter[str] = collections.Counter()
        self.times: dict[str, collections.deque[float]] = {
            name: collections.deque(maxlen=RECENT) for name in ("first", "between", "queue")
        }
        self.host_seconds = 0.0
        self.wait_seconds = 0.0

    def percentiles(self, name: str) -> tuple[float, float] | None:
        """p50 and p99 of one of the times."""
        values = self.times[name]
        return tuple(np.percentile(np.array(values), (50, 99)).tolist()) if values else None

    def report(self, running: int, waiting: int) -> EngineMetrics:
        """Everything so far."""
        counts = self.counts
        return EngineMetrics(
            num_requests_running=running,
            num_requests_waiting=waiting,
            num_requests_finished=counts["finished"],
            num_requests_cancelled=counts["cancelled"],
            generation_tokens=counts["tokens"],
            prompt_tokens=counts["prompt"],
            num_rounds=counts["rounds"],
            slot_use=counts["used"] / counts["slots"] if counts["slots"] else 0.0,
            time_to_first_token=self.percentiles("first"),
            inter_token_latency=self.percentiles("between"),
            queue_time=self.percentiles("queue"),
            host_seconds=self.host_seconds,
            wait_seconds=self.wait_seconds,
        )
