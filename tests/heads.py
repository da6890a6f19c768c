"""A tiny decoder and heads for it, untrained; shared by tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.draft_layers import DraftConfig, DraftLayers
from specjax.models.eagle_head import EagleConfig, EagleHead
from specjax.models.medusa_heads import MedusaConfig, MedusaHeads
from specjax.models.trained_head import TargetMark, TrainedHead

CONFIG = DecoderConfig(
    vocab_size=23, num_layers=2, width=16, num_query_heads=4, num_kv_heads=2, head_dim=4, mlp_width=24, max_positions=160
)
IDS = np.array([0, 1, 2, 3, 5, 7, 8, 11, 13, 14, 17, 19, 22], np.int32)
"""A reduced vocabulary."""


@functools.cache
def target(seed=0, config=CONFIG, dtype="float32"):
    """A model whose next token depends on its text."""
    params = Decoder(config).init(jax.random.key(seed), scale=0.5)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), params)
    return specjax.Model(
        functions=Decoder(config), params=params, vocab_size=config.vocab_size, max_positions=config.max_positions, name="tiny"
    )


@functools.cache
def cycling_target():
    """A model that mostly goes from each token to the one after it in a fixed order of all, a little swayed by its text."""
    config = dataclasses.replace(CONFIG, tied_embedding=False)
    params = Decoder(config).init(jax.random.key(1), scale=0.2)
    rows = jax.random.normal(jax.random.key(2), params["embedding"].shape)
    order = np.random.default_rng(3).permutation(config.vocab_size)
    params["embedding"] = rows
    params["unembedding"] = jnp.zeros_like(rows).at[np.roll(order, -1)].set(0.5 * rows[order])
    return specjax.Model(
        functions=Decoder(config), params=params, vocab_size=config.vocab_size, max_positions=config.max_positions, name="cycling"
    )


@functools.cache
def layered_target():
    """A model that goes through its tokens in a fixed order, a little swayed by its text; only its last layer knows the order."""
    config = dataclasses.replace(CONFIG, width=32, mlp_width=23)
    params = Decoder(config).init(jax.random.key(1), scale=0.13)
    rows = np.linalg.qr(np.random.default_rng(2).normal(size=(config.width, config.width)))[0][: config.vocab_size]
    order = np.random.default_rng(3).permutation(config.vocab_size)
    # A neuron for each token, which writes the one that follows.
    follows = np.zeros_like(rows)
    follows[order] = rows[np.roll(order, -1)]
    params["embedding"] = jnp.asarray(4 * rows, jnp.float32)
    params["layers"][1]["mlp"] = {"gate_up": jnp.asarray(np.stack([rows, rows]), jnp.float32), "down": jnp.asarray(follows.T)}
    return specjax.Model(
        functions=Decoder(config), params=params, vocab_size=config.vocab_size, max_positions=config.max_positions, name="layered"
    )


def eagle_head(model=None, ids=IDS, feature_layers=(1, 2), scale=0.4):
    """An autoregressive head with random parameters."""
    model = target() if model is None else model
    layer = dataclasses.replace(model.config, num_layers=1)
    functions = EagleHead(EagleConfig(layer, len(feature_layers), None if ids is None else len(ids)))
    params = _random(functions.abstract_params(), scale)
    return TrainedHead(functions, params, TargetMark.of(model), feature_layers, ids)


def medusa_heads(model=None, ids=IDS, num_heads=3, scale=0.1, **config):
    """Medusa heads with random parameters."""
    model = target() if model is None else model
    sizes = (model.config.width, model.config.vocab_size, num_heads)
    functions = MedusaHeads(MedusaConfig(*sizes, draft_vocab_size=None if ids is None else len(ids), **config))
    params = _random(functions.abstract_params(), scale)
    return TrainedHead(functions, params, TargetMark.of(model), (model.config.num_layers,), ids)


def draft_layers(model=None, ids=IDS, num_layers=1, scale=0.4, **config):
    """A distilled draft model with random parameters."""
    model = target() if model is None else model
    sizes = dataclasses.replace(model.config, num_layers=num_layers, **config)
    functions = DraftLayers(DraftConfig(sizes, None if ids is None else len(ids)))
    return TrainedHead(functions, _random(functions.abstract_params(), scale), TargetMark.of(model), (), ids)


def _random(abstract, scale):
    leaves, treedef = jax.tree.flatten(abstract)
    keys = jax.random.split(jax.random.key(5), len(leaves))
    return jax.tree.unflatten(
        treedef, [scale * jax.random.normal(key, leaf.shape, jnp.float32) for key, leaf in zip(keys, leaves, strict=True)]
    )
