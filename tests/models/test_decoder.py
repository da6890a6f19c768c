import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.attention import attend, rotate, used_sizes
from specjax.models.config import DecoderConfig, ExpertsConfig, RopeConfig
from specjax.models.decoder import Decoder
from specjax.models.mlp import ExpertsMLP, gated
from specjax.models.products import MANY_ROWS, contract

CONFIG = DecoderConfig(
    vocab_size=19, num_layers=2, width=12, num_query_heads=6, num_kv_heads=3, head_dim=4, mlp_width=20, max_positions=64,
    rope=RopeConfig(theta=50.0),
)  # fmt: skip
VARIANTS = {
    "tied": CONFIG,
    "untied": dataclasses.replace(CONFIG, tied_embedding=False),
    "biases": dataclasses.replace(CONFIG, qkv_bias=True),
    "norms": dataclasses.replace(CONFIG, query_key_norm=True, post_norms=True),
    "experts": dataclasses.replace(CONFIG, experts=ExpertsConfig(7, 2)),
}
TOKENS = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
POSITIONS = jnp.broadcast_to(jnp.arange(5), (2, 5))


def run(decoder, params, tokens=TOKENS, positions=POSITIONS, mask=None):
    return decoder.apply(params, tokens, positions, decoder.init_cache(params, len(tokens), 8), mask)


def attention_of_one_token(cache_values, lengths, cache_keys=None, block_value=1.0):
    """All scores are 0: the mean of the values that are visible. One row, one head, head size 2."""
    cache_values = jnp.repeat(jnp.asarray(cache_values, jnp.float32)[None, None, :, None], 2, axis=3)
    cache_keys = jnp.zeros_like(cache_values) if cache_keys is None else cache_keys
    query = jnp.zeros((1, 1, 1, 1, 2))
    own = jnp.zeros((1, 1, 1, 2))
    mask = jnp.ones((1, 1), bool)
    return attend(query, own, own + block_value, cache_keys, cache_values, jnp.array([lengths]), mask)[0, 0, 0, 0, 0].item()


def test_empty_slots_take_no_attention():
    # One real key with score 0 and value 1, and one slot that was never written: 1, not 1/2.
    assert attention_of_one_token([0.0], lengths=0) == 1.0
    # Two real ones, one slot that was never written: 1, not 2/3.
    assert attention_of_one_token([1.0, 0.0], lengths=1) == 1.0


def test_stale_slots_take_no_attention():
    stale = jnp.full((1, 1, 2, 2), 1e18)
    assert attention_of_one_token([4.0, 1e30], lengths=1, cache_keys=stale.at[:, :, 0].set(0.0), block_value=2.0) == 3.0


def test_tokens_outside_the_mask_are_invisible():
    decoder = Decoder(CONFIG)
    params = decoder.init(jax.random.key(0))
    siblings = jnp.eye(5, dtype=bool).at[:, 0].set(True)
    alone = run(decoder, params, TOKENS[:, :2], POSITIONS[:, :2]).hidden
    # A later sibling changes neither the root nor the sibling before it.
    beside = run(decoder, params, TOKENS, jnp.minimum(POSITIONS, 1), siblings).hidden
    np.testing.assert_allclose(beside[:, :2], alone, atol=2e-6)


