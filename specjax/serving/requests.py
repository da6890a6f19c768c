"""Requests to an engine, and what is wrong with them."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from specjax.decoding.completions import Row
from specjax.decoding.prompts import check_settings, end_ids, prompt_ids
from specjax.models.loaded import Model
from specjax.sampling.params import SamplingParams


class QueueFull(RuntimeError):
    """The engine's queue holds as many requests as it may; submit again after a step."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt to be completed.

    Attributes:
      prompt: text, token ids, or chat messages.
      params: sampling settings; None takes the defaults.
      id: how events and completions name it, any hashable value that no request in the engine has; None: a number is drawn.

    Example:
      >>> Request("Once upon a time", SamplingParams(max_tokens=8), id="first").id
      'first'
    """

    prompt: Any
    params: SamplingParams | None = None
    id: Any = None


ENTRIES_STEP = 8
"""Caches hold a multiple of this: the rows of a tile of a TPU's memory. Of another size it would lay them out in another order,
and attention would turn every layer's cache round."""


@dataclasses.dataclass(frozen=True)
class Room:
    """What every slot of an engine has room for.

    Attributes:
      capacity: tokens of a prompt and its completion together.
      stop_ids: ids that may end a row, the model's own included.
      biases: biased ids.
      logprobs: how many most likely tokens a round reports beside every emitted one; None: it reports nothing.
    """

    capacity: int
    stop_ids: int
    biases: int
    logprobs: int | None

    @property
    def entries(self) -> int:
        """S, entries of the cache: at least one for every token but the newest.

        Example:
          >>> Room(capacity=2048, stop_ids=1, biases=0, logprobs=None).entries
          2048
        """
        return -(-(self.capacity - 1) // ENTRIES_STEP) * ENTRIES_STEP


@dataclasses.dataclass(eq=False)
class Job:
    """A checked request on its way.

    Attributes:
      id: of the request.
      prompt: token ids.
      settings: in use.
      rows: a row for each of its completions.
      arrived: when it was submitted, seconds of ``time.perf_counter``.
      admitted: when its first row moved into a slot; None before.
      turn: how many requests moved in before it, once it did.
      finished: its completions so far, by index.
    """

    id: Any
    prompt: list[int]
    settings: SamplingParams
    rows: list[Row]
    arrived: float
    admitted: float | None = None
    turn: int = 0
    finished: dict = dataclasses.field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether all completions are there."""
        return len(self.finished) == len(self.rows)


def check_request(request: Request, model: Model, room: Room, id: Any, number: int, draw_seed: Callable[[], int]) -> Job:
    """A :class:`Job` of a request.

    Args:
      request: what was submitted.
      model: the target.
      room: of a slot.
      id: the request's, in use.
      number: how many requests came before; completions carry it as ``prompt_index``.
      draw_seed: gives one where the request has none.

    Raises:
      ValueError: names what is wrong, with both numbers where two do not fit.
    """
    if not isinstance(request, Request):
        raise ValueError(f"request is {type(request).__name__}; it must be a specjax.Request")
    settings = SamplingParams() if request.params is None else request.params
    if not isinstance(settings, SamplingParams):
        raise ValueError(f"request {id!r}: params is {settings!r:.200}; it must be a SamplingParams")
    try:
        prompt = prompt_ids(model, request.prompt, number)
        check_settings(model, settings, number)
    except ValueError as error:
        raise ValueError(f"request {id!r}: {error}") from error
    if len(prompt) + settings.max_tokens > room.capacity:
        raise ValueError(
            f"request {id!r}: a prompt of {len(prompt)} tokens and max_tokens {settings.max_tokens} do not fit into a slot's "
            f"capacity of {room.capacity} tokens"
        )
    for name, asked, there in (
        ("stop_token_ids, the model's own included", len(end_ids(model, settings)), room.stop_ids),
        ("logit_bias", len(settings.logit_bias or ()), room.biases),
    ):
        if asked > there:
            raise ValueError(f"request {id!r}: {name} has {asked} ids; this engine's slots have room for {there}")
    if settings.logprobs is not None and (room.logprobs is None or settings.logprobs > room.logprobs):
        most = "none at all" if room.logprobs is None else f"at most {room.logprobs}"
        raise ValueError(f"request {id!r}: logprobs is {settings.logprobs}; this engine reports {most} (max_logprobs)")
    seed = draw_seed() if settings.seed is None else settings.seed
    rows = [Row(model, settings, seed, number, index) for index in range(settings.n)]
    return Job(id, prompt, settings, rows, time.perf_counter())
