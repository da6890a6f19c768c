"""Which dtype is fastest here: a short measurement, kept in the user's cache folder."""

import hashlib
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import products
from specjax.models.products import contract
from specjax.user_cache import processor, user_cache_folder

CANDIDATES = ("float32", "bfloat16")
ROWS = (1, 8)
"""A plain step and a verify pass over eight tokens: what speculation pays for."""
WIDTHS = (3072, 576)
LAYERS = 12
"""85 MB of float32 weights: more than fits into caches, so that the products are bound as a real model's are."""
REPEATS = 5


def choose_dtype(cache_folder: Path | None = None) -> tuple[str, str]:
    """The fastest dtype for plain steps and verify passes on this backend, and the reason in words.

    Half precision is not simply faster: on CPUs it depends on the instructions that the processor has and on the version of
    the compiler. So products like a model's are timed once, in turns, for about two seconds, and the result is kept.

    Args:
      cache_folder: where the measurement is kept; None: the user's cache folder.
    """
    if cache_folder is None:
        cache_folder = user_cache_folder()
    return fastest(kept_measurement(Path(cache_folder) / "dtype.json", "", measure))


def kept_measurement(file: Path, what: str, measure: Callable[[], Any]) -> Any:
    """What ``measure`` gives here: read from ``file`` if it was measured before, else measured now and kept there.

    Args:
      file: JSON, one entry for each machine and subject.
      what: is measured; "" where the file holds nothing else.
      measure: gives something that JSON can hold.
    """
    device = jax.devices()[0]
    # Another processor, backend or jax version is another measurement, and so is another way to multiply.
    way = hashlib.sha256(Path(products.__file__).read_bytes()).hexdigest()[:8]
    names = (device.platform, device.device_kind, platform.machine(), processor(), "jax", jax.__version__, "products", way, what)
    here = " ".join(names).strip()
    known = _read(file)
    if here not in known:
        known[here] = measure()
        _write(file, known)
    return known[here]


def fastest(times: dict[str, list[float]]) -> tuple[str, str]:
    """The dtype with the least time for both passes together, and the reason.

    Args:
      times: for each dtype the milliseconds of one row and of eight.

    Example:
      >>> fastest({"float32": [5.0, 15.0], "bfloat16": [6.0, 10.0]})
      ('bfloat16', 'measured here: 6.0 ms for 1 row and 10.0 for 8, float32 5.0 and 15.0')
    """
    best = min(times, key=lambda name: sum(times[name]))
    (other,) = (name for name in times if name != best)
    (one, eight), (other_one, other_eight) = times[best], times[other]
    return best, f"measured here: {one:.1f} ms for 1 row and {eight:.1f} for 8, {other} {other_one:.1f} and {other_eight:.1f}"


def measure() -> dict[str, list[float]]:
    """Milliseconds of one row and of eight through a stack of products, for each dtype."""

    @jax.jit
    def passes(inputs, weights):
        for weight in weights:
            outputs = contract(inputs, weight)
            inputs = inputs + outputs[..., : inputs.shape[-1]] * jnp.asarray(1e-3, inputs.dtype)
        return inputs

    cases = {}
    for name in CANDIDATES:
        weights = [jnp.full(WIDTHS, 0.01 * (i + 1), name) for i in range(LAYERS)]
        for rows in ROWS:
            inputs = jnp.ones((1, rows, WIDTHS[1]), name)
            jax.block_until_ready(passes(inputs, weights))
            cases[name, rows] = (inputs, weights)
    seconds = {case: [] for case in cases}
    # In turns: a machine that slows down for a moment slows all of them.
    for _ in range(REPEATS):
        for case, arguments in cases.items():
            start = time.perf_counter()
            jax.block_until_ready(passes(*arguments))
            seconds[case].append(time.perf_counter() - start)
    return {name: [float(np.median(seconds[name, rows])) * 1e3 for rows in ROWS] for name in CANDIDATES}


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
