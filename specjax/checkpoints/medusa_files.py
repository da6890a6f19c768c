"""Public Medusa checkpoints: a folder with config.json and the heads in safetensors.

Names are those of the authors' code: ``k.b.linear.weight`` and ``.bias`` for block b of head k, ``k.B.weight`` (B blocks) for its
output matrix. There are two layouts, told apart by their names: heads with an output matrix each, and heads that use the
target's. Checkpoints that only a pickle holds are refused.
"""

import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.safetensors import SafetensorsFolder
from specjax.models.loaded import Model
from specjax.models.medusa_heads import MedusaConfig, MedusaHeads
from specjax.models.trained_head import TargetMark, TrainedHead

_NAME = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")


def load_medusa(path: str | Path, target: Model) -> TrainedHead:
    """Loads the heads of a public Medusa checkpoint.

    Args:
      path: a folder with config.json (``medusa_num_heads``, ``medusa_num_layers``) and safetensors.
      target: the model that the heads were trained for; the files themselves only name it.

    Raises:
      ValueError: the folder is none, holds pickles only, or does not fit its config or the target; names both sides.
    """
    path = Path(path).expanduser()
    config_path = path / "config.json"
    if not config_path.exists():
        raise ValueError(f"{path}: there is no config.json in this folder")
    files = sorted(entry.name for entry in path.glob("*.safetensors"))
    if not files:
        pickles = ", ".join(sorted(entry.name for pattern in ("*.pt", "*.bin", "*.pth") for entry in path.glob(pattern)))
        more = f"; {pickles} may hold them, but pickles are never read: convert them to safetensors" if pickles else ""
        raise ValueError(f"{path}: there are no safetensors files in this folder{more}")
    try:
        fields = json.loads(config_path.read_text())
        num_heads, num_blocks = (fields[name] for name in ("medusa_num_heads", "medusa_num_layers"))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{config_path}: needs medusa_num_heads and medusa_num_layers: {error}") from None
    mark = TargetMark.of(target)
    reader = SafetensorsFolder(path, files[0])
    shapes = reader.shapes()
    named = {}
    for name in shapes:
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{path}: the tensor {name} is none of a Medusa head's")
        named[int(match[1]), int(match[2]), match[3]] = name
    own_output = any(part == "weight" for _, _, part in named)
    config = MedusaConfig(mark.width, mark.vocab_size, num_heads, num_blocks, own_output=own_output)
    wanted: dict[tuple[int, int, str], tuple[int, ...]] = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            wanted[head, block, "linear.weight"] = (mark.width, mark.width)
            wanted[head, block, "linear.bias"] = (mark.width,)
        if own_output:
            wanted[head, num_blocks, "weight"] = (mark.vocab_size, mark.width)
    where = f"{path}: {num_heads} heads of {num_blocks} blocks (config.json) for {target.name!r}"
    for key, shape in wanted.items():
        if key not in named:
            raise ValueError(f"{where}: the tensor {'.'.join(map(str, key))} is missing")
        if tuple(shapes[named[key]]) != shape:
            raise ValueError(f"{where}: {named[key]} has shape {tuple(shapes[named[key]])}; it must be {shape}")
    for key, name in named.items():
        if key not in wanted:
            raise ValueError(f"{where}: the tensor {name} has no place")

    def stacked(block, part):
        return jnp.asarray(np.stack([reader.read(named[head, block, part], np.float32) for head in range(num_heads)]))

    params: dict[str, Any] = {"blocks": {}}
    for block in range(num_blocks):
        params["blocks"][block] = {"weight": stacked(block, "linear.weight"), "bias": stacked(block, "linear.bias")}
    if own_output:
        params["output"] = stacked(num_blocks, "weight")
    return TrainedHead(
        MedusaHeads(config), params, mark, (mark.num_layers,), facts={"source": fields.get("_name_or_path", path.name)}
    )
