import json

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from specjax.checkpoints.folder_config import FAMILIES, read_config
from specjax.checkpoints.gguf import load_gguf_params
from specjax.checkpoints.gguf import read_config as read_gguf_config
from specjax.checkpoints.gguf_file import GGUFFile
from specjax.checkpoints.safetensors import SafetensorsFolder, load_safetensors_params, stop_token_ids
from specjax.checkpoints.tokenizer import Tokenizer
from specjax.models.config import LinearRopeScaling, Llama3RopeScaling, YarnRopeScaling
from specjax.models.decoder import Decoder
from tests.checkpoints import tiny


def load(folder, dtype="float32"):
    reader = SafetensorsFolder(folder)
    return load_safetensors_params(reader, *read_config(folder, reader.shapes()), dtype)


def write(tmp_path, config=None, tensors=None, **files):
    return tiny.write_folder(tmp_path / "model", config or tiny.hf_config(), tensors or tiny.hf_tensors(), **files)


def refused(folder, match):
    with pytest.raises(ValueError, match=match) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_same_parameters_as_from_gguf(tmp_path, kind):
    tensors = tiny.hf_tensors(bias=kind == "qwen2")
    config, params = load(write(tmp_path, tiny.hf_config(kind), tensors))
    file = GGUFFile(tiny.write_gguf(tmp_path / "model.gguf", tiny.gguf_tensors(tensors, kind), kind))
    gguf_config, architecture = read_gguf_config(file)
    assert gguf_config == config
    other = load_gguf_params(file, gguf_config, architecture, "float32")
    jax.tree.map(np.testing.assert_array_equal, params, other)


def test_heads_and_halves_lie_where_the_decoder_reads_them(tmp_path):
    tensors = tiny.hf_tensors()
    config, params = load(write(tmp_path, tensors=tensors))
    wanted = Decoder(config).abstract_params()
    assert jax.tree.structure(params) == jax.tree.structure(wanted)
    layer, name = params["layers"][1], "model.layers.1."
    query = tensors[f"{name}self_attn.q_proj.weight"]
    # Query head 3 is the second of key head 1.
    np.testing.assert_array_equal(layer["attention"]["qkv"][1, 1], query[3 * 8 : 4 * 8])
    np.testing.assert_array_equal(layer["attention"]["qkv"][1, 2], tensors[f"{name}self_attn.k_proj.weight"][8:])
    np.testing.assert_array_equal(layer["attention"]["qkv"][0, 3], tensors[f"{name}self_attn.v_proj.weight"][:8])
    np.testing.assert_array_equal(layer["attention"]["out"], tensors[f"{name}self_attn.o_proj.weight"])
    np.testing.assert_array_equal(layer["mlp"]["gate_up"][1], tensors[f"{name}mlp.up_proj.weight"])


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_small_and_large(tmp_path, stored, dtype):
    """The embedding is made larger than 1 MB; half-precision tensors of any size are numbers, not raw bytes."""
    tensors = tiny.hf_tensors()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.random.default_rng(1).normal(size=(20_000, 32)).astype(np.float32)
    tensors = {name: tensor.astype(stored) for name, tensor in tensors.items()}
    _, params = load(write(tmp_path, tiny.hf_config(vocab_size=20_000), tensors), dtype)
    np.testing.assert_array_equal(params["embedding"], tensors["model.embed_tokens.weight"].astype(dtype))
    down = tensors["model.layers.0.mlp.down_proj.weight"].astype(dtype)
    np.testing.assert_array_equal(params["layers"][0]["mlp"]["down"], down)
    assert params["final_norm"]["scale"].dtype == np.float32


