"""Which axes of the parameters go over which axis of the mesh.

Parameters name their axes (``Decoder.logical_axes``), and four of the names go over ``model``::

    kv_heads    query, key and value products, the cache              each device a share of the heads, groups kept together
    heads       output product, all numbers of all heads in a row     the same share
    mlp         gate, up and down products                            each device a share of the width
    vocab       embedding and output matrix                           each device a share of the ids

What is not divisible by the axis is not split: all devices of the axis hold the whole of it and compute the same. So a model with
fewer key/value heads than devices still has its MLP and vocabulary split, and only attention and cache are everywhere.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.cache import KVCache
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.products import Split
from specjax.parallel.mesh import DATA, MODEL, ROWS


@dataclasses.dataclass(frozen=True)
class ShardingRule:
    """Logical axes that go over ``model`` where they are divisible.

    Attributes:
      logical: names of the axes at the parameters.
      part: the field of :class:`specjax.models.products.Split` that says so.
      size: the field of :class:`specjax.models.config.DecoderConfig` that must be divisible.
      what: for people.
    """

    logical: tuple[str, ...]
    part: str
    size: str
    what: str


RULES = (
    ShardingRule(("kv_heads", "heads"), "heads", "num_kv_heads", "key/value heads"),
    ShardingRule(("mlp",), "mlp", "mlp_width", "MLP width"),
    ShardingRule(("vocab",), "vocab", "vocab_size", "vocabulary"),
)
"""All of them; every other axis is on all devices."""


def split_of(config: DecoderConfig, devices: int) -> Split:
    """What of a decoder is split over so many devices.

    Example:
      >>> config = DecoderConfig(vocab_size=49152, num_layers=1, width=576, num_query_heads=9, num_kv_heads=3, head_dim=64,
      ...                        mlp_width=1536, max_positions=8)
      >>> split_of(config, 3)
      Split(axis='model', heads=True, mlp=True, vocab=True)
      >>> split_of(config, 2)
      Split(axis='model', heads=False, mlp=True, vocab=True)
    """
    if devices == 1:
        return Split()
    return Split(MODEL, **{rule.part: getattr(config, rule.size) % devices == 0 for rule in RULES})


def local_config(config: DecoderConfig, devices: int) -> DecoderConfig:
    """The sizes that one of so many devices has."""
    split = split_of(config, devices)
    shares = {rule.size: getattr(config, rule.size) // devices for rule in RULES if getattr(split, rule.part)}
    if split.heads:
        shares["num_query_heads"] = config.num_query_heads // devices
    return dataclasses.replace(config, **shares)


def param_specs(decoder: Decoder) -> dict:
    """The parameters' nested dict with a ``PartitionSpec`` of mesh axes for each array, as the decoder's ``split`` has it."""
    axes = {name: MODEL for rule in RULES if getattr(decoder.split, rule.part) for name in rule.logical}

    def on_mesh(logical: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(*[axes.get(name) for name in logical])

    return jax.tree.map(on_mesh, decoder.logical_axes(), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def cache_specs(split: Split) -> Any:
    """Where a model's cache is, rows over ``data``: a ``PartitionSpec`` for each array of it, or one for all."""
    heads: Any = PartitionSpec(DATA, MODEL)
    return KVCache(keys=heads, values=heads, lengths=ROWS) if split.heads else ROWS


def param_shardings(config: DecoderConfig, mesh: Mesh) -> dict:
    """The parameters' nested dict with the ``NamedSharding`` that each array has on ``mesh``."""
    devices = mesh.shape[MODEL]
    specs = param_specs(Decoder(local_config(config, devices), split=split_of(config, devices)))
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def describe(config: DecoderConfig, devices: int) -> str:
    """What goes where, for people.

    Example:
      >>> config = DecoderConfig(vocab_size=96, num_layers=1, width=8, num_query_heads=9, num_kv_heads=3, head_dim=4,
      ...                        mlp_width=16, max_positions=8)
      >>> describe(config, 2)
      'over 2 devices: MLP width 16, vocabulary 96; on each of them: all 3 key/value heads, which 2 does not divide'
    """
    split = split_of(config, devices)
    shared = [f"{rule.what} {getattr(config, rule.size)}" for rule in RULES if getattr(split, rule.part)]
    whole = [f"all {getattr(config, rule.size)} {rule.what}" for rule in RULES if not getattr(split, rule.part)]
    parts = [f"over {devices} devices: {', '.join(shared)}"] if shared else []
    parts += [f"on each of them: {', '.join(whole)}, which {devices} does not divide"] if whole and devices > 1 else []
    return "; ".join(parts) or "on one device"
