import dataclasses

import numpy as np
import pytest

from specjax.models.config import DecoderConfig, Llama3RopeScaling, RopeConfig

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
