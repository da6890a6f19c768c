"""Who gets a slot, whose prompt goes in next, and how deep drafts are: decisions of the host, from its own books alone.

Nothing here looks at a device or a clock, so that several processes that see the same events decide the same.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from specjax.decoding.completions import Row
from specjax.decoding.state import Counters
from specjax.serving.requests import Job

PREFILL_SHAPES = ((1, 64), (4, 64), (1, 256))
"""(rows, tokens of each) of the passes that read prompts. A program is compiled for each when it is first needed, and none holds
more than 256 tokens: that bounds how long rows that are being answered wait for a prompt."""

MAX_PREFILLS = 4
"""Passes between two rounds while most slots still wait for their prompt; afterwards it is one."""


@dataclasses.dataclass(eq=False)
class Slot:
    """A row of the running batch, taken.

    Attributes:
      index: which row.
      job: the request.
      row: the completion in the making.
      to_feed: prompt tokens that the target has not been fed; the newest one is left to the first round.
      prompt_in: whether the prompt has been read.
      counters: the row's statistics as last seen.
      prompt_read: when the prompt had been sent to the device; None before.
      first_tokens: when its first tokens came; None before.
      last_tokens: when the newest came.
    """

    index: int
    job: Job
    row: Row
    to_feed: int
    prompt_in: bool = False
    counters: Counters | None = None
    prompt_read: float | None = None
    first_tokens: float | None = None
    last_tokens: float | None = None

    @property
    def answering(self) -> bool:
        """Whether the next round emits something here, as far as the host knows."""
        return self.prompt_in and self.row.running


def filling_order(free: Sequence[int], num_slots: int, parts: int = 1) -> list[int]:
    """Free slots in the order in which they are taken: on a mesh, first where most of a part is free.

    Args:
      free: indices, ascending.
      num_slots: how many slots there are.
      parts: parts of the batch, of equal size.

    Example:
      >>> filling_order([1, 2, 3], 4), filling_order([1, 2, 3], 4, parts=2)
      ([1, 2, 3], [2, 1, 3])
    """
    size = num_slots // parts
    taken = [size] * parts
    for index in free:
        taken[index // size] -= 1
    ranks = {}
    for index in free:
        ranks[index] = taken[index // size]
        taken[index // size] += 1
    return sorted(free, key=lambda index: (ranks[index], index // size))


def next_prefill(waiting: Sequence[Slot], part_size: int | None = None) -> tuple[int, list[Slot]]:
    """The next pass over prompts: tokens per row, and the slots that it is for, first come first.

    Args:
      waiting: slots whose prompt is not in, oldest request first; at least one.
      part_size: on a mesh, slots of a part of the batch: each part makes the pass with rows of its own.
    """
    widths = sorted({width for _, width in PREFILL_SHAPES})
    first = waiting[0]
    width = next((width for width in widths if first.to_feed <= width), widths[-1])
    parts: dict[int, list[Slot]] = {}
    for slot in waiting:
        parts.setdefault(0 if part_size is None else slot.index // part_size, []).append(slot)
    # A long first prompt is no reason to go past those that came after it, nor they to go past it.
    if first.to_feed > width:
        return width, [part[0] for part in parts.values()]
    alike = [[slot for slot in part if slot.to_feed <= width] for part in parts.values()]
    most = max(map(len, alike))
    rows = max((rows for rows, w in PREFILL_SHAPES if w == width and _worth(rows, most)), default=1)
    return width, [slot for part in alike for slot in part[:rows]]


def pass_rows(width: int, chosen: Sequence[int], num_slots: int, parts: int = 1) -> np.ndarray:
    """[parts * R] int32 what ``prefill_rows`` is told of a pass: for each part of the batch the rows in it, then "no row".

    Args:
      width: tokens per row.
      chosen: indices of the slots that it is for.
      num_slots: how many slots there are.
      parts: parts of the batch, of equal size.
    """
    size = num_slots // parts
    by_part: list[list[int]] = [[] for _ in range(parts)]
    for index in chosen:
        by_part[index // size].append(index % size)
    most = min(rows_of(width, max(map(len, by_part))), size)
    return np.array([rows + [size] * (most - len(rows)) for rows in by_part], np.int32).reshape(-1)


def _worth(rows: int, there: int) -> bool:
    """Whether a pass over ``rows`` is worth it for the rows that are there: at most one of four is empty."""
    return 4 * there >= 3 * rows


def rows_of(width: int, chosen: int) -> int:
    """Rows of the pass of ``width`` tokens that holds ``chosen`` rows."""
    return min(rows for rows, w in PREFILL_SHAPES if w == width and rows >= chosen)


def draft_depth(schedule: Mapping[int, int] | None, answering: int, depth: int) -> int:
    """How deep drafts are with so many rows being answered.

    Args:
      schedule: ``{rows: depth}``, each for up to so many rows; above the largest nothing is drafted. None: always ``depth``.
      answering: rows.
      depth: the drafter's.

    Example:
      >>> [draft_depth({4: 8, 16: 2}, rows, 8) for rows in (1, 5, 17)]
      [8, 2, 0]
    """
    if schedule is None:
        return depth
    return min(depth, next((schedule[most] for most in sorted(schedule) if answering <= most), 0))


def check_schedule(schedule, depth: int) -> dict[int, int] | None:
    """``schedule`` if it maps numbers of rows to draft lengths.

    Raises:
      ValueError: says what it must be.
    """
    if schedule is None:
        return None
    right = f"None or a dict from numbers of rows (1 and more) to draft lengths from 0 to the drafter's {depth}"
    if not isinstance(schedule, Mapping):
        raise ValueError(f"Engine: draft_len_schedule is {schedule!r:.200}; it must be {right}")
    for rows, length in schedule.items():
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (rows, length))
        if not whole or rows < 1 or not 0 <= length <= depth:
            raise ValueError(f"Engine: draft_len_schedule holds {rows!r}: {length!r}; it must be {right}")
    return dict(sorted(schedule.items()))
