"""Models in folders of the library's own."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import pytest

from specjax.checkpoints.convert import convert
from specjax.checkpoints.load import load_model
from specjax.checkpoints.model_folder import save_model
from specjax.cli import main
from specjax.models.shallow import layer_of
from tests.checkpoints import tiny

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder in bfloat16, but for the norms' scales."""
    tensors = tiny.hf_tensors()
    folder = tiny.write_folder(
        tmp_path_factory.mktemp("source") / "tiny-llama",
        tiny.hf_config(),
        {name: tensor.astype(jnp.bfloat16) for name, tensor in tensors.items()},
        generation_config={"eos_token_id": [2, 7]},
        tokenizer_config={"eos_token": "w2", "chat_template": "{{ messages[0].content }}", "pad_token": "w3"},
    )
    tiny.word_tokenizer([f"w{id}" for id in range(38)]).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def converted(llama, tmp_path_factory):
    return convert(llama, tmp_path_factory.mktemp("converted") / "model")


@pytest.fixture
def copy(converted, tmp_path):
    return pathlib.Path(shutil.copytree(converted, tmp_path / "copy"))


def test_a_round_trip_changes_no_bit(llama, converted):
    source, model = load_model(llama, dtype="bfloat16"), load_model(converted)
    assert tiny.same(source.params, model.params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {"bfloat16", "float32"}
    assert (model.name, model.dtype_reason, model.config) == ("model", "as the folder has it", source.config)
    assert (model.stop_token_ids, model.vocab_size, model.max_positions) == ((2, 7), 38, 64)
    ours, theirs = model.tokenizer, source.tokenizer
    ours.check_same(theirs)
    for name in ("bos_token", "eos_token", "chat_template", "special_tokens"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.encode_chat([{"role": "user", "content": "w4 w5"}]) == [4, 5]


@pytest.mark.parametrize("name", ["tiny-gemma3", "tiny-qwen3-moe"])
def test_other_families(name, tmp_path):
    """Local ropes and windows, scaled ropes, and experts are written too."""
    model = load_model(convert(GOLDEN / name, tmp_path / "model", dtype="float32"))
    source = load_model(GOLDEN / name, dtype="float32")
    assert (model.config, model.tokenizer, model.stop_token_ids) == (source.config, None, source.stop_token_ids)
    assert tiny.same(source.params, model.params)


def test_other_dtypes_are_those_of_the_source_rounded_once(llama, converted, tmp_path):
    assert tiny.same(load_model(converted, dtype="float32").params, load_model(llama, dtype="float32").params)
    wide = tiny.write_folder(tmp_path / "wide", tiny.hf_config(), tiny.hf_tensors())
    folder = convert(wide, tmp_path / "folder")
    assert load_model(folder).dtype == jnp.float32
    for dtype in ("bfloat16", "float16"):
        assert tiny.same(load_model(folder, dtype=dtype).params, load_model(wide, dtype=dtype).params)


def test_onto_a_mesh(llama, converted):
    expected = load_model(llama, dtype="bfloat16", mesh="data=2,model=2")
    model = load_model(converted, mesh="data=2,model=2")
    assert tiny.same(expected.params, model.params)
    for one, two in zip(jax.tree.leaves(expected.params), jax.tree.leaves(model.params), strict=True):
        assert one.sharding.is_equivalent_to(two.sharding, one.ndim)
    assert not model.params["layers"][0]["mlp"]["down"].sharding.is_fully_replicated


def test_from_a_mesh_to_one_device(llama, tmp_path):
    spread = load_model(llama, dtype="bfloat16", mesh="model=2")
    model = load_model(save_model(spread, tmp_path / "model"))
    assert tiny.same(spread.params, model.params)
    assert len(model.params["embedding"].sharding.device_set) == 1


def test_a_folder_that_is_there_is_not_touched(llama, tmp_path):
    (tmp_path / "notes").mkdir()
    with pytest.raises(ValueError, match=r"notes exists already; name a new folder"):
        convert(llama, tmp_path / "notes")
    assert not list((tmp_path / "notes").iterdir())


def test_only_decoders_are_written(llama, tmp_path):
    model = dataclasses.replace(load_model(llama, dtype="bfloat16"), functions=object())
    with pytest.raises(ValueError, match="functions are a object; only models that load_model loaded are written"):
        save_model(model, tmp_path / "model")


def test_every_damaged_file_is_named(copy):
    files = [path for path in sorted(copy.rglob("*")) if path.is_file() and path.name != "specjax_model.json"]
    assert copy / "tokenizer.json" in files
    for path in files:
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if whole else b"x")
        with pytest.raises(ValueError, match=rf"{path}: damaged or cut short: its SHA-256"):
            load_model(copy)
        path.unlink()
        with pytest.raises(ValueError, match=rf"{path}: the file is missing"):
            load_model(copy)
        path.write_bytes(whole)
    (copy / "params" / "more").touch()
    with pytest.raises(ValueError, match=r"params/more: the card knows no such file"):
        load_model(copy)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": 2}, "format is 2; this version reads 1"),
        ({"config": {}}, "config or dtype is damaged"),
        ({"dtype": "half-ish"}, "dtype is 'half-ish'; it must be"),
        ({"dtype": "float16"}, r"is bfloat16\[.*; the card says float16"),
        ({"files": None}, "files is None; it must be an object"),
        ({"tokenizer": {}}, "tokenizer is damaged: 'sha256'"),
        ({"stop_token_ids": [38]}, "stop id 38 is outside the vocabulary, 0 to 37"),
        ({"stop_token_ids": 3}, "stop_token_ids is 3; it must be a list of ids"),
    ],
)
def test_damaged_cards(copy, change, match):
    path = copy / "specjax_model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=match):
        load_model(copy)