@pytest.mark.parametrize("longest", [0, 300, 301, 600])
def test_attention_over_the_used_part_of_a_cache_is_attention_over_it(longest):
    assert used_sizes(600) == (300, 600)
    keys = jax.random.split(jax.random.key(longest), 5)
    query = jax.random.normal(keys[0], (2, 3, 2, 2, 4))
    block = [jax.random.normal(key, (2, 2, 3, 4)) for key in keys[1:3]]
    cached = [jax.random.normal(key, (2, 2, 600, 4)) for key in keys[3:]]
    lengths, mask = jnp.array([longest, longest // 2]), jnp.tril(jnp.ones((3, 3), bool))
    mixed = attend(query, *block, *cached, lengths, mask)
    # In NumPy, over each row's own entries.
    for row, length in enumerate(lengths.tolist()):
        values = np.concatenate([cached[1][row, :, :length], block[1][row]], axis=1, dtype=np.float64)
        all_keys = np.concatenate([cached[0][row, :, :length], block[0][row]], axis=1, dtype=np.float64)
        scores = np.einsum("tkgd,ksd->tkgs", query[row], all_keys) / 2
        visible = np.concatenate([np.ones((3, length), bool), mask], axis=1)[:, None, None]
        weights = np.where(visible, np.exp(scores), 0)
        expected = np.einsum("tkgs,ksd->tkgd", weights / weights.sum(-1, keepdims=True), values)
        np.testing.assert_allclose(mixed[row], expected, atol=3e-6)


def test_a_window_counts_positions():
    """All scores are 0: the mean of the values in the window, whichever of them are committed."""
    values = 2.0 ** jnp.arange(6)
    keys = jnp.zeros((1, 1, 6, 2))
    by_place = jnp.repeat(values[None, None, :, None], 2, axis=3)
    for committed in (0, 2, 5):
        query = jnp.zeros((1, 6 - committed, 1, 1, 2))
        position = jnp.arange(committed, 6)
        mask = (position[:, None] >= position[None]) & (position[:, None] - position[None] < 3)
        mixed = attend(
            query, keys[:, :, committed:], by_place[:, :, committed:], keys, by_place, jnp.array([committed]), mask,
            since=position[None] - 2,
        )[0, :, 0, 0, 0]  # fmt: skip
        expected = [np.mean(values[max(0, p - 2) : p + 1]) for p in range(committed, 6)]
        np.testing.assert_allclose(mixed, expected, rtol=1e-6)


def test_experts_are_mixed_by_their_shares():
    config = dataclasses.replace(CONFIG, experts=ExpertsConfig(5, 2, renormalise=False), mlp_width=7)
    layer = ExpertsMLP(config, jnp.float32)
    keys = jax.random.split(jax.random.key(0), 4)
    router, gate_up, down, inputs = (
        jax.random.normal(key, shape) for key, shape in zip(keys, [(5, 12), (5, 2, 7, 12), (5, 12, 7), (2, 3, 12)], strict=True)
    )
    layer.router[...], layer.gate_up[...], layer.down[...] = router, gate_up, down
    shares = jax.nn.softmax(np.einsum("btw,ew->bte", inputs, router), axis=-1)
    # Every expert over every token; those that are not among the two largest count nothing.
    all_outputs = np.einsum("btef,ewf->btew", gated(np.einsum("btw,egfw->btegf", inputs, gate_up), "silu"), down)
    counted = np.where(shares >= np.sort(shares, axis=-1)[..., -2:-1], shares, 0)
    np.testing.assert_allclose(layer(inputs), np.einsum("bte,btew->btw", counted, all_outputs), atol=2e-4)
    layer.experts = ExpertsConfig(5, 2)
    counted = counted / counted.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(layer(inputs), np.einsum("bte,btew->btw", counted, all_outputs), atol=2e-4)


def test_rotation_depends_on_distance_alone():
    frequencies = RopeConfig(theta=50.0).frequencies(8)
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 8))

    def score(query_position, key_position):
        turned = [rotate(v[None], jnp.array([[p]]), frequencies) for v, p in ((query, query_position), (key, key_position))]
        return jnp.sum(turned[0] * turned[1]).item()

    assert score(0, 0) == pytest.approx(jnp.sum(query * key).item(), abs=1e-6)
    assert score(7, 3) == pytest.approx(score(24, 20), abs=1e-5)
    assert abs(score(7, 3) - score(7, 4)) > 1e-2


def test_rotation_pairs_the_halves():
    # Frequency 1 turns the pair (0, 2), frequency 0 leaves (1, 3) alone.
    turned = rotate(jnp.array([[[1.0, 2.0, 3.0, 4.0]]]), jnp.array([[5]]), np.array([1.0, 0.0]))[0, 0]
    cos, sin = math.cos(5), math.sin(5)
    np.testing.assert_allclose(turned, [cos - 3 * sin, 2.0, 3 * cos + sin, 4.0], rtol=1e-5)