def test_sharded(tmp_path):
    tensors = tiny.hf_tensors()
    _, whole = load(write(tmp_path, tensors=tensors))
    folder = tmp_path / "model"
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"one.safetensors": names[:9], "two.safetensors": names[9:]}
    for file, part in parts.items():
        safetensors.numpy.save_file({name: tensors[name] for name in part}, folder / file)
    places = {name: file for file, part in parts.items() for name in part}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    jax.tree.map(np.testing.assert_array_equal, load(folder)[1], whole)

    index.write_text(json.dumps({"weight_map": places | {names[0]: "two.safetensors"}}))
    refused(folder, rf"one.safetensors: has tensor '{names[0]}', which .* places in 'two.safetensors'")
    index.write_text(json.dumps({"weight_map": places | {names[0]: "three.safetensors"}}))
    refused(folder, "weight_map names 'three.safetensors', which is not a file")
    index.write_text(json.dumps({"weight_map": places | {names[0]: "../model/one.safetensors"}}))
    refused(folder, "which is not a file in this folder")
    index.write_text("{}")
    refused(folder, "weight_map is missing or empty")


def test_tied(tmp_path):
    config, params = load(write(tmp_path, tiny.hf_config(tie_word_embeddings=True), tiny.hf_tensors(head=False)))
    assert config.tied_embedding
    assert "unembedding" not in params


def test_tied_with_equal_head(tmp_path):
    tensors = tiny.hf_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    config, params = load(write(tmp_path, tiny.hf_config(tie_word_embeddings=True), tensors))
    assert config.tied_embedding
    assert "unembedding" not in params


def test_tied_with_another_head_uses_it(tmp_path):
    tensors = tiny.hf_tensors()
    config, params = load(write(tmp_path, tiny.hf_config(tie_word_embeddings=True), tensors))
    assert not config.tied_embedding
    np.testing.assert_array_equal(params["unembedding"], tensors["lm_head.weight"])


def test_untied_without_head(tmp_path):
    folder = write(tmp_path, tensors=tiny.hf_tensors(head=False))
    refused(folder, "tie_word_embeddings is false, but the folder has no tensor 'lm_head.weight'")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"attention_bias": True}, "attention_bias is True; supported: False"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling has rope_type 'dynamic'; supported: 'default', 'linear'",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "has rope_type 'longrope'; supported: .*'llama3', 'yarn'",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_parameters.factor is None; it must be a number"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}},
            "rope_scaling.mscale is 0.7; supported: for 'yarn': factor",
        ),
        (
            {"rope_parameters": {"chunked_attention": {}}},
            "rope_parameters.chunked_attention is {}; supported: for 'default': no ",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor is None; it must be a number"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor is 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is .*awq.*; supported: none"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window is None; layer_types has layers that need"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries; num_hidden_layers is 2"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'; supported: 'full_attention', 'sliding_"),
        ({"num_experts": 8}, "num_experts is 8; this field is not known for llama, so it cannot be honoured"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; this field is not known for llama"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is .*; supported for llama: LlamaForCausalLM"),
        ({"model_type": "mamba"}, f"model_type is 'mamba'; supported: {', '.join(FAMILIES)}"),
        ({"hidden_size": None}, "hidden_size is None; it must be an integer"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None; it must be a number"),
        ({"num_key_value_heads": 3}, "num_query_heads is 4"),
        ({"intermediate_size": 65}, r"gate_proj.weight' has shape \(64, 32\); the configuration asks for \(65, 32\)"),
    ],
)
def test_option_that_cannot_be_honoured(tmp_path, changes, match):
    refused(write(tmp_path, tiny.hf_config(**changes)), match)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
        {"layer_types": ["full_attention"] * 2, "sliding_window": 16},
        {"rope_scaling": {"type": "default"}},
        {"torch_dtype": "bfloat16", "attention_dropout": 0.1, "pretraining_tp": 1},
    ],
)
def test_options_that_change_nothing(tmp_path, changes):
    assert load(write(tmp_path, tiny.hf_config(**changes)))[0] == load(write(tmp_path))[0]


