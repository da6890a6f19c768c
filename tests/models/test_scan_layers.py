"""Layers in a loop say what layers in line say, to the last bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.draft_layers import DraftConfig, layers_of
from specjax.models.eagle_head import EagleConfig
from specjax.models.int8_model import quantise_model
from specjax.models.loaded import Model
from specjax.models.shallow import keep_layers
from specjax.parallel import make_mesh
from specjax.serving.requests import Request
from tests.checkpoints import tiny

PLAIN = DecoderConfig(
    vocab_size=40, num_layers=4, width=16, num_query_heads=4, num_kv_heads=2, head_dim=4, mlp_width=24, max_positions=64,
)  # fmt: skip
LOCAL = dataclasses.replace(PLAIN, window=5, local_layers=(0, 2), post_norms=True, query_key_norm=True, qkv_bias=True)
CONFIGS = {"alike": PLAIN, "local and global": LOCAL}


def model_of(config, **options):
    decoder = Decoder(dataclasses.replace(config, **options))
    params = decoder.init(jax.random.key(3), scale=0.5)
    return Model(functions=decoder, params=params, vocab_size=config.vocab_size, max_positions=config.max_positions)


def both(config):
    return model_of(config), model_of(config, scan_layers=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_passes_and_features_are_the_same(name):
    results = []
    for model in both(CONFIGS[name]):
        decoder = model.functions.with_features((0, 1, 2, 3, 4))
        cache = decoder.init_cache(model.params, batch=2, capacity=16)
        nodes = jnp.tile(jnp.arange(3), (2, 1))
        for step in range(3):
            tokens, positions = nodes + 7 * step, cache.lengths[:, None] + nodes
            output = jax.jit(decoder.apply)(model.params, tokens, positions, cache)
            cache = cache.commit(output.block, nodes, jnp.array([2, 3]))
        results.append((decoder.unembed(model.params, output.hidden), output.features, cache.lengths))
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert results[0][1].shape == (2, 3, 5, 16)


def texts(model, **options):
    settings = specjax.SamplingParams(temperature=0.8, max_tokens=12, seed=5)
    outputs = specjax.generate(model, [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11]], settings, **options)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("drafter", ["none", "lookup", "itself", "its layers"])
def test_tokens_are_the_same(drafter):
    in_line, in_loop = both(LOCAL)

    def drafter_of(model):
        if drafter == "none":
            return None
        if drafter == "lookup":
            return specjax.drafters.prompt_lookup(3)
        return specjax.drafters.draft_model(model if drafter == "itself" else keep_layers(model, [0, 3]), 3)

    expected, found = (texts(model, drafter=drafter_of(model)) for model in (in_line, in_loop))
    assert found == expected


@pytest.mark.parametrize("drafter", [None, "itself"])
def test_an_engine_over_a_mesh_gives_the_same(drafter):
    settings = specjax.SamplingParams(temperature=0.8, max_tokens=10, seed=5)
    found = []
    for model in both(PLAIN):
        drafts = drafter and specjax.drafters.draft_model(model, 3, split=True)
        requests = [Request(prompt, settings) for prompt in ([1, 2, 3], [4, 5, 6, 7], [8])]
        with specjax.Engine(model, slots=2, capacity=32, drafter=drafts, mesh=make_mesh(data=2, model=2)) as engine:
            found.append([completion.token_ids for completion in engine.run(requests)])
    assert found[0] == found[1]


def test_int8_is_the_same():
    in_line, in_loop = (quantise_model(model) for model in both(LOCAL))
    assert in_loop.params["layers"][1]["attention"]["qkv"].scale.shape == (2, 2, 4, 4)
    assert texts(in_loop) == texts(in_line)


def test_layers_that_are_kept_are_in_line():
    in_line, in_loop = both(LOCAL)
    one, two = (keep_layers(model, [0, 3]) for model in (in_line, in_loop))
    assert one.config == two.config
    assert not two.config.scan_layers
    assert tiny.same(one.params, two.params)
    assert layers_of(in_loop, [1])[0].config.decoder.scan_layers is False


def test_what_is_not_possible_is_refused():
    for local in ((0,), (0, 1, 3)):
        with pytest.raises(ValueError, match=r"scan_layers is True, but no order .* repeats over all 4"):
            dataclasses.replace(PLAIN, window=5, local_layers=local, scan_layers=True)
    with pytest.raises(ValueError, match="scan_layers is 1; it must be True or False"):
        dataclasses.replace(PLAIN, scan_layers=1)
    scanned = dataclasses.replace(PLAIN, scan_layers=True)
    with pytest.raises(ValueError, match="DraftConfig: decoder has scan_layers True"):
        DraftConfig(scanned)
    with pytest.raises(ValueError, match="EagleConfig: layer has scan_layers True"):
        EagleConfig(dataclasses.replace(scanned, num_layers=1))
    assert not scanned.plain_layer().scan_layers
