#!/usr/bin/env python3
"""Layers scanned against layers unrolled: seconds to compile, traffic, copies on a TPU; seconds to compile and to run on a CPU.

python scripts/scan_layers.py tpu [--layers 32] [--programs "pass 1" "pass 8" chain] [--form scanned] [--output FILE.json]
python scripts/scan_layers.py cpu [--dtype bfloat16] [--output FILE.json]

The first needs an environment with ``jax[tpu]`` (see scripts/tpu_compile.py), and neither needs weights. Scanned, all layers'
parameters are one array [L, ...] each, and so are the caches' keys and values.
"""

import argparse
import dataclasses
import functools
import os
import re
import statistics
import sys
import time

import flax.struct
import jax
import jax.numpy as jnp
import tpu_compile
from flax import nnx
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from specjax.cache import FEW_TOKENS, LANES, KVBlock
from specjax.models.base import ModelOutput
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder, DecoderModule
from specjax.parallel.mesh import DATA, MODEL, ROWS


@flax.struct.dataclass
class StackedCache:
    """As :class:`specjax.cache.KVCache`, all layers in one array: keys and values [L, B, K, S, D], lengths [B]."""

    keys: jax.Array
    values: jax.Array
    lengths: jax.Array

    @property
    def capacity(self):
        return self.keys.shape[3]

    def roll_back(self, lengths):
        return self.replace(lengths=jnp.minimum(self.lengths, lengths))

    def commit(self, block, nodes, counts):
        num_layers, batch, num_heads, capacity, head_dim = self.keys.shape
        slot = jnp.arange(nodes.shape[1])
        position = jnp.where(slot < counts[:, None], self.lengths[:, None] + slot, capacity)
        fresh = [jnp.take_along_axis(part, nodes[None, :, None, :, None], axis=3) for part in (block.keys, block.values)]
        layer, row, head = jnp.ogrid[:num_layers, :batch, :num_heads]

        def by_head(cached, fresh):
            place = layer[..., None], row[..., None], head[..., None], position[None, :, None]
            return cached.at[place].set(fresh.astype(cached.dtype), mode="drop", unique_indices=True)

        def one_by_one(cached, fresh):
            in_order = functools.partial(with_layout_constraint, layouts=Layout(major_to_minor=(0, 1, 2, 4, 3)))

            def write(index, cached):
                slot, row = index // batch, index % batch
                place = (0, row, 0, jnp.minimum(self.lengths[row] + slot, capacity - 1), 0)
                size = (num_layers, 1, num_heads, 1, head_dim)
                there = (slot < counts[row]) & (self.lengths[row] + slot < capacity)
                entry = lax.dynamic_slice(fresh, (0, row, 0, slot, 0), size).astype(cached.dtype)
                entry = jnp.where(there, entry, lax.dynamic_slice(cached, place, size))
                return in_order(lax.dynamic_update_slice(cached, entry, place))

            return lax.fori_loop(0, batch * jnp.max(counts, initial=0), write, in_order(cached))

        def at_once(cached, fresh):
            place = slice(None), jnp.arange(batch)[:, None], slice(None), position
            return cached.at[place].set(jnp.moveaxis(fresh, (1, 3), (0, 1)).astype(cached.dtype), mode="drop")

        def write(form):
            return lambda keys, values, fresh: (form(keys, fresh[0]), form(values, fresh[1]))

        on_tpu = write(one_by_one if head_dim % LANES and nodes.shape[1] <= FEW_TOKENS else by_head)
        keys, values = lax.platform_dependent(self.keys, self.values, fresh, tpu=on_tpu, default=write(at_once))
        return StackedCache(keys, values, jnp.minimum(self.lengths + counts, capacity))


@dataclasses.dataclass(frozen=True)
class OfLayer:
    """A layer's part of a stack, cut out only where it is read: within the branch that reads some entries of it."""

    stack: jax.Array
    index: jax.Array

    @property
    def shape(self):
        return self.stack.shape[1:]

    def __getitem__(self, key):
        used = key[2].stop
        sizes = (1, *self.shape[:2], used, self.shape[3])
        return lax.dynamic_slice(self.stack, (self.index, 0, 0, 0, 0), sizes)[0]


