"""``dtype="int8"`` from every kind of source: the same bits as quantising what the source holds."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.convert import convert
from specjax.checkpoints.load import load_model
from specjax.checkpoints.model_folder import save_model
from specjax.models.int8_model import quantise_model
from specjax.models.quantised import is_quantised, quantise
from tests.checkpoints import tiny

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny.write_folder(tmp_path_factory.mktemp("folder") / "model", tiny.hf_config(), tiny.hf_tensors())


@pytest.fixture(scope="module")
def converted(llama, tmp_path_factory):
    return convert(llama, tmp_path_factory.mktemp("converted") / "model", dtype="int8")


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma3", "tiny-qwen3-moe", "tiny-phi3"])
def test_from_folders_of_several_families(name):
    model, expected = load_model(GOLDEN / name, dtype="int8"), quantise_model(load_model(GOLDEN / name, dtype="float32"))
    assert (model.dtype, model.dtype_reason, model.config) == (jnp.int8, "asked for", expected.config)
    assert model.config.int8_stream == "float32"
    assert tiny.same(model.params, expected.params)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model.params))


def test_no_more_than_a_layer_is_held_in_floats(monkeypatch, llama):
    """Each layer is quantised before it is put on its device and the next one is read."""
    put, kinds = jax.device_put, []

    def watched(tree, *rest):
        kinds.append({leaf.dtype.name: leaf.size for leaf in jax.tree.leaves(tree)})
        return put(tree, *rest)

    monkeypatch.setattr("specjax.checkpoints.fuse.jax.device_put", watched)
    model = load_model(llama, dtype="int8")
    assert len(kinds) == model.config.num_layers + 3
    assert sum("int8" in kind for kind in kinds) == model.config.num_layers + 2
    assert max(kind.get("float32", 0) for kind in kinds) < model.config.mlp_width * 2


def test_a_converted_folder_changes_no_bit(llama, converted):
    source, model = load_model(llama, dtype="int8"), load_model(converted)
    assert tiny.same(source.params, model.params)
    assert (model.dtype_reason, model.config) == ("as the folder has it", source.config)
    with pytest.raises(ValueError, match=r"specjax_model.json: dtype is int8, and float32 is asked for; what was rounded away"):
        load_model(converted, dtype="float32")


def test_a_folder_of_floats_is_quantised_as_it_is_read(llama, tmp_path):
    folder = convert(llama, tmp_path / "floats", dtype="float32")
    for mesh in (None, "data=2,model=2"):
        expected, model = load_model(llama, dtype="int8", mesh=mesh), load_model(folder, dtype="int8", mesh=mesh)
        assert tiny.same(expected.params, model.params)
        for one, two in zip(jax.tree.leaves(expected.params), jax.tree.leaves(model.params), strict=True):
            assert one.sharding.is_equivalent_to(two.sharding, one.ndim)


def test_what_is_between_the_products_is_chosen_where_it_runs(llama, tmp_path):
    """A folder that was written for bfloat16 in between runs in float32 on a CPU, from the same whole numbers."""
    elsewhere = quantise_model(load_model(llama, dtype="float32"), "bfloat16")
    model = load_model(save_model(elsewhere, tmp_path / "model"))
    assert model.config.int8_stream == "float32"
    assert model.init_cache(1, 4).keys[0].dtype == jnp.float32
    assert tiny.same([m.values for m in _matrices(elsewhere)], [m.values for m in _matrices(model)])
    assert {m.dtype.name for m in _matrices(model)} == {"float32"}


def _matrices(model):
    return [leaf for leaf in jax.tree.leaves(model.params, is_leaf=is_quantised) if is_quantised(leaf)]


def test_each_device_of_a_mesh_has_its_share(llama, converted):
    whole = load_model(llama, dtype="int8")
    for source in (llama, converted):
        spread = load_model(source, dtype="int8", mesh="data=2,model=2")
        assert tiny.same(whole.params, spread.params)
        layer = spread.params["layers"][0]
        gate_up, out = layer["mlp"]["gate_up"], layer["attention"]["out"]
        assert {shard.data.shape for shard in gate_up.scale.addressable_shards} == {(2, whole.config.mlp_width // 2)}
        inputs = whole.config.num_query_heads * whole.config.head_dim
        assert {shard.data.shape[1] for shard in out.values.addressable_shards} == {inputs // 2}
        assert out.scale.sharding.is_fully_replicated


def test_a_gguf_file(tmp_path):
    tensors = tiny.hf_tensors()
    folder = tiny.write_folder(tmp_path / "model", tiny.hf_config(), tensors)
    file = tiny.write_gguf(tmp_path / "model.gguf", tiny.gguf_tensors(tensors))
    assert tiny.same(load_model(file, dtype="int8").params, load_model(folder, dtype="int8").params)


def test_options_that_do_not_go_together(llama):
    with pytest.raises(ValueError, match=r"product_parts is 8; with dtype 'int8', whose sums are exact, it must be 1"):
        load_model(llama, dtype="int8", product_parts=8)
    with pytest.raises(ValueError, match=r"dtype is 'int4'; it must be float32, bfloat16, float16, int8 or None"):
        load_model(llama, dtype="int4")


def test_dtypes_by_their_types(llama):
    assert load_model(llama, dtype=jnp.int8).config == load_model(llama, dtype="int8").config
    assert (
        dataclasses.replace(load_model(llama, dtype=np.dtype("int8")).config, int8_stream=None)
        == load_model(llama, dtype="float32").config
    )
    assert quantise(np.ones((2, 2), np.float32)).values.dtype == np.int8
