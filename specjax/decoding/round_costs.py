"""What rounds cost here by the depth of their drafts: measured once for each model, drafter, device and number of rows, and kept.

The program that will run is the one that is timed, on rows of its own: told that every other depth takes for ever, it drafts as
deep as is asked for. Two texts are tried, one that repeats itself and one that does not, since a drafter may find something to
say in one alone, and the dearer one counts. What a call takes that runs no round at all is the host's, which lays out the next
while the device is busy, and counts for none.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.decoding.round import Round
from specjax.decoding.state import DispatchInfo, Parameters
from specjax.measurements import Measured, is_steady, measured_once
from specjax.models.loaded import Model
from specjax.user_cache import user_cache_folder

REPEATS = 9
LEAST_REPEATS, ENOUGH_SECONDS = 3, 2.0
"""After so many repeats and seconds a text is left; many rows are slow, and need fewer repeats."""
PROMPT_LENGTH = 65


def default_depths(depth: int) -> tuple[int, ...]:
    """Depths between nothing and a drafter's own that are worth a verify pass of their size.

    With the root each is a pass over a power of two tokens, which hardware multiplies best: on two cores nine took 1.2 times
    what eight did, and twelve longer than sixteen.

    Example:
      >>> default_depths(8), default_depths(7), default_depths(1)
      ((1, 3, 7), (1, 3), ())
    """
    return tuple(2**power - 1 for power in range(1, depth.bit_length() + 1) if 2**power - 1 < depth)


def check_adaptive(owner: str, adaptive: Any, depth: int) -> bool | dict[int, float]:
    """``adaptive`` if it is something that rounds can be told.

    Args:
      owner: whose argument it is.
      adaptive: False, True, or seconds of a round by draft depth.
      depth: the drafter's.

    Raises:
      ValueError: says what it must be.
    """
    if isinstance(adaptive, bool):
        return adaptive and depth > 0
    right = f"False, True, or seconds of a round by draft depth, for 0 and {depth} at least"
    if not isinstance(adaptive, Mapping):
        raise ValueError(f"{owner}: adaptive is {adaptive!r:.200}; it must be {right}")
    for length, seconds in adaptive.items():
        whole = isinstance(length, int) and not isinstance(length, bool) and 0 <= length <= depth
        if not whole or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
            raise ValueError(f"{owner}: adaptive holds {length!r}: {seconds!r}; it must be {right}")
    if not {0, depth} <= set(adaptive):
        raise ValueError(f"{owner}: adaptive holds the depths {sorted(adaptive)}; it must be {right}")
    return dict(sorted(adaptive.items())) if depth else False


def with_depths(owner: str, program: Round, params: Parameters, adaptive: Any) -> tuple[Round, Parameters, bool]:
    """The same round drafting as deep as pays, and whether its costs are known already.

    Args:
      owner: whose argument ``adaptive`` is.
      program: the round.
      params: of target and drafter.
      adaptive: see :func:`specjax.generate`.

    Raises:
      ValueError: ``adaptive`` is something else.
    """
    depth = program.drafter.tree.depth
    costs = check_adaptive(owner, adaptive, depth)
    if costs is False:
        return program, params, True
    if costs is True:
        program = dataclasses.replace(program, depths=default_depths(depth))
        return program, params.replace(round_seconds=np.full(len(program.draft_depths), np.inf, np.float32)), False
    program = dataclasses.replace(program, depths=tuple(length for length in costs if 0 < length < depth))
    return program, params.replace(round_seconds=np.array(list(costs.values()), np.float32)), True


def measure_rounds(
    program: Round, start: Callable[[list[int]], Any], run: Callable[[np.ndarray, int], DispatchInfo], capacity: int
) -> Measured:
    """A list of the least seconds of a round for each of ``program.draft_depths``.

    Args:
      program: the round.
      start: has all rows of a batch read one prompt, given as token ids, and waits for it.
      run: runs so many rounds of these rows, 0 or 1, with such ``Parameters.round_seconds`` and waits for them.
      capacity: tokens of a row.
    """
    length = max(1, min(PROMPT_LENGTH, capacity // 2))
    depths = program.draft_depths
    by_text: list[dict[int, float]] = []
    repeats: list[list[float]] = []
    idle: list[float] = []
    for different in (length, 4):
        prompt = [token % min(different, program.vocab_size) for token in range(length)]
        seconds: dict[int, list[float]] = {depth: [] for depth in depths}
        rounds, whole = capacity, time.perf_counter()
        for repeat in range(REPEATS + 1):
            # In turns: a machine that slows down for a moment slows all of them.
            for place, depth in enumerate(depths):
                alone = np.where(np.arange(len(depths)) == place, 1, np.inf).astype(np.float32)
                # The prompt is read again where it must be: behind it, and surely nowhere else, is room and something to draft.
                for again in (False, True):
                    if again or length + (rounds + 1) * (depths[-1] + 1) > capacity:
                        start(prompt)
                        rounds = 0
                    begun = time.perf_counter()
                    run(alone, 0)
                    between = time.perf_counter()
                    info = run(alone, 1)
                    ended, rounds = time.perf_counter(), rounds + 1
                    if repeat:
                        idle.append(between - begun)
                    if (info.drafted[0] > 0) == (depth > 0):
                        if repeat:
                            seconds[depth].append(ended - between)
                        break
            if not repeat:
                whole = time.perf_counter()  # until here programs were compiled
            elif repeat >= LEAST_REPEATS and time.perf_counter() - whole > ENOUGH_SECONDS:
                break
        by_text.append({depth: min(values) for depth, values in seconds.items() if values})
        repeats += filter(None, seconds.values())
    plain = min(text[0] for text in by_text)
    # What drafts cost more than nothing, each text for itself: between the two the machine may have become another.
    # Where nothing was ever drafted a round is a plain step.
    more = [max(text.get(depth, text[0]) - text[0] for text in by_text) for depth in depths]
    # Deeper drafts never cost less, and none less than nothing: what says so is noise.
    more = [max(0.0, least) for least in itertools.accumulate(reversed(more), min)][::-1]
    plain = max(plain - min(idle), plain / 2)
    return Measured([plain + extra for extra in more], is_steady(repeats))


def kept_rounds(
    model: Model,
    program: Round,
    rows: int,
    greedy: bool,
    measure: Callable[[], Measured],
    agree: Callable[[Any], Any] = lambda value: value,
    cache_folder: Path | None = None,
) -> list[float]:
    """Seconds of a round for each of ``program.draft_depths``: measured now, or what was measured here before.

    Args:
      model: the target.
      program: the round.
      rows: of the batch.
      greedy: whether no row samples.
      measure: see :func:`measure_rounds`.
      agree: has all processes that run the round take the first one's value.
      cache_folder: where measurements are kept; None: the user's cache folder.
    """
    names = (program.target, model.dtype, program.drafter, program.rule, program.layout, program.draft_depths, rows, greedy)
    what = " ".join(map(repr, names))
    file = (cache_folder or user_cache_folder()) / "rounds.json"
    # An object without a name of its own is another one the next time.
    named = " at 0x" not in what
    return measured_once(file, what, measure, agree) if named else agree(measure().value)