def test_on_the_command_line(llama, tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["convert", str(llama), str(tmp_path / "model"), "--dtype", "float16", "--scan-layers"])
    assert capsys.readouterr().out == f"{tmp_path / 'model'}\n"
    model = load_model(tmp_path / "model")
    assert (model.dtype, model.config.scan_layers) == (jnp.float16, True)
    with pytest.raises(SystemExit, match=r"^1$"):
        main(["convert", str(llama), str(tmp_path / "model")])
    assert capsys.readouterr().err.endswith("exists already; name a new folder\n")


@pytest.mark.parametrize("mesh", [None, "model=2"])
def test_inputs_that_were_written_as_several_axes(llama, tmp_path, mesh):
    """As earlier versions wrote the output product of attention."""
    model = load_model(llama, dtype="bfloat16")
    config = model.config
    heads = (config.width, config.num_kv_heads, config.group_size, config.head_dim)
    layers = {
        index: layer | {"attention": layer["attention"] | {"out": layer["attention"]["out"].reshape(heads)}}
        for index, layer in model.params["layers"].items()
    }
    earlier = dataclasses.replace(model, params=model.params | {"layers": layers})
    loaded = load_model(save_model(earlier, tmp_path / "model"), mesh=mesh)
    assert tiny.same(loaded.params, model.params)
    expected = load_model(llama, dtype="bfloat16", mesh=mesh)
    for one, two in zip(jax.tree.leaves(expected.params), jax.tree.leaves(loaded.params), strict=True):
        assert one.sharding.is_equivalent_to(two.sharding, one.ndim)


@pytest.mark.parametrize("mesh", [None, "data=2,model=2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_scanned_layers(llama, tmp_path, mesh, dtype):
    """Stacked as they are read and in a folder, on every device its share, they are those of the source."""
    expected = load_model(llama, dtype=dtype)
    model = load_model(llama, dtype=dtype, mesh=mesh, scan_layers=True)
    assert model.config == dataclasses.replace(expected.config, scan_layers=True)
    for layer in range(expected.config.num_layers):
        assert tiny.same(layer_of(model, layer), expected.params["layers"][layer])
    folder = convert(llama, tmp_path / "model", dtype=dtype, scan_layers=True)
    loaded = load_model(folder, mesh=mesh)
    assert loaded.config == model.config
    assert tiny.same(loaded.params, model.params)
    for one, two in zip(jax.tree.leaves(model.params), jax.tree.leaves(loaded.params), strict=True):
        assert one.sharding.is_equivalent_to(two.sharding, one.ndim)
    with pytest.raises(ValueError, match="scan_layers is False, and the folder was written with True"):
        load_model(folder, scan_layers=False)
    with pytest.raises(ValueError, match="scan_layers is 1; it must be True, False or None"):
        load_model(llama, scan_layers=1)
