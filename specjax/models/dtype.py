"""Which dtype is fastest here: a short measurement, kept in the user's cache folder."""

import time
from pathlib import Path

import jax
import jax.numpy as jnp

from specjax.measurements import Measured, is_steady, measured_once
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.user_cache import user_cache_folder

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


def measure() -> Measured:
    """Milliseconds of a pass over one token and over eight, through some layers of a small decoder, by dtype."""
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
    least = {name: [min(seconds[name, tokens]) * 1e3 for tokens in TOKENS] for name in CANDIDATES}
    return Measured(least, is_steady(seconds.values()))