def test_contract_sums_over_the_trailing_axes():
    inputs, weight = jax.random.normal(jax.random.key(0), (2, 3, 4, 5)), jax.random.normal(jax.random.key(1), (6, 7, 4, 5))
    np.testing.assert_allclose(contract(inputs, weight, num_in=2), np.einsum("btij,xyij->btxy", inputs, weight), atol=1e-5)


def test_sums_in_parts():
    """Each part is a sum of its own: what one part rounds away shows that the terms of another were not added to it."""
    inputs, weight = jax.random.normal(jax.random.key(0), (2, 3, 21)), jax.random.normal(jax.random.key(1), (5, 21))
    np.testing.assert_allclose(contract(inputs, weight, parts=4), np.einsum("bti,xi->btx", inputs, weight), atol=1e-5)
    # 2^25 takes up no 1 added to it; three parts of eight ones each do not meet it before they are 24.
    terms = jnp.array([[2.0**25, *[0.0] * 7, *[1.0] * 24]])
    np.testing.assert_array_equal(contract(terms, jnp.ones((1, 32)), parts=4), [[2.0**25 + 24]])
    params, logits = Decoder(CONFIG).init(jax.random.key(2)), []
    for parts in (1, 3):
        decoder = Decoder(dataclasses.replace(CONFIG, product_parts=parts))
        logits.append(decoder.unembed(params, run(decoder, params).hidden))
    np.testing.assert_allclose(*logits, atol=1e-5)
    assert not np.array_equal(*logits)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other backends multiply as it is written")
def test_how_a_cpu_multiplies():
    """Few rows: the weight first. One of half precision: as two. The result is the same either way."""
    inputs = jax.random.normal(jax.random.key(0), (1, 2, 96)).astype(jnp.bfloat16)
    weight = jax.random.normal(jax.random.key(1), (64, 96)).astype(jnp.bfloat16)
    alone = contract(inputs[:, :1], weight)
    assert alone.shape == (1, 1, 64)
    assert alone.dtype == jnp.bfloat16
    np.testing.assert_array_equal(alone, contract(inputs, weight)[:, :1])
    np.testing.assert_allclose(
        contract(inputs.astype(jnp.float32), weight.astype(jnp.float32)),
        np.einsum("bti,xi->btx", inputs.astype(jnp.float32), weight.astype(jnp.float32)),
        atol=1e-5,
    )

    def product(num_rows, dtype):
        lowered = jax.jit(contract).lower(jnp.zeros((num_rows, 96), dtype), weight.astype(dtype))
        return re.search(r"dot_general.*-> tensor<(\w+)>", lowered.as_text()).group(1)

    assert product(1, jnp.bfloat16) == "64x2xf32"
    assert product(1, jnp.float32) == "64x1xf32"
    assert product(8, jnp.float32) == "64x8xf32"
    assert product(MANY_ROWS, jnp.float32) == f"{MANY_ROWS}x64xf32"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_has_logical_axes(variant):
    decoder = Decoder(VARIANTS[variant])
    shapes, axes = decoder.abstract_params(), decoder.logical_axes()
    assert jax.tree.structure(shapes) == jax.tree.structure(axes)
    sizes = {}
    for shape, names in zip(jax.tree.leaves(shapes), jax.tree.leaves(axes), strict=True):
        assert len(names) == shape.ndim
        assert all(isinstance(name, str) for name in names)
        for name, size in zip(names, shape.shape, strict=True):
            sizes.setdefault(name, set()).add(size)
    # One name, one kind of axis; "group" counts the query heads, the key and the value, "heads" the numbers of all query heads.
    expected = {
        "vocab": {19}, "embed": {12}, "kv_heads": {3}, "group": {4}, "head_dim": {4}, "heads": {24}, "mlp": {20}, "gate_up": {2},
    }  # fmt: skip
    assert sizes == expected | ({"experts": {7}} if variant == "experts" else {})


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_the_described_ones(variant):
    config = VARIANTS[variant]
    shapes = jax.tree.map(lambda leaf: leaf.shape, Decoder(config).abstract_params(), is_leaf=lambda leaf: hasattr(leaf, "shape"))
    layer = {
        "attention_norm": {"scale": (12,)},
        "attention": {"qkv": (3, 4, 4, 12), "out": (12, 24)} | ({"qkv_bias": (3, 4, 4)} if config.qkv_bias else {}),
        "mlp_norm": {"scale": (12,)},
        "mlp": {"gate_up": (2, 20, 12), "down": (12, 20)},
    }
    if config.query_key_norm:
        layer["attention"] |= {"query_norm": {"scale": (4,)}, "key_norm": {"scale": (4,)}}
    if config.post_norms:
        layer |= {"attention_post_norm": {"scale": (12,)}, "mlp_post_norm": {"scale": (12,)}}
    if config.experts:
        layer["mlp"] = {"router": (7, 12), "gate_up": (7, 2, 20, 12), "down": (7, 12, 20)}
    expected = {"embedding": (19, 12), "layers": {0: layer, 1: layer}, "final_norm": {"scale": (12,)}}
    assert shapes == expected | ({} if config.tied_embedding else {"unembedding": (19, 12)})