class ScannedDecoder(Decoder):
    """A decoder whose layers are alike, and scanned."""

    cut_where_read = True
    """Whether a layer's cache is cut out where it is read; else the scan cuts it out, before attention."""

    def _stacked(self, tree, join):
        return tree | {"layers": {0: jax.tree.map(join, *tree["layers"].values(), is_leaf=_is_spec)}}

    def abstract_params(self, dtype=None):
        def join(*leaves):
            return jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype)

        return self._stacked(super().abstract_params(dtype), join)

    def init(self, key, dtype=None, scale=None):
        return self._stacked(Decoder(self.config).init(key, dtype, scale), lambda *leaves: jnp.stack(leaves))

    def logical_axes(self):
        return self._stacked(super().logical_axes(), lambda *specs: PartitionSpec(None, *specs[0]))

    def _module(self, params):
        one = dataclasses.replace(self.config, num_layers=1)
        graph, _ = nnx.split(nnx.eval_shape(lambda: DecoderModule(one, params["embedding"].dtype, self.split)))
        return nnx.merge(graph, params)

    def init_cache(self, params, batch, capacity):
        config = self.config
        shape = (config.num_layers, batch, config.num_kv_heads, capacity, config.head_dim)
        keys, values = (jnp.zeros(shape, params["embedding"].dtype) for _ in range(2))
        return StackedCache(keys, values, jnp.zeros((batch,), jnp.int32))

    def apply(self, params, tokens, positions, cache, block_mask=None):
        if block_mask is None:
            block_mask = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        module = self._module(params)
        graph, _ = nnx.split(module.layers[0])

        def run(stream, scanned):
            own, index, keys, values = scanned
            if self.cut_where_read:
                keys, values = OfLayer(cache.keys, index), OfLayer(cache.values, index)
            stream, keys, values = nnx.merge(graph, own)(stream, positions, keys, values, cache.lengths, block_mask)
            return stream, (keys, values, stream if self.feature_layers else None)

        stream = embedded = self.split.embed(module.embedding[...], tokens)
        own, numbers = params["layers"][0], jnp.arange(self.config.num_layers)
        cached = (None, None) if self.cut_where_read else (cache.keys, cache.values)
        with jax.named_scope(f"layers{self.config.num_layers}"):
            stream, (keys, values, streams) = lax.scan(run, stream, (own, numbers, *cached))
        hidden = module.final_norm(stream)
        shown = {0: embedded, self.config.num_layers: hidden}
        features = [shown[i] if i in shown else streams[i - 1] for i in self.feature_layers]
        features = jnp.stack(features, axis=2) if features else jnp.zeros((*hidden.shape[:2], 0, hidden.shape[2]), hidden.dtype)
        return ModelOutput(hidden, features, KVBlock(keys, values))


def _is_spec(leaf):
    return isinstance(leaf, PartitionSpec)


SMOL = DecoderConfig(
    vocab_size=49_152, num_layers=30, width=576, num_query_heads=9, num_kv_heads=3, head_dim=64, mlp_width=1536,
    max_positions=2048, tied_embedding=True,
)  # fmt: skip


class ScannedCaches(ScannedDecoder):
    """The same with caches cut out by the scan."""

    cut_where_read = False


FORMS = {"unrolled": Decoder, "scanned": ScannedDecoder, "scanned caches": ScannedCaches}
STACKED = StackedCache(PartitionSpec(None, DATA, MODEL), PartitionSpec(None, DATA, MODEL), ROWS)


usual_scenario_of = tpu_compile.scenario_of


def scenario_of(length: int, slots: int):
    """As ``tpu_compile.scenario_of``, with as many turns of a scan as there are layers."""
    usual = usual_scenario_of(length, slots)

    def trips(loop):
        scan = re.search(r"/layers(\d+)/while$", loop.scope)
        return int(scan[1]) if scan else usual.trips(loop)

    return dataclasses.replace(usual, trips=trips)


