#!/usr/bin/env python3
"""The most memory that loading takes: a Llama of random weights in four safetensors files, read tensor by tensor.

python scripts/measure_loading.py [--layers 16] [--width 1024] [--output FILE.json]

Counted is what a process of its own holds at most beyond what JAX takes before, files that are mapped included.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import ml_dtypes
import numpy as np
import safetensors.numpy
from record import record

LOAD = """
import re, sys, jax
from specjax import load_model
def resident(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
jax.numpy.ones(3).block_until_ready()
before = resident("VmRSS")
model = load_model(sys.argv[1], dtype=sys.argv[2])
weights = sum(leaf.nbytes for leaf in jax.tree.leaves(jax.block_until_ready(model.params)))
print(weights, resident("VmHWM") - before)
"""


def write_model(folder: pathlib.Path, layers: int, width: int) -> None:
    """A checkpoint in bfloat16."""
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "vocab_size": 32000}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 128}
    config = {"model_type": "llama", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(sizes | heads | config))
    shapes = {"model.embed_tokens.weight": (32000, width), "model.norm.weight": (width,)}
    for layer in range(layers):
        of_layer = {
            "self_attn.q_proj": (width, width), "self_attn.k_proj": (width // 2, width), "self_attn.v_proj": (width // 2, width),
            "self_attn.o_proj": (width, width), "mlp.gate_proj": (4 * width, width), "mlp.up_proj": (4 * width, width),
            "mlp.down_proj": (width, 4 * width), "input_layernorm": (width,), "post_attention_layernorm": (width,),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    random, names, placed = np.random.default_rng(0), list(shapes), {}
    for part in range(4):
        file = f"model-{part}.safetensors"
        tensors = {name: (0.02 * random.normal(size=shapes[name])).astype(ml_dtypes.bfloat16) for name in names[part::4]}
        safetensors.numpy.save_file(tensors, folder / file)
        placed |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(pathlib.Path(folder), arguments.layers, arguments.width)
        for dtype in ("float32", "bfloat16"):
            said = subprocess.run([sys.executable, "-c", LOAD, folder, dtype], check=True, capture_output=True, text=True).stdout
            weights, most = map(int, said.split())
            results[dtype] = {"weights": weights, "most": most, "ratio": round(most / weights, 3)}
    command = f"python scripts/measure_loading.py --layers {arguments.layers} --width {arguments.width}"
    record(command, {"results": results}, arguments.output)


if __name__ == "__main__":
    main()
