"""From a checkpoint's separate matrices to the decoder's fused parameters.

Every importer says how its tensors are called (:class:`specjax.checkpoints.tensor_names.TensorNames`) and hands over a
:class:`TensorReader`; names, shapes and leftovers are checked here before anything is read, and layers are read one at a time.

Letters in shapes: V vocabulary, L layers, E width, F MLP width, H query heads, K key/value heads, G = H / K, D head size, X
experts.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.tensor_names import TensorNames, expected_shapes
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.quantised import in_the_form_of


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
    norm_offset: float = 0.0,
    unneeded: Iterable[str] = (),
    shardings: Callable[[DecoderConfig], dict] | None = None,
) -> dict:
    """The decoder's parameters on the default device, or spread over a mesh.

    Args:
      config: sizes; every tensor is checked against it first. Where its layers are scanned the host holds all of them at once.
      reader: the tensors.
      names: what the reader calls them.
      dtype: of all parameters but the norms' scales, which stay float32. int8: of the matrices, which are read in float32, one
        layer at a time, and quantised on the host.
      paired_rotary: query and key rows lie in interleaved pairs in the file.
      norm_offset: what the scales of norms are more than their tensors say: 1 where a model stores them around 0.
      unneeded: tensors to leave alone.
      shardings: from the configuration the same tree with a sharding for each array; None: the default device.

    Returns:
      The tree of ``Decoder(config).abstract_params(dtype)``.

    Raises:
      ValueError: a tensor is missing, of a wrong shape or unreadable type, has no place, or does not fit ``dtype``.
    """
    check_tensors(config, reader, names, unneeded)
    forms = Decoder(config).abstract_params(dtype)
    read_as = jnp.dtype(dtype if config.int8_stream is None else jnp.float32)
    layers = _LayerReader(config, reader, names, read_as, paired_rotary, norm_offset)
    wanted = None if shardings is None else shardings(config)

    def place(tree, *path):
        return put(in_the_form_of(functools.reduce(lambda part, name: part[name], path, forms), tree), *path)

    def put(tree, *path):
        # At once, so that the arrays on the host can go before the next layer is read.
        if wanted is None:
            return jax.device_put(tree)
        there = functools.reduce(lambda part, name: part[name], path, wanted)
        # Every device is given its share, and no device the whole.
        return jax.tree.map(lambda leaf, to: jax.make_array_from_callback(leaf.shape, to, leaf.__getitem__), tree, there)

    def place_layers():
        if not config.scan_layers:
            return {index: place(layers.layer(index), "layers", index) for index in range(config.num_layers)}
        form = Decoder(config.with_layers([0])).abstract_params(dtype)["layers"][0]
        turns, stacked = config.num_layers // config.period, {}
        for index in range(config.num_layers):
            turn, of_period = divmod(index, config.period)
            layer = in_the_form_of(form, layers.layer(index))
            if turn == 0:
                stacked[of_period] = jax.tree.map(lambda leaf: np.empty((turns, *leaf.shape), leaf.dtype), layer)
            jax.tree.map(lambda into, leaf, turn=turn: operator.setitem(into, turn, leaf), stacked[of_period], layer)
        return {index: put(stacked.pop(index), "layers", index) for index in range(config.period)}

    params = {
        "embedding": place(layers.read(names.embedding), "embedding"),
        "layers": place_layers(),
        "final_norm": place(layers.scale(names.final_norm), "final_norm"),
    }
    if not config.tied_embedding:
        params["unembedding"] = place(layers.read(names.unembedding), "unembedding")
    return params


@dataclasses.dataclass(frozen=True)
class _LayerReader:
    """Reads the parts of a decoder, one layer at a time; see :func:`load_params`."""

    config: DecoderConfig
    reader: TensorReader
    names: TensorNames
    dtype: np.dtype
    paired_rotary: bool
    norm_offset: float

    def read(self, name: str, dtype=None) -> np.ndarray:
        dtype = self.dtype if dtype is None else dtype
        values = self.reader.read(name, dtype)
        # Only float16 has a smaller range than the formats that checkpoints come in.
        if dtype == np.float16 and not np.isfinite(values).all():
            raise ValueError(
                f"{self.reader.where}: tensor {name!r} has values beyond float16's largest, 65504; use bfloat16 or float32"
            )
        return values

    def scale(self, name: str) -> dict:
        """A norm."""
        values = self.read(name, jnp.dtype(jnp.float32))
        return {"scale": values + np.float32(self.norm_offset) if self.norm_offset else values}

    def layer(self, index: int) -> dict:
        names, config = self.names, self.config
        names = names.of_layer(index)
        layer = {
            "attention_norm": self.scale(names.attention_norm),
            "attention": self.attention(names),
            "mlp_norm": self.scale(names.mlp_norm),
            "mlp": self.mlp(names) if config.experts is None else self.experts(names),
        }
        if config.post_norms:
            layer["attention_post_norm"] = self.scale(names.attention_post_norm)
            layer["mlp_post_norm"] = self.scale(names.mlp_post_norm)
        return layer

    def attention(self, names: TensorNames) -> dict:
        config = self.config
        heads, group, size, width = config.num_kv_heads, config.group_size, config.head_dim, config.width
        if names.qkv is not None:
            rows = np.split(self.read(names.qkv), np.cumsum([heads * group * size, heads * size]))
        else:
            rows = [self.read(name) for name in (names.query, names.key, names.value)]
        attention = {"qkv": self.fused_heads(rows, (width,)), "out": self.read(names.out)}
        if config.qkv_bias:
            rows = [self.read(names.bias(part)) for part in ("query", "key", "value")]
            attention["qkv_bias"] = self.fused_heads(rows, ())
        if config.query_key_norm:
            attention |= {"query_norm": self.scale(names.query_norm), "key_norm": self.scale(names.key_norm)}
        return attention

    def fused_heads(self, rows: Sequence[np.ndarray], inputs: tuple[int, ...]) -> np.ndarray:
        """[K, G + 2, D, *inputs] of the rows of query, key and value, each [heads * D, *inputs]."""
        config = self.config
        heads, group, size = config.num_kv_heads, config.group_size, config.head_dim
        query, key, value = rows
        if self.paired_rotary:
            query, key = half_split(query, heads * group), half_split(key, heads)
        fused = np.empty((heads, group + 2, size, *inputs), self.dtype)
        fused[:, :group] = query.reshape(heads, group, size, *inputs)
        fused[:, group] = key.reshape(heads, size, *inputs)
        fused[:, group + 1] = value.reshape(heads, size, *inputs)
        return fused

    def mlp(self, names: TensorNames) -> dict:
        if names.gate_up is not None:
            gate_up = self.read(names.gate_up).reshape(2, self.config.mlp_width, self.config.width)
        else:
            gate_up = np.stack([self.read(names.gate), self.read(names.up)])
        return {"gate_up": gate_up, "down": self.read(names.down)}

    def experts(self, names: TensorNames) -> dict:
        config = self.config
        count = config.experts.num_experts
        gate_up = np.empty((count, 2, config.mlp_width, config.width), self.dtype)
        down = np.empty((count, config.width, config.mlp_width), self.dtype)
        for place, name in (((slice(None), 0), names.gate), ((slice(None), 1), names.up)):
            self.read_experts(name, gate_up[place])
        self.read_experts(names.down, down)
        return {"router": self.read(names.router), "gate_up": gate_up, "down": down}

    def read_experts(self, name: str, into: np.ndarray) -> None:
        """One tensor for all experts, or one for each."""
        if "{e}" not in name:
            into[...] = self.read(name)
            return
        for expert in range(len(into)):
            into[expert] = self.read(name.format(e=expert))
