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
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.user_cache import processor, user_cache_folder

CANDIDATES = ("float32", "bfloat16")
TOKENS = (1, 8)
"""A plain step and a verify pass over eight tokens: what speculation pays for."""
CONFIG = DecoderConfig(
    vocab_size=256, num_layers=6, width=576, num_query_heads=9, num_kv_heads=3, head_dim=64, mlp_width=1536, max_positions=256
)
"""85 MB of float32 weights: more than fits into caches, so that passes are bound as a real model's are."""
REPEATS = 7
CLEARLY = 0.9
"""Half precision must take at most this share of float32's time: in float32 no token depends on the size of a pass."""


def choose_dtype(cache_folder: Path | None = None) -> tuple[str, str]:
    """The fastest dtype for plain steps and verify passes on this backend, and the reason in words.

    Half precision is not simply faster: on CPUs it depends on the instructions that the processor has and on the version of
    the compiler. So products like a model's are timed once, in turns, for about two seconds, and the result is kept.

    Args:
      cache_folder: where the measurement is kept; None: the user's cache folder.
    """
    if cache_folder is None:
        cache_folder = user_cache_folder()
    return fastest(measured_once(Path(cache_folder) / "dtype.json", "layers", measure))


def kept_measurement(file: Path, what: str) -> Any:
    """What was measured here before, or None.

    Args:
      file: JSON, one entry for each machine and subject.
      what: was measured.
    """
    return _read(file).get(_here(what))


def keep_measurement(file: Path, what: str, value: Any) -> None:
    """Keeps what was measured here for :func:`kept_measurement`.

    Args:
      file: JSON, one entry for each machine and subject.
      what: was measured.
      value: something that JSON can hold.
    """
    _write(file, _read(file) | {_here(what): value})


def measured_once(file: Path, what: str, measure: Callable[[], Any]) -> Any:
    """What ``measure`` gives here: read from ``file`` if it was measured before, else measured now and kept there."""
    found = kept_measurement(file, what)
    if found is None:
        found = measure()
        keep_measurement(file, what, found)
    return found


def _here(what: str) -> str:
    device = jax.devices()[0]
    # Another processor, backend or jax version is another measurement, and so is another way to multiply.
    way = hashlib.sha256(Path(products.__file__).read_bytes()).hexdigest()[:8]
    names = (device.platform, device.device_kind, platform.machine(), processor(), "jax", jax.__version__, "products", way, what)
    return " ".join(names).strip()


def fastest(times: dict[str, list[float]]) -> tuple[str, str]:
    """float32, unless half precision is clearly faster for both passes together, and the reason.

    Args:
      times: for each dtype the milliseconds of a pass over one token and over eight.

    Example:
      >>> fastest({"float32": [5.0, 15.0], "bfloat16": [6.0, 10.0]})
      ('bfloat16', 'measured here: 6.0 ms for 1 token and 10.0 for 8, float32 5.0 and 15.0')
      >>> fastest({"float32": [5.0, 8.0], "bfloat16": [5.0, 7.5]})[0]
      'float32'
    """
    full, half = CANDIDATES
    best, other = (half, full) if sum(times[half]) <= CLEARLY * sum(times[full]) else (full, half)
    (one, eight), (other_one, other_eight) = times[best], times[other]
    return best, f"measured here: {one:.1f} ms for 1 token and {eight:.1f} for 8, {other} {other_one:.1f} and {other_eight:.1f}"


def measure() -> dict[str, list[float]]:
    """Milliseconds of a pass over one token and over eight, through some layers of a small decoder, for each dtype."""
    decoder = Decoder(CONFIG)
    run = jax.jit(lambda params, cache, tokens: decoder.apply(params, tokens, tokens + CONFIG.max_positions // 2, cache).hidden)
    cases = {}
    for name in CANDIDATES:
        params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01, leaf.dtype), decoder.abstract_params(name))
        cache = decoder.init_cache(params, 1, CONFIG.max_positions)
        cache = cache.replace(lengths=jnp.full((1,), CONFIG.max_positions // 2, jnp.int32))
        for tokens in TOKENS:
            cases[name, tokens] = (params, cache, jnp.arange(tokens)[None, :])
            jax.block_until_ready(run(*cases[name, tokens]))
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    # In turns: a machine that slows down for a moment slows all of them.
    for _ in range(REPEATS):
        for case, arguments in cases.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*arguments))
            seconds[case].append(time.perf_counter() - start)
    return {name: [float(np.median(seconds[name, tokens])) * 1e3 for tokens in TOKENS] for name in CANDIDATES}


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
