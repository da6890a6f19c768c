"""From a checkpoint's separate matrices to the decoder's fused parameters.

Every importer says how its tensors are called (:class:`TensorNames`) and hands over a :class:`TensorReader`; names, shapes
and leftovers are checked here before anything is read, and layers are read one at a time.

Letters in shapes: V vocabulary, L layers, E width, F MLP width, H query heads, K key/value heads, G = H / K, D head size.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.config import DecoderConfig


class TensorReader(Protocol):
    """Where tensors come from."""

    @property
    def where(self) -> str:
        """File or folder, for messages."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name to shape of every tensor there is."""
        ...

    def check_readable(self, name: str) -> None:
        """Raises a ValueError if the type of a tensor cannot be read."""
        ...

    def read(self, name: str, dtype) -> np.ndarray:
        """A tensor in ``dtype``."""
        ...


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """How a format calls its tensors; ``{i}`` stands for the layer. A bias is called like its weight, with ``bias``."""

    embedding: str
    final_norm: str
    unembedding: str
    attention_norm: str
    query: str
    key: str
    value: str
    out: str
    mlp_norm: str
    gate: str
    up: str
    down: str

    def bias(self, part: str) -> str:
        """Name of the bias beside the weight ``part`` ("query", "key" or "value")."""
        return getattr(self, part).removesuffix("weight") + "bias"


HUGGING_FACE = TensorNames(
    embedding="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    unembedding="lm_head.weight",
    attention_norm="model.layers.{i}.input_layernorm.weight",
    query="model.layers.{i}.self_attn.q_proj.weight",
    key="model.layers.{i}.self_attn.k_proj.weight",
    value="model.layers.{i}.self_attn.v_proj.weight",
    out="model.layers.{i}.self_attn.o_proj.weight",
    mlp_norm="model.layers.{i}.post_attention_layernorm.weight",
    gate="model.layers.{i}.mlp.gate_proj.weight",
    up="model.layers.{i}.mlp.up_proj.weight",
    down="model.layers.{i}.mlp.down_proj.weight",
)
GGUF = TensorNames(
    embedding="token_embd.weight",
    final_norm="output_norm.weight",
    unembedding="output.weight",
    attention_norm="blk.{i}.attn_norm.weight",
    query="blk.{i}.attn_q.weight",
    key="blk.{i}.attn_k.weight",
    value="blk.{i}.attn_v.weight",
    out="blk.{i}.attn_output.weight",
    mlp_norm="blk.{i}.ffn_norm.weight",
    gate="blk.{i}.ffn_gate.weight",
    up="blk.{i}.ffn_up.weight",
    down="blk.{i}.ffn_down.weight",
)


