"""An int8 target over a mesh: products that are split over devices add up whole numbers, and are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from specjax.drafters import draft_model
from specjax.models.products import contract
from specjax.models.quantised import QuantisedMatrix, quantise
from specjax.models.shallow import keep_layers
from specjax.parallel import make_mesh
from specjax.parallel.rules import param_specs
from specjax.parallel.sharded_decoder import shard_functions
from tests.parallel.shared import decoder, run_all, started


def test_specs_of_matrices_and_their_scales():
    specs = param_specs(shard_functions(decoder(int8_stream="bfloat16").functions, 4))["layers"][0]
    dtype = jnp.dtype("bfloat16")
    qkv = PartitionSpec("model", None, None, None), PartitionSpec("model", None, None)
    assert specs["attention"]["qkv"] == QuantisedMatrix(*qkv, dtype)
    assert specs["attention"]["out"] == QuantisedMatrix(PartitionSpec(None, "model"), PartitionSpec(None), dtype)
    assert specs["mlp"]["gate_up"] == QuantisedMatrix(PartitionSpec(None, "model", None), PartitionSpec(None, "model"), dtype)
    assert specs["mlp"]["down"] == QuantisedMatrix(PartitionSpec(None, "model"), PartitionSpec(None), dtype)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_product_over_split_inputs_is_that_of_one_device(devices):
    """To the last bit: every device rounds by the step of the whole row."""
    weight = quantise(np.random.default_rng(0).normal(size=(12, 64)).astype(np.float32))
    # The largest of a row is on one device, and the others' parts are small.
    inputs = np.random.default_rng(1).normal(size=(5, 64)).astype(np.float32) * np.exp(np.arange(64) / 12, dtype=np.float32)
    columns = PartitionSpec(None, "model")
    product = jax.shard_map(
        lambda inputs, weight: contract(inputs, weight, over="model"),
        mesh=make_mesh(1, devices),
        in_specs=(columns, QuantisedMatrix(columns, PartitionSpec(), weight.dtype)),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(product)(inputs, weight), jax.jit(contract)(inputs, weight))


def test_tokens_are_those_of_one_device():
    target = decoder(num_layers=2, int8_stream="float32")
    drafter = draft_model(keep_layers(target, [0]), 2)
    alone, *_ = run_all(*started(target, None, None, rule="gumbel")[1:])
    spread, *_ = run_all(*started(target, drafter, (2, 4), rule="gumbel")[1:])
    assert spread == alone
