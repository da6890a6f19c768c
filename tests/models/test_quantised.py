"""Quantised products: whole numbers by hand and by NumPy, bounds of what rounding costs, rows that do not feel one another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.models.products import contract, contract_by_group, take_rows
from specjax.models.quantised import MOST_INPUTS, QuantisedMatrix, dequantise, quantise


def by_numpy(inputs, matrix):
    """The product in NumPy's whole numbers: what the module's docstring says, for two plain matrices."""
    largest = np.abs(inputs).max(axis=1)
    steps = inputs * (np.float32(127) / largest)[:, None]
    first = np.rint(steps)
    second = np.clip(np.rint((steps - first) * 256), -127, 127) if matrix.digits == 2 else np.zeros_like(first)
    sums = [digit.astype(np.int64) @ np.asarray(matrix.values, np.int64).T for digit in (first, second)]
    return (
        (sums[0].astype(np.float32) + sums[1].astype(np.float32) / 256)
        * (largest * np.float32(1 / 127))[:, None]
        * np.asarray(matrix.scale)[None]
    )


def test_by_hand():
    matrix = quantise(jnp.array([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [-254.0, 254.0, 1.0]]), digits=1)
    # 127 / 2 and a quarter of it, to the even one of two neighbours; a channel of zeros; steps of 2.
    assert matrix.values.tolist() == [[64, -127, 32], [0, 0, 0], [-127, 127, 0]]
    assert matrix.values.dtype == jnp.int8
    np.testing.assert_allclose(matrix.scale, [2 / 127, 0.0, 2.0], rtol=1e-7)
    np.testing.assert_allclose(dequantise(matrix)[0], [128 / 127, -2.0, 64 / 127], rtol=1e-6)
    inputs, step = jnp.array([[3.0, 0.01, -1.0], [0.4, 1.2, 127.0]]), np.array([[3 / 127], [1.0]]) * np.array([2 / 127, 0.0, 2.0])
    # Steps of 3 / 127 and of 1: rows [127, 0, -42] and [0, 1, 127].
    sums = np.array([[127 * 64 - 42 * 32, 0, -127 * 127], [-127 + 127 * 32, 0, 127]])
    np.testing.assert_allclose(contract(inputs, matrix), sums * step, rtol=1e-6)
    # What is left of them in 256ths of a step: [0, 108, -85] and [102, 51, 0].
    more = np.array([[-127 * 108 - 32 * 85, 0, 127 * 108], [64 * 102 - 127 * 51, 0, -127 * 102 + 127 * 51]])
    np.testing.assert_allclose(contract(inputs, matrix.replace(digits=2)), (sums + more / 256) * step, rtol=1e-6)


@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 5),
    outs=st.sampled_from([(3,), (2, 4), (1, 2, 3)]),
    ins=st.sampled_from([(1,), (40,), (3, 5), (2, 3, 4)]),
    digits=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**31),
)
def test_equal_to_numpys_whole_numbers(rows, outs, ins, digits, seed):
    random = np.random.default_rng(seed)
    # Rows and channels of very different sizes.
    inputs = random.normal(size=(rows, *ins)).astype(np.float32) * np.exp(random.normal(size=(rows,) + (1,) * len(ins)) * 3)
    weight = random.normal(size=(*outs, *ins)).astype(np.float32) * np.exp(random.normal(size=outs + (1,) * len(ins)))
    inputs, weight = inputs.astype(np.float32), weight.astype(np.float32)
    matrix = quantise(weight, num_in=len(ins), digits=digits)
    assert matrix.num_in == len(ins)
    flat = QuantisedMatrix(matrix.values.reshape(-1, np.prod(ins)), matrix.scale.reshape(-1), matrix.dtype, digits)
    outputs = contract(jnp.asarray(inputs), matrix, num_in=len(ins))
    assert outputs.shape == (rows, *outs)
    np.testing.assert_allclose(outputs.reshape(rows, -1), by_numpy(inputs.reshape(rows, -1), flat), rtol=3e-7)
    # No output is farther from the float product than half a step of each factor allows; 1 of 256 behind a second digit.
    exact = inputs.reshape(rows, -1).astype(np.float64) @ weight.reshape(np.prod(outs), -1).T.astype(np.float64)
    steps = np.abs(inputs).reshape(rows, -1).max(axis=1)[:, None] / 127, np.asarray(matrix.scale).reshape(1, -1)
    half = {1: 1 / 2, 2: 1 / 256}[digits]
    bound = (
        np.abs(inputs).reshape(rows, -1).sum(axis=1)[:, None] * steps[1] / 2
        + np.abs(weight).reshape(np.prod(outs), -1).sum(axis=1)[None] * steps[0] * half
        + np.prod(ins) * steps[0] * steps[1] / 2 * half
    )
    assert np.all(np.abs(outputs.reshape(rows, -1) - exact) <= bound * (1 + 1e-5))


def test_the_error_of_a_wide_product():
    inputs, weight = (np.random.default_rng(i).normal(size=(64, 576)).astype(np.float32) for i in range(2))

    def error(inputs, digits):
        exact = inputs @ weight.T
        difference = np.asarray(contract(jnp.asarray(inputs), quantise(weight, digits=digits))) - exact
        return np.sqrt(np.mean(difference**2) / np.mean(exact**2))

    # A step is about 3.2 / 127 of a deviation: 0.7% from each factor, 1.1% from both.
    assert 0.009 < error(inputs, 1) < 0.012
    assert 0.006 < error(inputs, 2) < 0.008
    # One value that is much larger than the others, and does not count: the others are lost in a single digit alone.
    weight[:, 0], inputs[:, 0] = 0, 100
    assert 0.15 < error(inputs, 1) < 0.3
    assert 0.006 < error(inputs, 2) < 0.008


def test_rows_and_channels_of_zeros_and_rows_that_are_not_finite():
    weight = np.random.default_rng(0).normal(size=(6, 16)).astype(np.float32)
    weight[2] = 0
    inputs = np.random.default_rng(1).normal(size=(5, 16)).astype(np.float32)
    alone = np.asarray(contract(jnp.asarray(inputs), quantise(weight)))
    inputs[1], inputs[3, 7], inputs[4, 0] = 0, np.nan, np.inf
    outputs = np.asarray(contract(jnp.asarray(inputs), quantise(weight)))
    assert not outputs[1].any()
    assert not outputs[:3, 2].any()
    assert not np.isfinite(outputs[3:, [0, 1, 3, 4, 5]]).any()
    np.testing.assert_array_equal(outputs[[0, 2]], alone[[0, 2]])


def test_a_row_does_not_feel_the_others():
    """Whole numbers add up alike in any order: bits, for a row alone, among others, behind padding, in another place."""
    weight = quantise(np.random.default_rng(0).normal(size=(48, 96)).astype(np.float32))
    inputs = np.random.default_rng(1).normal(size=(16, 96)).astype(np.float32)
    product = jax.jit(lambda inputs: contract(inputs, weight))
    together = np.asarray(product(inputs))
    for size in (1, 2, 3, 8):
        np.testing.assert_array_equal(product(inputs[:size]), together[:size])
    order = np.random.default_rng(2).permutation(16)
    np.testing.assert_array_equal(product(inputs[order]), together[order])
    np.testing.assert_array_equal(product(np.concatenate([1e4 * inputs[:3], inputs]))[3:], together)


@pytest.mark.parametrize("outs", [(5,), (2, 3)])
def test_groups_of_rows(outs):
    weights = quantise(np.random.default_rng(0).normal(size=(4, *outs, 8)).astype(np.float32))
    inputs = jnp.asarray(np.random.default_rng(1).normal(size=(9, 8)), jnp.float32)
    outputs = jax.jit(contract_by_group)(inputs, weights, jnp.array([2, 0, 6, 1]))
    groups = [0, 0, 2, 2, 2, 2, 2, 2, 3]
    for row, group in enumerate(groups):
        np.testing.assert_allclose(outputs[row], contract(inputs[row], weights[group]), rtol=3e-7)


def test_rows_of_an_embedding():
    embedding = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    matrix = quantise(embedding, dtype=jnp.bfloat16)
    rows = take_rows(matrix, jnp.array([[0, 6], [7, -1]]))
    assert rows.dtype == jnp.bfloat16
    whole = dequantise(matrix.astype(jnp.float32))
    np.testing.assert_array_equal(rows, whole[jnp.array([[0, 6], [6, 0]])].astype(jnp.bfloat16))
    np.testing.assert_allclose(whole, embedding, atol=np.abs(embedding).max() / 250)
    np.testing.assert_array_equal(dequantise(matrix[np.array([4, 2])]), dequantise(matrix)[np.array([4, 2])])


def test_on_the_host_and_on_a_device_alike(monkeypatch):
    monkeypatch.setattr("specjax.models.quantised.AT_ONCE", 100)
    weight = np.random.default_rng(0).normal(size=(5, 3, 2, 11)).astype(np.float32)
    host, device = quantise(weight, 2), jax.jit(lambda weight: quantise(weight, 2))(weight)
    assert isinstance(host.values, np.ndarray)
    assert (host.values.shape, host.scale.shape) == ((5, 3, 2, 11), (5, 3))
    jax.tree.map(np.testing.assert_array_equal, host, device)


def test_the_longest_sum():
    ones = np.ones((1, MOST_INPUTS), np.float32)
    assert contract(jnp.asarray(ones), quantise(ones)).item() == pytest.approx(MOST_INPUTS, rel=1e-6)
    with pytest.raises(ValueError, match=r"quantise: the matrix has 133145 inputs; sums in int32 take at most 133144"):
        quantise(np.ones((1, MOST_INPUTS + 1), np.float32))
