import dataclasses

import numpy as np
import pytest

from specjax.models.config import (
    NOT_PLAIN,
    DecoderConfig,
    ExpertsConfig,
    LinearRopeScaling,
    Llama3RopeScaling,
    RopeConfig,
    YarnRopeScaling,
)

SIZES = {
    "vocab_size": 11, "num_layers": 1, "width": 8, "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 4, "mlp_width": 16,
    "max_positions": 32,
}  # fmt: skip


def test_plain_frequencies_are_a_geometric_series():
    np.testing.assert_allclose(RopeConfig(theta=16.0).frequencies(8), [1, 1 / 2, 1 / 4, 1 / 8], rtol=1e-15)


def test_llama3_scaling_of_llama_3_2():
    scaling = Llama3RopeScaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
    plain = RopeConfig(theta=5e5).frequencies(64)
    ratio = RopeConfig(theta=5e5, scaling=scaling).frequencies(64) / plain
    np.testing.assert_array_equal(ratio[:15], 1.0)
    np.testing.assert_allclose(ratio[15:18], [0.606, 0.304, 0.103], atol=5e-4)
    np.testing.assert_allclose(ratio[18:], 1 / 32, rtol=1e-15)
    assert ratio.shape == (32,)


def test_group_size():
    assert DecoderConfig(**SIZES).group_size == 2


def test_equal_configs_are_one_static_argument():
    scaling = Llama3RopeScaling(8.0, 1.0, 4.0, 48)
    first, second = (DecoderConfig(**SIZES, rope=RopeConfig(500.0, scaling)) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != dataclasses.replace(first, norm_eps=1e-6)


@pytest.mark.parametrize("name", list(SIZES))
@pytest.mark.parametrize("value", [0, -1, 2.0, "4", None])
def test_sizes_are_positive_integers(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}; it must be an integer of at least 1"):
        DecoderConfig(**SIZES | {name: value})


def test_query_heads_divide_among_kv_heads():
    with pytest.raises(ValueError, match=r"num_query_heads is 4; it must be a multiple of num_kv_heads \(3\)"):
        DecoderConfig(**SIZES | {"num_kv_heads": 3})


def test_head_dim_is_even():
    with pytest.raises(ValueError, match="head_dim is 5; rotary embedding needs an even number"):
        DecoderConfig(**SIZES | {"head_dim": 5})


def test_linear_scaling_is_a_text_that_is_nearer():
    scaled = RopeConfig(theta=50.0, scaling=LinearRopeScaling(4.0))
    np.testing.assert_allclose(scaled.frequencies(8) * 12, RopeConfig(theta=50.0).frequencies(8) * 3, rtol=1e-15)
    assert scaled.magnitude == 1.0


def test_yarn_of_qwen():
    """As Qwen2.5's model cards ask for: base 1e6, heads of 128, factor 4, trained on 32,768 positions."""
    rope = RopeConfig(theta=1e6, scaling=YarnRopeScaling(4.0, 32768))
    ratio = rope.frequencies(128) / RopeConfig(theta=1e6).frequencies(128)
    # 32 turns lie between frequencies 23 and 24, one turn between 39 and 40.
    np.testing.assert_array_equal(ratio[:24], 1.0)
    np.testing.assert_allclose(ratio[40:], 1 / 4, rtol=1e-15)
    np.testing.assert_allclose(ratio[23:41], np.linspace(1, 1 / 4, 18), rtol=1e-12)
    assert rope.magnitude == 0.1 * np.log(4) + 1
    assert YarnRopeScaling(4.0, 32768, attention_factor=1.5).magnitude == 1.5
    assert YarnRopeScaling(1.0, 32768).magnitude == 1.0


LOCAL = {"window": 4, "local_layers": (0,)}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"activation": "relu"}, "activation is 'relu'; it must be one of silu, gelu_tanh"),
        ({"attention_soft_cap": 0.0}, "attention_soft_cap is 0.0; it must be positive"),
        ({"embedding_scale": float("inf")}, "embedding_scale is inf"),
        ({"window": 4}, r"window is 4 and local_layers is \(\); one asks for the other"),
        ({"local_layers": (0,)}, "window is None and local_layers is"),
        ({"window": 0, "local_layers": (0,)}, "window is 0; it must be an integer of at least 1"),
        ({"window": 4, "local_layers": (1,)}, r"local_layers is \(1,\); it must rise and hold some of 0 to 0"),
        ({"num_layers": 2, "window": 4, "local_layers": (1, 0)}, r"local_layers is \(1, 0\); it must rise"),
        ({"local_rope": RopeConfig()}, "local_rope is given, but local_layers is empty"),
    ],
)
def test_options_that_cannot_be(changes, match):
    with pytest.raises(ValueError, match=match):
        DecoderConfig(**SIZES | changes)


def test_sums_in_parts():
    with pytest.raises(ValueError, match="product_parts is 0; it must be an integer of at least 1"):
        DecoderConfig(**SIZES, product_parts=0)
    with pytest.raises(ValueError, match="product_parts is 8; a mixture of experts takes 1 only"):
        DecoderConfig(**SIZES, product_parts=8, experts=ExpertsConfig(4, 2))
    assert DecoderConfig(**SIZES, product_parts=8).plain_layer().product_parts == 1


@pytest.mark.parametrize(("count", "active", "name"), [(0, 1, "num_experts"), (4, 5, "num_active"), (4, 0, "num_active")])
def test_experts_that_cannot_be(count, active, name):
    with pytest.raises(ValueError, match=f"ExpertsConfig: {name} is"):
        ExpertsConfig(count, active)


@pytest.mark.parametrize("changes", [{"beta_slow": 40.0}, {"factor": 0.0}, {"attention_factor": -1.0}])
def test_yarn_that_cannot_be(changes):
    with pytest.raises(ValueError, match=f"YarnRopeScaling: {next(iter(changes))} is"):
        YarnRopeScaling(**{"factor": 4.0, "original_max_positions": 64} | changes)


def test_a_plain_layer_has_nothing_special():
    experts, rope = ExpertsConfig(4, 2), RopeConfig(5.0)
    special = DecoderConfig(
        **SIZES | LOCAL, local_rope=rope, experts=experts, post_norms=True, attention_scale=2.0, attention_soft_cap=1.0,
        logit_soft_cap=1.0, embedding_scale=2.0, int8_stream="float32", query_key_norm=True, activation="gelu_tanh",
        scan_layers=True,
    )  # fmt: skip
    assert special.not_plain() == list(NOT_PLAIN)
    assert special.plain_layer() == DecoderConfig(**SIZES, query_key_norm=True, activation="gelu_tanh")
    assert DecoderConfig(**SIZES).not_plain() == []
