#!/usr/bin/env python3
"""Layers in a loop against layers in line on this machine: seconds to compile plain steps, and milliseconds of a step.

python scripts/scan_layers.py [--dtype bfloat16] [--steps 32] [--repeats 7] [--output FILE.json]

A random model of SmolLM2-135M's sizes: no weights are needed. What a TPU makes of both says scripts/tpu_compile.py --scan-layers.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time

import jax
import jax.numpy as jnp
from jax import lax
from record import record

from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder

SMOL = DecoderConfig(
    vocab_size=49_152, num_layers=30, width=576, num_query_heads=9, num_kv_heads=3, head_dim=64, mlp_width=1536,
    max_positions=2048, tied_embedding=True,
)  # fmt: skip
CAPACITY = 512


def steps(model: Decoder, count: int, params, cache, token):
    """``count`` greedy tokens one after the other."""

    def step(_, carry):
        cache, token = carry
        output = model.apply(params, token, cache.lengths[:, None], cache, None)
        best = jnp.argmax(model.unembed(params, output.hidden), axis=-1).astype(jnp.int32)
        output, cache = lax.optimization_barrier((output, cache))
        return cache.commit(output.block, jnp.zeros_like(best), jnp.ones_like(cache.lengths)), best

    return lax.fori_loop(0, count, step, (cache, token))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    forms, found = {}, {}
    token = jnp.ones((1, 1), jnp.int32)
    for name, scan in (("in line", False), ("in a loop", True)):
        model = Decoder(dataclasses.replace(SMOL, scan_layers=scan))
        params = model.init(jax.random.key(0), jnp.dtype(arguments.dtype))
        run = jax.jit(functools.partial(steps, model, arguments.steps), donate_argnums=1)
        lowered = run.lower(params, model.init_cache(params, 1, CAPACITY), token)
        start, used = time.perf_counter(), time.process_time()
        compiled = lowered.compile()
        found[name] = {"compile_seconds": time.perf_counter() - start, "compile_cpu_seconds": time.process_time() - used}
        forms[name] = model, params, compiled
    times, last = {name: [] for name in forms}, {}
    for _ in range(arguments.repeats):
        # In turn, so that whatever else the machine does meets both.
        for name, (model, params, compiled) in forms.items():
            cache = jax.block_until_ready(model.init_cache(params, 1, CAPACITY))
            start = time.perf_counter()
            last[name] = jax.block_until_ready(compiled(params, cache, token))[1].tolist()
            times[name].append((time.perf_counter() - start) / arguments.steps)
    if last["in line"] != last["in a loop"]:
        raise SystemExit(f"the tokens differ: {last}")
    for name, values in times.items():
        found[name]["ms_per_step"] = 1e3 * statistics.median(values)
    record(" ".join(["python", *sys.argv]), {"dtype": arguments.dtype, "layers": found}, arguments.output)


if __name__ == "__main__":
    main()