def on_tpu(arguments) -> dict:
    """What the TPU compiler makes of the programs in each form."""
    import tpu_programs

    import specjax.parallel.layout as layout

    usual_specs = layout.cache_specs
    tpu_compile.scenario_of = scenario_of
    found = {}
    for form in arguments.form:
        tpu_programs.Decoder = FORMS[form]
        layout.cache_specs = usual_specs if form == "unrolled" else lambda split: STACKED
        names = ("target", "topology", "slots", "layers")
        case = tpu_programs.Case(**{name: getattr(arguments, name) for name in names})
        keep = arguments.keep and os.path.join(arguments.keep, form)
        found[form] = {}
        for name in arguments.programs:
            found[form][name] = result = tpu_compile.measure(case, name, arguments.large, keep)
            moved = [f"{move['count']:g} {move['kind']} {move['array']} {move['place']}" for move in result["moves"]]
            print(
                f"{form}, {name}: {result['compile_seconds']} s ({result['compile_cpu_seconds']} of CPU time), "
                f"{result['bytes'] / 1e6:.1f} MB, {result['memory'] / 2**30:.2f} GiB, {moved[:5]}",
                file=sys.stderr,
                flush=True,
            )
    return {"forms": found}


def on_cpu(arguments) -> dict:
    """Seconds to compile and per plain step, the forms in turn."""
    programs, seconds, compiled, tokens = {}, {}, {}, {}
    for form in arguments.form:
        model = FORMS[form](SMOL)
        params = model.init(jax.random.key(0), jnp.dtype(arguments.dtype))

        def steps(params, cache, token, model=model):
            def one(_, carry):
                cache, token = carry
                output = model.apply(params, token, cache.lengths[:, None], cache, None)
                best = jnp.argmax(model.unembed(params, output.hidden), axis=-1).astype(jnp.int32)
                output, cache = lax.optimization_barrier((output, cache))
                return cache.commit(output.block, jnp.zeros_like(best), jnp.ones_like(cache.lengths)), best

            return lax.fori_loop(0, arguments.steps, one, (cache, token))

        cache, token = model.init_cache(params, 1, 512), jnp.ones((1, 1), jnp.int32)
        start = time.perf_counter(), time.process_time()
        lowered = jax.jit(steps, donate_argnums=1).lower(params, cache, token)
        traced = time.perf_counter(), time.process_time()
        compiled[form] = lowered.compile()
        ended = time.perf_counter(), time.process_time()
        seconds[form] = {
            "trace_seconds": traced[0] - start[0],
            "compile_seconds": ended[0] - traced[0],
            "compile_cpu_seconds": ended[1] - traced[1],
        }
        programs[form] = model, params, token
    times = {form: [] for form in arguments.form}
    for _ in range(arguments.repeats):
        for form, (model, params, token) in programs.items():
            cache = jax.block_until_ready(model.init_cache(params, 1, 512))
            start = time.perf_counter()
            _, last = jax.block_until_ready(compiled[form](params, cache, token))
            times[form].append((time.perf_counter() - start) / arguments.steps)
            tokens[form] = last.tolist()
    for form, values in times.items():
        seconds[form] |= {"ms_per_step": 1e3 * statistics.median(values), "last": tokens[form]}
        print(form, seconds[form], file=sys.stderr)
    return {"dtype": arguments.dtype, "forms": seconds}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("where", choices=["tpu", "cpu"])
    parser.add_argument("--form", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--target", default="llama-3.1-8b")
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--programs", nargs="+", default=["pass 1", "pass 8"])
    parser.add_argument("--large", type=float, default=4e6)
    parser.add_argument("--keep")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    if arguments.where == "tpu":
        kind = arguments.topology.split(":")[0]
        os.environ.update(tpu_compile.ENVIRONMENT, TPU_ACCELERATOR_TYPE=tpu_compile.ACCELERATORS[kind])
    from record import record

    result = (on_tpu if arguments.where == "tpu" else on_cpu)(arguments)
    record(" ".join(["python", *sys.argv]), result, arguments.output)


if __name__ == "__main__":
    main()
