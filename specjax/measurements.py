"""What was measured on this machine, and kept in the user's cache folder.

Whatever else the machine does meanwhile makes some repeats longer, and never one shorter: the least of several comes nearest to
what is asked. Where most of them took clearly longer the machine was busy. What was found then is used and kept, but measured
again the next times, a few at most, and the least of all holds.
"""

import hashlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from specjax.models import products
from specjax.user_cache import processor

STEADY = 1.3
"""How much longer than the least of its repeats half of them may have taken on a machine that does little else."""
MOST_TRIES = 3
"""How often what was never measured in peace is measured."""


class Measured(NamedTuple):
    """What was measured, and whether the machine had time for it.

    Attributes:
      value: seconds, or lists and dicts of them, as JSON can hold them.
      steady: whether the repeats took about the same time.
    """

    value: Any
    steady: bool


def is_steady(repeats: Iterable[Sequence[float]]) -> bool:
    """Whether the repeats of several things took about the same time each.

    Args:
      repeats: seconds, of each thing at least one.

    Example:
      >>> is_steady([[1.0, 1.1, 5.0], [2.0, 2.1]]), is_steady([[1.0, 1.6, 1.7]])
      (True, False)
    """
    repeats = list(repeats)
    return sum(map(statistics.median, repeats)) <= STEADY * sum(map(min, repeats))


def measured_once(
    file: Path, what: str, measure: Callable[[], Measured], agree: Callable[[Any], Any] = lambda value: value
) -> Any:
    """The value that ``measure`` gives here, or gave before.

    Args:
      file: JSON, one entry for each machine and subject. Where it cannot be written every call measures.
      what: is measured.
      measure: measures it now.
      agree: has all processes that need it take the first one's value.
    """
    entry = agree(_read(file).get(_here(what)))
    known = entry if isinstance(entry, dict) and entry.keys() == {"value", "steady", "tries"} else None
    if known is not None and (known["steady"] or known["tries"] >= MOST_TRIES):
        return known["value"]
    found = measure()
    # As JSON gives it back: keys of dicts are texts.
    value, steady = agree(json.loads(json.dumps(found)))
    if known is not None:
        value = jax.tree.map(min, known["value"], value)
    tries = 1 if known is None else known["tries"] + 1
    _write(file, _read(file) | {_here(what): {"value": value, "steady": steady, "tries": tries}})
    return value


def _here(what: str) -> str:
    device = jax.devices()[0]
    # Another processor, backend or jax version is another measurement, and so is another way to multiply.
    way = hashlib.sha256(Path(products.__file__).read_bytes()).hexdigest()[:8]
    names = (device.platform, device.device_kind, platform.machine(), processor(), "jax", jax.__version__, "products", way, what)
    return " ".join(names).strip()


def _read(file: Path) -> dict:
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(file: Path, known: dict) -> None:
    """Keeps the measurement; a folder that cannot be written to costs a new measurement next time, nothing else."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{time.time_ns()}.partial")
        partial.write_text(json.dumps(known, indent=1))
        partial.replace(file)
    except OSError:
        return
