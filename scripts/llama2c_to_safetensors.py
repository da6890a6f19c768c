#!/usr/bin/env python3
"""A llama2.c checkpoint (version 0, as of the TinyStories models) as a folder that ``specjax.load_model`` reads.

    python scripts/llama2c_to_safetensors.py stories260K.bin FOLDER

The file is seven int32 sizes and then float32 arrays in a fixed order. Its rotary pairs lie side by side within a head; in the
folder they lie half a head apart.
"""

import argparse
import json
import pathlib

import numpy as np
from safetensors.numpy import save_file


def convert(source: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes config.json and model.safetensors."""
    data = source.read_bytes()
    width, mlp_width, layers, heads, kv_heads, vocab_size, positions = np.frombuffer(data, np.int32, 7).tolist()
    shared, vocab_size = vocab_size > 0, abs(vocab_size)
    values, place = np.frombuffer(data, np.float32, offset=28), 0
    head_dim = width // heads

    def take(*shape):
        nonlocal place
        size = int(np.prod(shape))
        if place + size > len(values):
            raise SystemExit(f"{source}: ends after {len(values)} numbers; its sizes ask for more")
        place += size
        return values[place - size : place].reshape(shape)

    def halves(weight, count):
        pairs = weight.reshape(count, head_dim // 2, 2, width)
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(count * head_dim, width))

    tensors = {"model.embed_tokens.weight": take(vocab_size, width)}
    stacked = {
        "input_layernorm": take(layers, width),
        "self_attn.q_proj": take(layers, width, width),
        "self_attn.k_proj": take(layers, kv_heads * head_dim, width),
        "self_attn.v_proj": take(layers, kv_heads * head_dim, width),
        "self_attn.o_proj": take(layers, width, width),
        "post_attention_layernorm": take(layers, width),
        "mlp.gate_proj": take(layers, mlp_width, width),
        "mlp.down_proj": take(layers, width, mlp_width),
        "mlp.up_proj": take(layers, mlp_width, width),
    }
    for name, weights in stacked.items():
        for layer, weight in enumerate(weights):
            if name in ("self_attn.q_proj", "self_attn.k_proj"):
                weight = halves(weight, heads if name == "self_attn.q_proj" else kv_heads)
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ascontiguousarray(weight)
    tensors["model.norm.weight"] = take(width)
    take(2, positions, head_dim // 2)  # tables of the rotary embedding
    if not shared:
        tensors["lm_head.weight"] = take(vocab_size, width)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": mlp_width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": shared,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file({name: np.array(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    arguments = parser.parse_args()
    convert(arguments.source, arguments.folder)


if __name__ == "__main__":
    main()