def test_features_are_the_layers_asked_for():
    params = Decoder(CONFIG).init(jax.random.key(0))
    output = run(Decoder(CONFIG, feature_layers=(2, 0, 1)), params)
    assert output.features.shape == (2, 5, 3, 12)
    np.testing.assert_array_equal(output.features[:, :, 0], output.hidden)
    np.testing.assert_array_equal(output.features[:, :, 1], params["embedding"][TOKENS])
    # The output of layer 1 is what a decoder of one layer has before its final norm (whose scale is 1 here).
    shallow = run(Decoder(dataclasses.replace(CONFIG, num_layers=1)), params | {"layers": {0: params["layers"][0]}}).hidden
    stream = np.asarray(output.features[:, :, 2])
    np.testing.assert_allclose(stream / np.sqrt((stream**2).mean(-1, keepdims=True) + CONFIG.norm_eps), shallow, atol=1e-5)


def test_no_features_unless_asked_for():
    decoder = Decoder(CONFIG)
    assert run(decoder, decoder.init(jax.random.key(0))).features.shape == (2, 5, 0, 12)


@pytest.mark.parametrize("index", [-1, 3])
def test_feature_layers_exist(index):
    with pytest.raises(ValueError, match=rf"feature_layers holds {index}; a layer is between 0 \(the embedding\) and 2"):
        Decoder(CONFIG, feature_layers=(0, index))


@pytest.mark.parametrize("variant", VARIANTS)
def test_half_precision_gives_float32_logits(variant):
    decoder = Decoder(VARIANTS[variant])
    params = decoder.init(jax.random.key(0))
    half = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, decoder.abstract_params(jnp.bfloat16))
    output, exact = run(decoder, half), run(decoder, params)
    assert output.hidden.dtype == output.block.keys[0].dtype == jnp.bfloat16
    logits = decoder.unembed(half, output.hidden)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, decoder.unembed(params, exact.hidden), atol=0.15)


def test_untied_logits_come_from_the_output_matrix():
    decoder = Decoder(VARIANTS["untied"])
    params = decoder.init(jax.random.key(0))
    hidden = jnp.eye(12)[None]
    np.testing.assert_array_equal(decoder.unembed(params, hidden)[0], params["unembedding"].T)


@pytest.mark.parametrize(
    ("tokens", "positions", "mask"),
    [
        (TOKENS[0], POSITIONS, None),
        (TOKENS, POSITIONS[:, :4], None),
        (TOKENS, POSITIONS, jnp.ones((4, 4), bool)),
        (TOKENS, POSITIONS, jnp.ones((5, 4), bool)),
    ],
)
def test_shapes_are_checked(tokens, positions, mask):
    decoder = Decoder(CONFIG)
    params = decoder.init(jax.random.key(0))
    with pytest.raises(AssertionError):
        decoder.apply(params, tokens, positions, decoder.init_cache(params, 2, 8), mask)
