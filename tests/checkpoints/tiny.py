"""Tiny checkpoints for tests: one set of random tensors, written as a safetensors folder and as a GGUF file."""

import json

import gguf
import jax
import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import models, pre_tokenizers

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "vocab_size": 40,
    "max_position_embeddings": 64,
}


def hf_config(kind="llama", **changes):
    """Fields of config.json; a change to None takes the field out."""
    architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}.get(kind, "OtherForCausalLM")
    fields = {
        "model_type": kind,
        "architectures": [architecture],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        **SIZES,
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not None}


def hf_tensors(bias=False, head=True, seed=0):
    """Random float32 tensors under transformers' names."""
    s, rng = SIZES, np.random.default_rng(seed)
    width, mlp = s["hidden_size"], s["intermediate_size"]
    query, key = s["num_attention_heads"] * s["head_dim"], s["num_key_value_heads"] * s["head_dim"]
    shapes = {"model.embed_tokens.weight": (s["vocab_size"], width), "model.norm.weight": (width,)}
    if head:
        shapes["lm_head.weight"] = (s["vocab_size"], width)
    for i in range(s["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (width,),
            "self_attn.q_proj.weight": (query, width),
            "self_attn.k_proj.weight": (key, width),
            "self_attn.v_proj.weight": (key, width),
            "self_attn.o_proj.weight": (width, query),
            "post_attention_layernorm.weight": (width,),
            "mlp.gate_proj.weight": (mlp, width),
            "mlp.up_proj.weight": (mlp, width),
            "mlp.down_proj.weight": (width, mlp),
        }
        if bias:
            layer |= {f"self_attn.{p}_proj.bias": (rows,) for p, rows in (("q", query), ("k", key), ("v", key))}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(folder, config, tensors, **files):
    """A folder with config.json, model.safetensors and further JSON files (``generation_config={...}``)."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def gguf_name(name):
    """A tensor's name in GGUF."""
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def gguf_rows(name, tensor):
    """Query and key rows in the order of llama's GGUF files: of each head of 8, rows 0 4 1 5 2 6 3 7."""
    if ".q_proj.weight" not in name and ".k_proj.weight" not in name:
        return tensor
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    return np.concatenate([head[order] for head in np.split(tensor, len(tensor) // 8)])


def gguf_tensors(tensors, arch="llama"):
    """Tensors under GGUF names, in GGUF order."""
    return {gguf_name(name): gguf_rows(name, tensor) if arch == "llama" else tensor for name, tensor in tensors.items()}


def write_gguf(path, tensors, arch="llama", kinds=None, vocabulary=None, **options):
    """A GGUF file.

    Args:
      path: to write to.
      tensors: under GGUF names, float32.
      arch: ``general.architecture``.
      kinds: tensor name to quantisation type; float32 where none is given.
      vocabulary: keys behind "tokenizer." and their values.
      options: changes to keys behind ``arch.`` (dots written as two underscores); None takes a key out.
    """
    writer = gguf.GGUFWriter(path, arch)
    keys = {
        "block_count": SIZES["num_hidden_layers"],
        "context_length": SIZES["max_position_embeddings"],
        "embedding_length": SIZES["hidden_size"],
        "feed_forward_length": SIZES["intermediate_size"],
        "attention.head_count": SIZES["num_attention_heads"],
        "attention.head_count_kv": SIZES["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e4,
    } | {key.replace("__", "."): value for key, value in options.items()}
    for key, value in keys.items():
        add(writer, f"{arch}.{key}", value)
    for key, value in (vocabulary or {}).items():
        add(writer, f"tokenizer.{key}", value)
    for name, tensor in tensors.items():
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(name, tensor)
        else:
            packed = gguf.quants.quantize(tensor, kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer, key, value):
    """Adds a value of whatever type."""
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


BYTES = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]


def byte_vocabulary(pre="smollm", extra=(), **changes):
    """Keys of a byte-level vocabulary: 3 control tokens, the 256 bytes, then ``extra``, each merged from two characters."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, *extra]
    keys = {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": tokens,
        "ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "ggml.merges": [f"{token[0]} {token[1:]}" for token in extra] or ["a b"],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
    }
    if not extra:
        keys["ggml.tokens"].append("ab")
        keys["ggml.token_type"].append(1)
    return keys | {key.replace("__", "."): value for key, value in changes.items()}


def word_tokenizer(words):
    """A backend that knows whole words, with ids in the order given; the last one stands for unknown words."""
    backend = tokenizers.Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=words[-1]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def same(first, second):
    """Structure with its keys, dtypes and bits."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for (key, one), (_, two) in zip(jax.tree.leaves_with_path(first), jax.tree.leaves_with_path(second), strict=True):
        assert one.dtype == two.dtype, key
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes(), key
    return True
