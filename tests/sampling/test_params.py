import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.sampling import SamplingArrays, SamplingParams


@pytest.mark.parametrize("temperature", [0, 0.0, np.float32(0), np.float64(0.0), 1e-9, -0.0])
def test_temperatures_that_are_greedy(temperature):
    """Case 80."""
    params = SamplingParams(temperature=temperature)
    assert params.greedy
    assert SamplingArrays.stack([params], [0]).temperature.tolist() == [0.0]


def test_a_low_temperature_that_is_not_greedy():
    assert not SamplingParams(temperature=1e-4).greedy


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("temperature", -0.1, "a number of at least 0"),
        ("temperature", math.inf, "a number of at least 0"),
        ("temperature", math.nan, "a number of at least 0"),
        ("temperature", "1", "a number of at least 0"),
        ("temperature", True, "a number of at least 0"),
        ("temperature", None, "a number of at least 0"),
        ("top_k", -1, r"a whole number of at least 0 \(0 keeps all tokens\)"),
        ("top_k", 2.0, "a whole number of at least 0"),
        ("top_k", 2**31, "a whole number of at least 0"),
        ("top_k", True, "a whole number of at least 0"),
        ("top_p", 0, r"in \(0, 1\]"),
        ("top_p", 1.0001, r"in \(0, 1\]"),
        ("top_p", math.nan, r"in \(0, 1\]"),
        ("min_p", -0.01, r"in \[0, 1\]"),
        ("min_p", 1.5, r"in \[0, 1\]"),
        ("max_tokens", 0, "a whole number of at least 1"),
        ("max_tokens", 3.5, "a whole number of at least 1"),
        ("seed", -1, "None or a whole number from 0 to 18446744073709551615"),
        ("seed", 2**64, "None or a whole number from 0 to 18446744073709551615"),
        ("seed", 1.0, "None or a whole number from 0 to 18446744073709551615"),
        ("stop_token_ids", 5, "a sequence of token ids"),
        ("stop_token_ids", None, "a sequence of token ids"),
        ("stop_token_ids", "</s>", "a sequence of token ids"),
        ("stop_token_ids", (3, -1), "a sequence of token ids of at least 0"),
        ("stop_token_ids", (3, "4"), "a sequence of token ids of at least 0"),
        ("ignore_eos", 1, "True or False"),
        ("repetition_penalty", 0, "a number above 0"),
        ("repetition_penalty", -1.0, "a number above 0"),
        ("repetition_penalty", 1e-50, "a number above 0"),  # 0 in float32
        ("repetition_penalty", 1e39, "a number above 0"),
        ("repetition_penalty", math.nan, "a number above 0"),
        ("presence_penalty", 2.1, r"in \[-2, 2\]"),
        ("presence_penalty", math.nan, r"in \[-2, 2\]"),
        ("frequency_penalty", -math.inf, r"in \[-2, 2\]"),
        ("frequency_penalty", "0.5", r"in \[-2, 2\]"),
        ("min_tokens", -1, r"a whole number from 0 to max_tokens \(16\)"),
        ("min_tokens", 17, r"a whole number from 0 to max_tokens \(16\)"),
        ("min_tokens", True, "a whole number from 0"),
        ("logit_bias", [(1, 2.0)], "a dict from token ids of at least 0 to finite numbers or -inf"),
        ("logit_bias", {-1: 1.0}, "a dict .*; -1 is no token id"),
        ("logit_bias", {"5": 1.0}, "a dict .*; '5' is no token id"),
        ("logit_bias", {True: 1.0}, "a dict .*; True is no token id"),
        ("logit_bias", {5: math.inf}, "a dict .*; that of 5 is inf"),
        ("logit_bias", {5: math.nan}, "a dict .*; that of 5 is nan"),
        ("logit_bias", {5: 1e39}, r"a dict .*; that of 5 is 1e\+39"),
        ("logit_bias", {5: None}, "a dict .*; that of 5 is None"),
        ("include_stop_str_in_output", "yes", "True or False"),
        ("n", 0, "a whole number from 1 to 128"),
        ("n", 129, "a whole number from 1 to 128"),
        ("n", True, "a whole number from 1 to 128"),
        ("logprobs", -1, "None or a whole number from 0 to 20"),
        ("logprobs", 21, "None or a whole number from 0 to 20"),
        ("logprobs", True, "None or a whole number from 0 to 20"),
        ("logprobs", 1.0, "None or a whole number from 0 to 20"),
        ("stop", "", "None, a string or a sequence of strings, none of them empty"),
        ("stop", ["a", ""], "None, a string or a sequence of strings"),
        ("stop", ["a", 3], "None, a string or a sequence of strings"),
        ("stop", b"ab", "None, a string or a sequence of strings"),
        ("stop", 5, "None, a string or a sequence of strings"),
    ],
)
def test_wrong_values_are_named(name, value, right):
    with pytest.raises(ValueError, match=f"SamplingParams: {name} is .*; it must be {right}") as raised:
        SamplingParams(**{name: value})
    assert repr(value) in str(raised.value)