@pytest.mark.parametrize(
    ("changes", "window", "local"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16}, 16, (1,)),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, 16, (1,)),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, 16, (0, 1)),
    ],
)
def test_windows(tmp_path, changes, window, local):
    config, _ = load(write(tmp_path, tiny.hf_config(**changes)))
    assert (config.window, config.local_layers, config.local_rope) == (window, local, None)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(tmp_path, kind):
    given = {"type": kind, "factor": 4.0} | ({"beta_fast": 8} if kind == "yarn" else {})
    config, _ = load(write(tmp_path, tiny.hf_config(rope_scaling=given)))
    # Where a file does not say how far the model was trained, it is max_position_embeddings.
    wanted = LinearRopeScaling(4.0) if kind == "linear" else YarnRopeScaling(4.0, 64, beta_fast=8)
    assert config.rope.scaling == wanted


def test_defaults_of_absent_fields(tmp_path):
    config, _ = read_config(
        write(tmp_path, tiny.hf_config(num_key_value_heads=None, head_dim=None, rope_theta=None)), {"lm_head.weight": (40, 32)}
    )
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (4, 8, 10_000.0)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_llama3_rope(tmp_path, spelling):
    """transformers 4 writes rope_theta and rope_scaling, 5 rope_parameters with the base inside."""
    options = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    options["original_max_position_embeddings"] = 8192
    if spelling == "rope_scaling":
        changes = {"rope_theta": 5e5, "rope_scaling": options}
    else:
        changes = {"rope_theta": None, "rope_parameters": options | {"rope_theta": 5e5}}
    config, _ = load(write(tmp_path, tiny.hf_config(**changes)))
    assert config.rope.theta == 5e5
    assert config.rope.scaling == Llama3RopeScaling(32.0, 1.0, 4.0, 8192)


def test_old_rotary_buffers_are_left_alone(tmp_path):
    tensors = tiny.hf_tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    load(write(tmp_path, tensors=tensors))


def test_leftover_and_missing_tensors(tmp_path):
    tensors = tiny.hf_tensors()
    refused(write(tmp_path, tensors=tensors | {"extra": np.ones(3, np.float32)}), r"the first is 'extra' of shape \(3,\)")
    del tensors["model.norm.weight"]
    refused(write(tmp_path, tensors=tensors), r"'model.norm.weight' of shape \(32,\) is missing")


def test_integer_tensor(tmp_path):
    tensors = tiny.hf_tensors()
    tensors["model.norm.weight"] = np.ones(32, np.int8)
    refused(write(tmp_path, tensors=tensors), "'model.norm.weight' has type I8; supported: F32")


def test_damaged_files(tmp_path):
    folder = write(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    refused(folder, "truncated or damaged safetensors file")
    weights.unlink()
    refused(folder, "neither model.safetensors nor model.safetensors.index.json")
    folder = write(tmp_path)
    (folder / "config.json").write_text('{"model_type": "lla')
    refused(folder, "config.json: truncated or damaged JSON")
    (folder / "config.json").write_text("[]")
    refused(folder, "config.json: holds list; it must be an object")


def test_stop_ids_of_generation_config_and_tokenizer(tmp_path):
    """The end-of-turn id stands in generation_config.json alone, the tokenizer names another."""
    tokenizer = Tokenizer(tiny.word_tokenizer(["a", "</s>", "b"]), eos_token="</s>")
    folder = write(tmp_path, tiny.hf_config(eos_token_id=7), generation_config={"eos_token_id": [9, 1]})
    assert stop_token_ids(folder, tokenizer) == (9, 1)
    assert stop_token_ids(folder, None) == (9, 1)
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert stop_token_ids(folder, tokenizer) == (9, 1)
    (folder / "generation_config.json").unlink()
    assert stop_token_ids(folder, tokenizer) == (7, 1)
    (folder / "config.json").write_text(json.dumps(tiny.hf_config(eos_token_id="</s>")))
    with pytest.raises(ValueError, match='eos_token_id is "</s>"; it must be an id or a list of ids'):
        stop_token_ids(folder, None)
