"""The slots on the device: their state, and the calls that change it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from specjax.decoding.prompts import stop_ids
from specjax.decoding.round import Round
from specjax.decoding.round_costs import kept_rounds, measure_rounds
from specjax.decoding.state import Counters, DecodingState, DispatchInfo, Parameters
from specjax.models.loaded import Model
from specjax.numeric import for_jit
from specjax.sampling.params import SamplingArrays, SamplingParams
from specjax.serving.device import Arrivals, admit, check_rows, empty_state, prefill_rows, run_slots
from specjax.serving.requests import Room
from specjax.serving.schedule import PREFILL_SHAPES, Slot, filling_order, pass_rows

MOST_ARRIVALS = 8
"""Requests that move in with one call."""


class SlotBatch:
    """A batch of slots, all free at first. It knows no requests' ids and keeps no books: those are the engine's.

    Attributes:
      program: the round.
      params: of target and drafter.
      num_slots: how many rows there are.

    Args:
      model: the target.
      program: the round.
      params: of target and drafter, where the round wants them.
      num_slots: how many rows there are.
      room: what each has room for.
      parts: parts of the batch that a mesh makes.

    Raises:
      ValueError: the drafter's state has no rows.
    """

    def __init__(self, model: Model, program: Round, params: Parameters, num_slots: int, room: Room, parts: int = 1):
        self.program, self.params, self.num_slots = program, params, num_slots
        self._model, self._room, self._parts = model, room, parts
        sizes = (num_slots, room.entries)
        drafter = jax.eval_shape(lambda params: program.drafter.init(params, *sizes), params.drafter)
        check_rows(program.drafter, drafter, num_slots)
        self.clear()
        self._stop_width = self.state.stop_token_ids.shape[1]

    @property
    def state(self) -> DecodingState:
        """Of the rows, until the memory is given back."""
        assert self._state is not None
        return self._state

    def clear(self) -> None:
        """Frees all slots and forgets everything about them."""
        self._state: DecodingState | None = None
        room = self._room
        self._state = _new_state(self._reading(), self.params, self.num_slots, room.entries, room.stop_ids, room.biases)
        self._ended = np.zeros(self.num_slots, bool)

    def close(self) -> None:
        """Gives the memory back."""
        self._state = None

    def admit(self, arriving: Sequence[Slot]) -> None:
        """Moves at most ``MOST_ARRIVALS`` requests in; whatever was in their slots is forgotten."""
        settings = [(slot.job.prompt, slot.row.settings, slot.row.seed, slot.row.index) for slot in arriving]
        self._move_in([slot.index for slot in arriving], *zip(*settings, strict=True))

    def _move_in(self, slots: list[int], prompts, settings, seeds, completions) -> None:
        most = min(MOST_ARRIVALS, self.num_slots)
        fill = most - len(slots)
        tokens = np.zeros((most, self._room.entries + 1), np.int32)
        for row, prompt in zip(tokens, prompts, strict=False):
            row[: len(prompt)] = prompt
        settings = [*settings, *[SamplingParams(temperature=0.0)] * fill]
        lengths = np.array([*map(len, prompts), *[1] * fill], np.int32)
        limits = np.minimum(lengths.astype(np.int64) + [s.max_tokens for s in settings], self._room.capacity)
        arrivals = Arrivals(
            slots=for_jit(np.array([*slots, *[self.num_slots] * fill], np.int32)),
            tokens=for_jit(tokens),
            lengths=for_jit(lengths),
            limits=for_jit(limits.astype(np.int32)),
            stop_token_ids=for_jit(stop_ids(self._model, settings, self._stop_width)),
            sampling=SamplingArrays.stack(
                settings, [*seeds, *[0] * fill], [*completions, *[0] * fill], num_biases=self._room.biases
            ),
        )
        self._ended[slots] = False
        self._state = admit(self._reading(), self.state, arrivals)

    def end(self, slot: int) -> None:
        """The row in ``slot`` ends with the next dispatch: nobody wants more of it."""
        self._ended[slot] = True

    def read(self, width: int, chosen: Sequence[int]) -> None:
        """A pass over the next ``width`` prompt tokens of the slots ``chosen``, by index; see ``schedule.next_prefill``."""
        rows = pass_rows(width, chosen, self.num_slots, self._parts)
        self._state = prefill_rows(self._reading(width), self.params, self.state, rows)

    def run(self, max_depth: int, num_rounds: int) -> tuple[DispatchInfo, Counters]:
        """Up to ``num_rounds`` rounds of drafts of up to ``max_depth``; what is returned may still be in the making."""
        self._state, info, counters = run_slots(
            self.program, self.params, self.state, self._ended, np.int32(max_depth), np.int32(num_rounds)
        )
        self._ended = np.zeros_like(self._ended)
        return info, counters

    def measure_rounds(self, place: Callable[[Parameters], Parameters], agree: Callable[[Any], Any]) -> None:
        """Finds out what rounds cost by the depth of their drafts; all slots must be free, and are again.

        Args:
          place: puts parameters where the round wants them.
          agree: has all processes take the first one's value.
        """

        def tell(seconds):
            self.params = place(self.params.replace(round_seconds=np.asarray(seconds, np.float32)))

        def start(prompt):
            self.clear()
            settings = SamplingParams(temperature=0.0, max_tokens=self._room.capacity, ignore_eos=True)
            for first in range(0, self.num_slots, MOST_ARRIVALS):
                slots = list(range(self.num_slots))[first : first + MOST_ARRIVALS]
                self._move_in(slots, [prompt] * len(slots), [settings] * len(slots), [0] * len(slots), [0] * len(slots))
            rows, width = PREFILL_SHAPES[0]
            slots = filling_order(range(self.num_slots), self.num_slots, self._parts)
            for _ in range(-(-(len(prompt) - 1) // width)):
                for first in range(0, len(slots), rows * self._parts):
                    self.read(width, slots[first : first + rows * self._parts])
            return jax.block_until_ready(self.state.lengths)

        def run(seconds, num_rounds):
            tell(seconds)
            return jax.block_until_ready(self.run(self.program.drafter.tree.depth, num_rounds)[0])

        def measure():
            return measure_rounds(self.program, start, run, self._room.capacity)

        tell(kept_rounds(self._model, self.program, self.num_slots, True, measure, agree))
        self.clear()

    def _reading(self, width: int | None = None) -> Round:
        """The program that reads prompts: it does not depend on what rounds report, nor on how many there are."""
        program = dataclasses.replace(self.program, num_logprobs=None, rounds_per_dispatch=1, depths=())
        return program if width is None else dataclasses.replace(program, prefill_width=width)


@functools.partial(jax.jit, static_argnums=(0, 2, 3, 4, 5))
def _new_state(program, params, slots, capacity, num_stop_ids, biases):
    return empty_state(program, params, slots, capacity, num_stop_ids, biases)
