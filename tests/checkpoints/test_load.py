import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints import load as load_module
from specjax.checkpoints.load import load_model
from tests.checkpoints import tiny


@pytest.fixture
def gguf_path(tmp_path):
    """40 ids in the embedding, no tokenizer."""
    return tiny.write_gguf(tmp_path / "tiny.gguf", tiny.gguf_tensors(tiny.hf_tensors()))


@pytest.fixture
def folder(tmp_path):
    """38 ids in the tokenizer, 40 in the embedding."""
    folder = tiny.write_folder(tmp_path / "tiny-model", tiny.hf_config(eos_token_id=2), tiny.hf_tensors())
    tiny.word_tokenizer([f"w{id}" for id in range(38)]).save(str(folder / "tokenizer.json"))
    return folder


def run(model, tokens):
    """Logits and features of one row."""
    tokens = jnp.array([tokens])

    def forward(params):
        output = model.apply(params, tokens, jnp.arange(tokens.shape[1])[None], model.init_cache(1, 8))
        return model.unembed(params, output.hidden), output.features

    return jax.jit(forward)(model.params)


def test_gguf(gguf_path):
    model = load_model(gguf_path, dtype="float32")
    assert (model.name, model.vocab_size, model.max_positions, model.tokenizer) == ("tiny", 40, 64, None)
    assert model.dtype == jnp.float32
    assert model.dtype_reason == "asked for"
    assert load_model(str(gguf_path), dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_folder(folder):
    model = load_model(folder, dtype="float32")
    assert (model.name, model.vocab_size, model.config.vocab_size, model.stop_token_ids) == ("tiny-model", 38, 40, (2,))
    logits, features = run(model, model.tokenizer.encode("w1 w2"))
    assert (logits.shape, features.shape) == ((1, 2, 40), (1, 2, 0, 32))


def test_gguf_and_folder_compute_the_same(gguf_path, folder):
    logits = [run(load_model(path, dtype="float32"), [3, 1, 4, 1, 5])[0] for path in (gguf_path, folder)]
    np.testing.assert_array_equal(*logits)


def test_dtype_is_chosen_where_none_is_given(gguf_path, monkeypatch):
    chooser = types.SimpleNamespace(choose_dtype=lambda: ("bfloat16", "measured"))
    monkeypatch.setitem(sys.modules, "specjax.models.dtype", chooser)
    model = load_model(gguf_path)
    assert (model.dtype, model.dtype_reason) == (jnp.bfloat16, "measured")


def test_sums_in_parts(gguf_path):
    assert load_model(gguf_path, dtype="float32", product_parts=8).config.product_parts == 8
    with pytest.raises(ValueError, match="load_model: product_parts is 0; it must be a whole number of at least 1"):
        load_model("no-such-model", product_parts=0)


def test_feature_layers(gguf_path):
    model = load_model(gguf_path, dtype="float32", feature_layers=[0, 2])
    assert run(model, [1])[1].shape == (1, 1, 2, 32)
    with pytest.raises(ValueError, match="feature_layers holds 3"):
        load_model(gguf_path, dtype="float32", feature_layers=[3])


def test_card_is_pulled(gguf_path, monkeypatch, capsys):
    def pull(name, progress):
        progress(f"downloading {name}")
        return gguf_path

    monkeypatch.setattr(load_module, "pull", pull)
    model = load_model("smollm2-135m-instruct", dtype="float32")
    assert (model.name, model.card.licence) == ("smollm2-135m-instruct", "Apache-2.0")
    assert capsys.readouterr() == ("", "downloading smollm2-135m-instruct\n")


FORMS = "A source is a model's name, a .gguf file, a folder with config.json and safetensors, or a hub id like org/name."


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("smollm2-135m", r"no model is called 'smollm2-135m'; did you mean 'smollm2-135m-instruct'\? Known: .*" + FORMS),
        ("zzz", f"no model is called 'zzz'. Known: .*{FORMS}"),
        ("missing.gguf", f"missing.gguf: there is no such file or folder. {FORMS}"),
        ("./missing", "./missing: there is no such file or folder"),
        ("/missing/folder", "/missing/folder: there is no such file or folder"),
        ("", "source is ''; it must be"),
        (7, "source is 7; it must be"),
    ],
)
def test_unknown_source(source, match):
    with pytest.raises(ValueError, match=match):
        load_model(source, dtype="float32")


@pytest.mark.parametrize("dtype", ["float64", "int4", "half-ish", 3])
def test_dtype_that_is_not_offered(gguf_path, dtype):
    with pytest.raises(ValueError, match=r"dtype is .*; it must be float32, bfloat16, float16, int8 or None"):
        load_model(gguf_path, dtype=dtype)


def test_folder_without_a_model(tmp_path):
    with pytest.raises(ValueError, match=r"there is no config.json in this folder"):
        load_model(tmp_path, dtype="float32")
    (tmp_path / "_CHECKPOINT_METADATA").touch()
    with pytest.raises(ValueError, match=r"looks like an Orbax checkpoint, .* there is no specjax_model.json"):
        load_model(tmp_path, dtype="float32")


def test_file_that_is_no_model(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(ValueError, match=r"notes.txt: not a GGUF file"):
        load_model(path, dtype="float32")


def test_tokenizer_larger_than_embedding(folder):
    tiny.word_tokenizer([f"w{id}" for id in range(41)]).save(str(folder / "tokenizer.json"))
    with pytest.raises(ValueError, match="the tokenizer has 41 ids, the embedding 40 rows"):
        load_model(folder, dtype="float32")


def test_stop_id_outside_the_vocabulary(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 39]}))
    with pytest.raises(ValueError, match="stop id 39 is outside the vocabulary, 0 to 37"):
        load_model(folder, dtype="float32")


@pytest.mark.default_model
def test_default_model(smollm2_path):
    model = load_model("smollm2-135m-instruct", dtype="float32")
    assert (model.vocab_size, model.max_positions, model.stop_token_ids) == (49152, 8192, (2, 0))
    assert model.card.publisher == "HuggingFaceTB"
    text = "<|im_start|>user\nHi 12<|im_end|>"
    assert model.tokenizer.decode(model.tokenizer.encode(text), skip_special_tokens=False) == text
    assert model.tokenizer.encode_chat([{"role": "user", "content": "Hi"}])[:3] == [1, 9690, 198]
