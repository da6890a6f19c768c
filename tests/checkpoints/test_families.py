"""A family's folder and its GGUF file describe one decoder: tiny models of the parity tests, rewritten as converters do it."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from specjax.checkpoints import gguf
from specjax.checkpoints.folder_config import FAMILIES, read_config
from specjax.checkpoints.gguf_file import GGUFFile
from specjax.checkpoints.safetensors import SafetensorsFolder, load_safetensors_params
from specjax.models.config import ExpertsConfig, LinearRopeScaling, RopeConfig, YarnRopeScaling
from specjax.models.decoder import Decoder
from tests.checkpoints import tiny

GOLDEN = Path(__file__).parents[1] / "golden"
# Architecture and what of it differs from a llama file: keys, and how tensors are called.
PLAIN = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip
GEMMA = PLAIN | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
FUSED = PLAIN | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
QWEN3_MOE = PLAIN | {
    "mlp.gate": "ffn_gate_inp", "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}  # fmt: skip
MIXTRAL = PLAIN | {
    "block_sparse_moe.gate": "ffn_gate_inp", "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps", "block_sparse_moe.experts.w2": "ffn_down_exps",
}  # fmt: skip
CASES = {
    "tiny-qwen3": ("qwen3", PLAIN, {
        "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32,
        "rope__scaling__yarn_beta_fast": 4.0, "rope__freq_base": 500.0,
    }),
    "tiny-mistral": ("llama", PLAIN, {"attention__sliding_window": 9}),
    "tiny-gemma2": ("gemma2", GEMMA, {
        "attention__sliding_window": 10, "attn_logit_softcapping": 2.5, "final_logit_softcapping": 4.0,
    }),
    "tiny-gemma3": ("gemma3", GEMMA, {
        "attention__sliding_window": 7, "attention__sliding_window_pattern": [True, False, True], "rope__freq_base": 900.0,
        "rope__freq_base_swa": 60.0, "rope__scaling__type": "linear", "rope__scaling__factor": 3.0,
    }),
    "tiny-phi3": ("phi3", FUSED, {"attention__sliding_window": 11, "rope__dimension_count": 8}),
    "tiny-qwen3-moe": ("qwen3moe", QWEN3_MOE, {
        "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 12, "expert_weights_norm": False,
    }),
    "tiny-mixtral": ("llama", MIXTRAL, {"expert_count": 4, "expert_used_count": 2}),
}  # fmt: skip


def as_gguf(name, path):
    """The GGUF file of a tiny model."""
    arch, parts, options = CASES[name]
    fields = json.loads((GOLDEN / name / "config.json").read_text())
    tensors, experts = {}, {}
    for key, tensor in safetensors.numpy.load_file(GOLDEN / name / "model.safetensors").items():
        if key in tiny.NAMES:
            new = tiny.NAMES[key]
        else:
            _, _, layer, *rest = key.removesuffix(".weight").split(".")
            expert = next((int(part) for part in rest if part.isdigit()), None)
            new = f"blk.{layer}.{parts['.'.join(part for part in rest if not part.isdigit())]}.weight"
            if expert is not None:
                experts.setdefault(new, {})[expert] = tensor
                continue
        if arch.startswith("gemma") and "norm" in new:
            tensor = tensor + np.float32(1)
        tensors[new] = tiny.gguf_rows(key, tensor) if arch == "llama" else tensor
    tensors |= {new: np.stack([found[e] for e in sorted(found)]) for new, found in experts.items()}
    keys = {
        "block_count": fields["num_hidden_layers"], "context_length": 128, "embedding_length": 16,
        "feed_forward_length": fields["intermediate_size"], "attention__head_count": fields["num_attention_heads"],
        "attention__head_count_kv": fields["num_key_value_heads"], "attention__key_length": 8, "attention__value_length": 8,
        "attention__layer_norm_rms_epsilon": 3e-5, "rope__freq_base": 700.0,
    }  # fmt: skip
    return GGUFFile(tiny.write_gguf(path, tensors, arch, **keys | options))


def from_folder(name):
    reader = SafetensorsFolder(GOLDEN / name)
    return load_safetensors_params(reader, *read_config(GOLDEN / name, reader.shapes()), "float32")


@pytest.mark.parametrize("name", CASES)
def test_same_from_folder_and_gguf(tmp_path, name):
    config, params = from_folder(name)
    file = as_gguf(name, tmp_path / "model.gguf")
    other, architecture = gguf.read_config(file)
    if name == "tiny-gemma2":
        # A scale of the scores that no published model has, which files cannot say.
        assert (config.attention_scale, other.attention_scale) == (6**-0.5, None)
        config = type(config)(**vars(config) | {"attention_scale": None})
    assert other == config
    wanted = Decoder(config).abstract_params()
    loaded = gguf.load_gguf_params(file, other, architecture, "float32")
    assert jax.tree.structure(loaded) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_the_tiny_models_have_what_is_special():
    configs = {name: from_folder(name)[0] for name in CASES}
    assert configs["tiny-qwen3"].query_key_norm
    assert configs["tiny-qwen3"].rope.scaling == YarnRopeScaling(4.0, 32, 4.0, 1.0)
    assert (configs["tiny-mistral"].window, configs["tiny-mistral"].local_layers) == (9, (0, 1))
    gemma2, gemma3 = configs["tiny-gemma2"], configs["tiny-gemma3"]
    assert gemma2.post_norms
    assert gemma2.activation == "gelu_tanh"
    assert (gemma2.attention_soft_cap, gemma2.logit_soft_cap, gemma2.embedding_scale) == (2.5, 4.0, 4.0)
    assert gemma3.query_key_norm
    assert gemma3.local_layers == (0, 2)
    assert (gemma3.rope, gemma3.local_rope) == (RopeConfig(900.0, LinearRopeScaling(3.0)), RopeConfig(60.0))
    assert configs["tiny-phi3"].local_layers == (0, 1)
    assert configs["tiny-qwen3-moe"].experts == ExpertsConfig(6, 2, renormalise=False)
    assert configs["tiny-mixtral"].experts == ExpertsConfig(4, 2, renormalise=True)


def folder_config(tmp_path, kind, **fields):
    """The configuration of a folder with these fields beside the common sizes."""
    tmp_path.mkdir(exist_ok=True)
    sizes = tiny.hf_config(kind, architectures=[FAMILIES[kind].architecture], rope_theta=None, **fields)
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    return read_config(tmp_path, {"lm_head.weight": (40, 32)})[0]


def test_what_absent_fields_mean(tmp_path):
    """As in published files, which leave out what is usual for the family."""
    gemma = {"num_hidden_layers": 7, "head_dim": None, "hidden_act": None, "tie_word_embeddings": None}
    gemma |= {"max_position_embeddings": 8192}
    config = folder_config(tmp_path, "gemma2", **gemma)
    assert (config.window, config.local_layers) == (4096, (0, 2, 4, 6))
    assert (config.attention_soft_cap, config.logit_soft_cap, config.head_dim) == (50.0, 30.0, 256)
    assert config.tied_embedding
    config = folder_config(tmp_path, "gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0}, **gemma)
    assert config.local_layers == (0, 1, 2, 3, 4, 6)
    assert config.rope == RopeConfig(1e6, LinearRopeScaling(8.0))
    assert config.local_rope == RopeConfig(1e4)
    assert (config.attention_soft_cap, config.logit_soft_cap, config.attention_scale) == (None, None, None)
    assert math.isclose(config.embedding_scale**2, 32)
    config = folder_config(tmp_path, "mistral", max_position_embeddings=8192)
    assert (config.window, config.local_layers) == (4096, (0, 1))
    # Null is not absent.
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": None}))
    assert read_config(tmp_path, {"lm_head.weight": (40, 32)})[0].window is None
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "sliding_window": 16, "max_window_layers": 48}
    config = folder_config(tmp_path, "qwen3_moe", use_sliding_window=False, **moe)
    assert (config.window, config.mlp_width, config.experts) == (None, 8, ExpertsConfig(4, 2, renormalise=False))


@pytest.mark.parametrize(
    ("kind", "fields", "match"),
    [
        ("qwen3", {"attention_bias": True}, "attention_bias is True; supported: False"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; supported: False"),
        ("gemma3_text", {"hidden_activation": "relu"}, "hidden_activation is 'relu'; supported: 'silu' or 'swish' or 'gelu_py"),
        ("gemma3_text", {"rope_parameters": {"full_attention": {}, "chunked": {}}}, "rope_parameters has 'chunked'; supported: "),
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0]}}, "rope_type 'su'; supported: 'default', 'linear'"),
        ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor is 0.75; supported: 1.0"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]; supported: \[\]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2; supported: 1"),
        ("mixtral", {"num_local_experts": 4}, "num_experts_per_tok is None; it must be an integer"),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 5}, r"num_active is 5; .* 1 to num_experts \(4\)"),
    ],
)
def test_what_cannot_be_honoured(tmp_path, kind, fields, match):
    with pytest.raises(ValueError, match=match) as caught:
        folder_config(tmp_path, kind, **fields)
    assert str(tmp_path) in str(caught.value)


def test_long_rope_of_gguf_is_refused_by_name(tmp_path):
    tensors = {"token_embd.weight": np.ones((40, 32), np.float32), "rope_factors_long.weight": np.ones(4, np.float32)}
    with pytest.raises(ValueError, match=r"phi3.rope.scaling.type is 'longrope' .*; supported: 'none', 'linear', 'yarn'"):
        gguf.read_config(GGUFFile(tiny.write_gguf(tmp_path / "model.gguf", tensors, "phi3")))


def test_gguf_says_neither_local_layers_nor_their_rope(tmp_path):
    """Published Gemma files: all but every sixth layer are local, with the base that the family has."""
    tensors = {"token_embd.weight": np.ones((40, 32), np.float32)}
    options = {"block_count": 7, "attention__sliding_window": 16, "rope__freq_base": 1e6}
    config, _ = gguf.read_config(GGUFFile(tiny.write_gguf(tmp_path / "model.gguf", tensors, "gemma3", **options)))
    assert config.local_layers == (0, 1, 2, 3, 4, 6)
    assert (config.rope, config.local_rope) == (RopeConfig(1e6), RopeConfig(1e4))
    assert config.attention_scale is None
    # Of the largest models the scale of the scores is another, which files do not say either.
    options["block_count"] = 62
    config, _ = gguf.read_config(GGUFFile(tiny.write_gguf(tmp_path / "model.gguf", tensors, "gemma3", **options)))
    assert config.attention_scale == (32 / 4) ** -0.5
