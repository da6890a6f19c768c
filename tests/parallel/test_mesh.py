"""Meshes by name and size, and what goes over which axis."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import specjax
from specjax.decoding import Parameters
from specjax.decoding.compose import compose
from specjax.models.decoder import Decoder
from specjax.models.products import Split
from specjax.parallel import (
    as_mesh,
    make_mesh,
    param_specs,
    parse_mesh,
    place_params,
    shard_functions,
    sizes_of,
    split_of,
    spread_round,
)
from specjax.parallel.rules import describe, local_config
from tests import hash_model as tiny
from tests.parallel.shared import CONFIG, decoder


@pytest.mark.parametrize(("text", "sizes"), [("data=4,model=2", (4, 2)), (" model = 8 ", (1, 8)), ("data=3", (3, 1))])
def test_sizes_as_text(text, sizes):
    assert parse_mesh(text) == sizes
    assert parse_mesh(str(parse_mesh(text))) == sizes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows=2", r"mesh is 'rows=2': there is no axis 'rows', the axes are data and model"),
        ("data=0", r"data is '0'; it must be like data=4,model=2, with whole numbers of at least 1"),
        ("data=two", r"data is 'two'"),
        ("data=-2", r"data is '-2'"),
        ("data=2,data=3", r"data is there twice"),
        ("4x2", r"mesh is '4x2'; it must be like"),
        ("", r"mesh is ''; it must be like"),
        (8, r"mesh is 8; it must be like"),
    ],
)
def test_text_that_is_no_mesh_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_mesh(text)


def test_a_mesh_of_some_devices():
    mesh = make_mesh(2, 3)
    assert (mesh.axis_names, sizes_of(mesh)) == (("data", "model"), (2, 3))
    # The devices that share a model are next to one another.
    assert [[device.id for device in row] for row in mesh.devices] == [[0, 1, 2], [3, 4, 5]]
    assert make_mesh(1, 2, jax.devices()[6:]).devices.tolist() == [jax.devices()[6:]]
    assert as_mesh("data=2,model=3") == mesh == as_mesh(mesh)
    assert as_mesh(None) is None


def test_meshes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"a mesh of data=3,model=4 takes 12 devices; there are 8"):
        make_mesh(3, 4)
    with pytest.raises(ValueError, match=r"data=1,model=2 takes 2 devices; there is 1"):
        make_mesh(1, 2, jax.devices()[:1])
    for sizes, message in (
        ((0, 1), "data is 0"),
        ((1, -1), "model is -1"),
        ((True, 1), "data is True"),
        ((1, 2.0), "model is 2.0"),
    ):
        with pytest.raises(ValueError, match=f"make_mesh: {message}; it must be a whole number of at least 1"):
            make_mesh(*sizes)
    with pytest.raises(ValueError, match=r"mesh has the axes \('x',\); they must be \('data', 'model'\)"):
        as_mesh(Mesh(np.array(jax.devices()), ("x",)))
    with pytest.raises(ValueError, match=r"mesh is 8; it must be made by"):
        as_mesh(8)


def test_specs_of_the_parameters():
    share = shard_functions(Decoder(CONFIG), 4)
    specs = param_specs(share)
    layer = specs["layers"][0]
    assert specs["embedding"] == PartitionSpec("model", None)
    assert layer["attention"]["qkv"] == PartitionSpec("model", None, None, None)
    assert layer["attention"]["out"] == PartitionSpec(None, "model")
    assert layer["mlp"]["gate_up"] == PartitionSpec(None, "model", None)
    assert layer["mlp"]["down"] == PartitionSpec(None, "model")
    assert specs["final_norm"]["scale"] == PartitionSpec(None)


def test_the_smollm2_heads_on_two_and_three():
    config = dataclasses.replace(CONFIG, num_query_heads=9, num_kv_heads=3, mlp_width=1536, vocab_size=49152)
    assert split_of(config, 1) == Split()
    assert split_of(config, 3) == Split("model", heads=True, mlp=True, vocab=True)
    local = local_config(config, 3)
    assert (local.num_query_heads, local.num_kv_heads, local.group_size) == (3, 1, 3)
    assert split_of(config, 2) == Split("model", heads=False, mlp=True, vocab=True)
    assert local_config(config, 2).num_query_heads == 9
    assert "all 3 key/value heads, which 2 does not divide" in describe(config, 2)


def test_a_file_is_read_into_shares():
    folder = Path(__file__).parents[1] / "golden" / "tiny-llama"
    whole, spread = (specjax.load_model(folder, dtype="float32", mesh=mesh) for mesh in (None, "data=2,model=2"))
    jax.tree.map(np.testing.assert_array_equal, whole.params, spread.params)
    gate_up = spread.params["layers"][0]["mlp"]["gate_up"]
    assert gate_up.sharding.spec == PartitionSpec(None, "model", None)
    width = whole.config.mlp_width
    assert {shard.data.shape for shard in gate_up.addressable_shards} == {(2, width // 2, whole.config.width)}
    # What is in place stays there.
    program = spread_round(compose(spread, None, "auto", greedy=True, allow_lossy=False).program, make_mesh(2, 2))
    placed = place_params(program, Parameters(spread.params)).target["layers"][0]["mlp"]["gate_up"]
    assert [s.data.unsafe_buffer_pointer() for s in placed.addressable_shards] == [
        s.data.unsafe_buffer_pointer() for s in gate_up.addressable_shards
    ]


def test_an_embedding_by_shares_of_the_vocabulary():
    """Ids in and outside the vocabulary are looked up as on one device."""
    matrix = jnp.asarray(np.random.default_rng(0).normal(size=(64, 4)), jnp.float32)
    tokens = jnp.array([[0, 15, 16, 63], [64, -1, 99, 31]])
    split, mesh = Split("model", vocab=True), make_mesh(1, 4)
    looked_up = jax.shard_map(
        split.embed, mesh=mesh, in_specs=(PartitionSpec("model"), PartitionSpec()), out_specs=PartitionSpec(), check_vma=False
    )
    np.testing.assert_array_equal(looked_up(matrix, tokens), Split().embed(matrix, tokens))


def test_a_model_that_is_no_decoder_is_not_split():
    assert shard_functions(tiny.HashModel(), 1) == tiny.HashModel()
    with pytest.raises(ValueError, match=r"mesh has model=2, and the target is a HashModel, not a Decoder"):
        shard_functions(tiny.HashModel(), 2)
    assert shard_functions(decoder().functions, 1) is not None