def expected_shapes(config: DecoderConfig, names: TensorNames) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor that a decoder needs."""
    width, mlp, size = config.width, config.mlp_width, config.head_dim
    query, key = config.num_query_heads * size, config.num_kv_heads * size
    shapes = {names.embedding: (config.vocab_size, width), names.final_norm: (width,)}
    if not config.tied_embedding:
        shapes[names.unembedding] = (config.vocab_size, width)
    layer = {
        names.attention_norm: (width,),
        names.query: (query, width),
        names.key: (key, width),
        names.value: (key, width),
        names.out: (width, query),
        names.mlp_norm: (width,),
        names.gate: (mlp, width),
        names.up: (mlp, width),
        names.down: (width, mlp),
    }
    if config.qkv_bias:
        layer |= {names.bias("query"): (query,), names.bias("key"): (key,), names.bias("value"): (key,)}
    for index in range(config.num_layers):
        shapes |= {name.format(i=index): shape for name, shape in layer.items()}
    return shapes


def check_tensors(config: DecoderConfig, reader: TensorReader, names: TensorNames, unneeded: Iterable[str] = ()) -> None:
    """Raises a ValueError unless the reader has exactly the tensors of the decoder, in their shapes and in readable types.

    ``unneeded`` are tensors that the importer has dealt with or that carry nothing (they may be absent).
    """
    found, expected = reader.shapes(), expected_shapes(config, names)
    for name, shape in expected.items():
        if name not in found:
            raise ValueError(f"{reader.where}: tensor {name!r} of shape {shape} is missing")
        if tuple(found[name]) != shape:
            raise ValueError(
                f"{reader.where}: tensor {name!r} has shape {tuple(found[name])}; the configuration asks for {shape}"
            )
        reader.check_readable(name)
    leftover = sorted(set(found) - set(expected) - set(unneeded))
    if leftover:
        raise ValueError(
            f"{reader.where}: {len(leftover)} tensors have no place in this architecture, the first is {leftover[0]!r} of shape "
            f"{tuple(found[leftover[0]])}"
        )


def half_split(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows [heads * D, ...] whose rotary pairs lie side by side, reordered to pairs D/2 apart.

    Example:
      >>> half_split(np.array([0, 4, 1, 5, 2, 6, 3, 7]), num_heads=1).tolist()
      [0, 1, 2, 3, 4, 5, 6, 7]
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def load_params(
    config: DecoderConfig,
    reader: TensorReader,
    names: TensorNames,
    dtype,
    *,
    paired_rotary: bool = False,
    unneeded: Iterable[str] = (),
    shardings: Callable[[DecoderConfig], dict] | None = None,
) -> dict:
    """The decoder's parameters on the default device, or spread over a mesh.

    Args:
      config: sizes; every tensor is checked against it first.
      reader: the tensors.
      names: what the reader calls them.
      dtype: of all parameters but the norms' scales, which stay float32.
      paired_rotary: query and key rows lie in interleaved pairs in the file.
      unneeded: tensors to leave alone.
      shardings: from the configuration the same tree with a sharding for each array; None: the default device.

    Returns:
      The tree of ``Decoder(config).abstract_params(dtype)``.

    Raises:
      ValueError: a tensor is missing, of a wrong shape or unreadable type, has no place, or does not fit ``dtype``.
    """
    check_tensors(config, reader, names, unneeded)
    dtype = jnp.dtype(dtype)
    heads, group, size, width = config.num_kv_heads, config.group_size, config.head_dim, config.width

    def read(name, dtype=dtype):
        values = reader.read(name, dtype)
        # Only float16 has a smaller range than the formats that checkpoints come in.
        if dtype == np.float16 and not np.isfinite(values).all():
            raise ValueError(
                f"{reader.where}: tensor {name!r} has values beyond float16's largest, 65504; use bfloat16 or float32"
            )
        return values

    def read_rotary(name, num_heads):
        return half_split(read(name), num_heads) if paired_rotary else read(name)

    def fuse_heads(layer_names, inputs):
        fused = np.empty((heads, group + 2, size, *inputs), dtype)
        fused[:, :group] = read_rotary(layer_names[0], config.num_query_heads).reshape(heads, group, size, *inputs)
        fused[:, group] = read_rotary(layer_names[1], heads).reshape(heads, size, *inputs)
        fused[:, group + 1] = read(layer_names[2]).reshape(heads, size, *inputs)
        return fused

    def scale(name):
        return {"scale": read(name, jnp.dtype(jnp.float32))}

    def layer(index):
        def called(name):
            return name.format(i=index)

        parts = ("query", "key", "value")
        attention = {
            "qkv": fuse_heads([called(getattr(names, part)) for part in parts], (width,)),
            "out": read(called(names.out)).reshape(width, heads, group, size),
        }
        if config.qkv_bias:
            attention["qkv_bias"] = fuse_heads([called(names.bias(part)) for part in parts], ())
        return {
            "attention_norm": scale(called(names.attention_norm)),
            "attention": attention,
            "mlp_norm": scale(called(names.mlp_norm)),
            "mlp": {
                "gate_up": np.stack([read(called(names.gate)), read(called(names.up))]),
                "down": read(called(names.down)),
            },
        }

    wanted = None if shardings is None else shardings(config)

    def place(tree, *path):
        # At once, so that the arrays on the host can go before the next layer is read.
        if wanted is None:
            return jax.device_put(tree)
        there = functools.reduce(lambda part, name: part[name], path, wanted)
        # Every device is given its share, and no device the whole.
        return jax.tree.map(lambda leaf, to: jax.make_array_from_callback(leaf.shape, to, leaf.__getitem__), tree, there)

    params = {
        "embedding": place(read(names.embedding), "embedding"),
        "layers": {index: place(layer(index), "layers", index) for index in range(config.num_layers)},
        "final_norm": place(scale(names.final_norm), "final_norm"),
    }
    if not config.tied_embedding:
        params["unembedding"] = place(read(names.unembedding), "unembedding")
    return params
