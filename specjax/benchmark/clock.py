"""Timing in turns, and what is said of several times: median and spread."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax


class Spread(NamedTuple):
    """Median, least and most of some numbers.

    Example:
      >>> Spread.of([3.0, 1.0, 2.0])
      Spread(median=2.0, least=1.0, most=3.0)
    """

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def turns(names: Sequence[Any], repeats: int) -> Iterator[tuple[int, Any]]:
    """(repeat, name): each once per repeat, and another first in each, so that a machine that changes meanwhile favours none.

    Example:
      >>> list(turns("ab", 2))
      [(0, 'a'), (0, 'b'), (1, 'b'), (1, 'a')]
    """
    for repeat in range(repeats):
        first = repeat % len(names) if names else 0
        for name in (*names[first:], *names[:first]):
            yield repeat, name


def in_turns(
    runs: Mapping[Any, Callable[[], Callable[[], Any]]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[Any, list[float]]:
    """Seconds of every run in every repeat. Each is run once before, which is not timed: it compiles then.

    Args:
      runs: by name; a call makes what the run uses up, and returns the run itself, which is timed until its arrays are there.
      repeats: how often.
      clock: seconds.
    """
    seconds: dict[Any, list[float]] = {name: [] for name in runs}
    for prepare in runs.values():
        jax.block_until_ready(prepare()())
    for _, name in turns(list(runs), repeats):
        run = runs[name]()
        start = clock()
        jax.block_until_ready(run())
        seconds[name].append(clock() - start)
    return seconds