def test_unknown_options_are_refused():
    """Case 92."""
    with pytest.raises(TypeError, match="length_penalty"):
        SamplingParams(length_penalty=1.0)


def test_every_option_has_a_test_or_is_honoured():
    """Case 86: a new option must be honoured, or be refused."""
    honoured = {"temperature", "top_k", "top_p", "min_p", "max_tokens", "seed", "stop_token_ids", "ignore_eos"}
    honoured |= {"repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens"}
    honoured |= {"n", "stop", "include_stop_str_in_output", "logprobs"}
    assert {field.name for field in dataclasses.fields(SamplingParams)} == honoured


def test_values_are_stored_as_python_numbers():
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), seed=np.uint64(2**64 - 1), stop_token_ids=np.array([4, 2])
    )
    assert (params.temperature, params.top_k, params.seed, params.stop_token_ids) == (0.5, 3, 2**64 - 1, (4, 2))
    assert {type(params.temperature), type(params.top_k), type(params.seed)} == {float, int}


def test_ids_from_an_iterator_are_not_lost():
    assert SamplingParams(stop_token_ids=iter([7, 8])).stop_token_ids == (7, 8)


def test_biases_are_copied():
    given = {np.int64(3): -math.inf, 0: np.float32(2)}
    params = SamplingParams(logit_bias=given)
    given[4] = 1.0
    assert params.logit_bias == {3: -math.inf, 0: 2.0}
    assert hash(params) == hash(SamplingParams(logit_bias={3: -math.inf, 0: 2.0}))


def test_stack_of_biases():
    rows = [SamplingParams(), SamplingParams(logit_bias={3: -math.inf, 0: 2}), SamplingParams(min_tokens=4)]
    arrays = SamplingArrays.stack(rows, [0] * 3)
    assert arrays.bias_ids.tolist() == [[-1] * 8, [3, 0] + [-1] * 6, [-1] * 8]
    assert arrays.biases.tolist() == [[0] * 8, [-math.inf, 2] + [0] * 6, [0] * 8]
    assert arrays.min_tokens.tolist() == [0, 0, 4]
    many = SamplingParams(logit_bias=dict.fromkeys(range(9), 1.0))
    assert SamplingArrays.stack([many], [0]).bias_ids.shape == (1, 16)


@pytest.mark.parametrize(("given", "kept"), [(None, ()), ([], ()), ("ab", ("ab",)), (["a", "bc"], ("a", "bc")), (("a",), ("a",))])
def test_stop_strings_are_kept_as_a_tuple(given, kept):
    params = SamplingParams(stop=given)
    assert params.stop == kept
    assert dataclasses.replace(params, top_k=1).stop == kept


def test_stack():
    arrays = SamplingArrays.stack(
        [
            SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1),
            SamplingParams(temperature=0, top_k=7),
            SamplingParams(),
        ],
        seeds=[1, 2**64 - 1, 2**32],
    )
    assert arrays.temperature.tolist() == [0.5, 0.0, 1.0]
    assert arrays.top_k.tolist() == [3, 7, 0]
    np.testing.assert_array_equal(arrays.top_p, np.float32([0.9, 1.0, 1.0]))
    np.testing.assert_array_equal(arrays.min_p, np.float32([0.1, 0.0, 0.0]))
    assert arrays.seeds.tolist() == [[0, 1], [2**32 - 1, 2**32 - 1], [1, 0]]
    assert arrays.completion.tolist() == [0, 0, 0]
    dtypes = [arrays.temperature.dtype, arrays.top_k.dtype, arrays.seeds.dtype, arrays.completion.dtype]
    assert dtypes == [jnp.float32, jnp.int32, jnp.uint32, jnp.int32]
