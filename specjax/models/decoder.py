"""The Transformer decoder of every supported family.

Letters in shapes: B rows, T tokens of a pass, S cache capacity, V vocabulary, L layers, E width, F MLP width,
K key/value heads, G query heads per key/value head, D head size.

Entry s of a row's cache is the token at position s: windows of local layers are distances between positions. The cache of a
local layer is as long as the others', so that any committed entry can be rolled back to.

Weights are stored [out, in] and contracted on their last axis (on CPU the usual [in, out] kernel is up to twice as slow
for a few rows), with query, key and value of one key/value head side by side, [K, G + 2, D, E], and the two MLP inputs
stacked, [2, F, E]: a mesh splits heads and MLP without reshuffling either. What is contracted is one axis, also where it is
heads: a TPU stores the last two axes in tiles, and would write [E, K, G, D] anew before every product.
"""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from specjax.cache import KVBlock, KVCache, SomeHeads
from specjax.models.attention import Attention, soft_cap
from specjax.models.base import ModelOutput
from specjax.models.config import DecoderConfig
from specjax.models.mlp import ExpertsMLP, GatedMLP
from specjax.models.norm import RMSNorm
from specjax.models.products import WHOLE, Matrix, Split, contract, parameter, random_params
from specjax.models.quantised import QuantisedMatrix, in_the_form_of

MATRICES = ("embedding", "unembedding", "qkv", "out", "gate_up", "down")
"""What is quantised in an int8 model. The router of a mixture stays as it is: it is small, and a comparison hangs on it."""


class Layer(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream, with a norm in between where the model has one."""

    def __init__(self, config: DecoderConfig, dtype, split: Split = WHOLE, local: bool = False):
        def norm():
            return RMSNorm(config.width, config.norm_eps, dtype)

        self.post_norms = config.post_norms
        self.attention_norm = norm()
        self.attention = Attention(config, dtype, split=split, local=local)
        self.mlp_norm = norm()
        self.mlp = (GatedMLP if config.experts is None else ExpertsMLP)(config, dtype, split)
        if config.post_norms:
            self.attention_post_norm, self.mlp_post_norm = norm(), norm()

    def __call__(self, stream, *attention_inputs):
        mixed, keys, values = self.attention(self.attention_norm(stream), *attention_inputs)
        stream = stream + (self.attention_post_norm(mixed) if self.post_norms else mixed)
        changed = self.mlp(self.mlp_norm(stream))
        return stream + (self.mlp_post_norm(changed) if self.post_norms else changed), keys, values


@functools.partial(jax.jit, static_argnums=0)
def _run_layer(graph, state, *inputs):
    """One layer. Layers of one structure share this trace, which is most of the time that tracing a deep model takes."""
    return nnx.merge(graph, state)(*inputs)


class DecoderModule(nnx.Module):
    """The layers between embedding and logits. Use :class:`Decoder`, which hides the module objects."""

    def __init__(self, config: DecoderConfig, dtype, split: Split = WHOLE):
        self.config, self.split = config, split
        self.embedding = parameter((config.vocab_size, config.width), ("vocab", "embed"), dtype)
        # Where they are scanned, the parameters of one stand for those of all in its place of the pattern.
        count = config.period if config.scan_layers else config.num_layers
        self.layers = nnx.List([Layer(config, dtype, split, i in config.local_layers) for i in range(count)])
        self.final_norm = RMSNorm(config.width, config.norm_eps, dtype)
        if not config.tied_embedding:
            self.unembedding = parameter((config.vocab_size, config.width), ("vocab", "embed"), dtype)

    def __call__(self, tokens, positions, cache, block_mask, feature_layers):
        stream = self.split.embed(self.embedding[...], tokens)
        if self.config.embedding_scale != 1.0:
            wide = stream.astype(jnp.promote_types(stream.dtype, jnp.float32))
            stream = (wide * self.config.embedding_scale).astype(stream.dtype)
        run = self._run_in_loop if self.config.scan_layers else self._run_in_line
        streams, stream, block = run(stream, positions, cache, block_mask, feature_layers)
        hidden = self.final_norm(stream)
        # The last "layer" shows what the output matrix sees.
        shown = streams | {self.config.num_layers: hidden}
        if feature_layers:
            features = jnp.stack([shown[index] for index in feature_layers], axis=2)
        else:
            features = jnp.zeros((*hidden.shape[:2], 0, hidden.shape[2]), hidden.dtype)
        return ModelOutput(hidden, features, block)

    def _run_in_line(self, stream, positions, cache, block_mask, feature_layers):
        """Streams by number (0: the given one), the last of them, and the block."""
        del feature_layers
        shown = {0: stream}
        keys, values = [], []
        for index, layer in enumerate(self.layers):
            stream, layer_keys, layer_values = _run_layer(
                *nnx.split(layer), stream, positions, cache.keys[index], cache.values[index], cache.lengths, block_mask
            )
            keys.append(layer_keys)
            values.append(layer_values)
            shown[index + 1] = stream
        return shown, stream, KVBlock(tuple(keys), tuple(values))

    def _run_in_loop(self, stream, positions, cache, block_mask, feature_layers):
        """The same, of streams only those that ``feature_layers`` asks for; the loop cuts parameters and caches out of arrays."""
        heads, period = self.config.num_kv_heads, len(self.layers)
        turns = self.config.num_layers // period
        inner = {(index - 1) % period for index in feature_layers if 0 < index < self.config.num_layers}
        graphs, states = zip(*map(nnx.split, self.layers), strict=True)

        def turn(stream, scanned):
            states, first = scanned
            keys, values, streams = [], [], {}
            for place, (graph, state) in enumerate(zip(graphs, states, strict=True)):
                cached = [SomeHeads(part, first + place * heads, heads) for part in (cache.keys[0], cache.values[0])]
                stream, layer_keys, layer_values = _run_layer(graph, state, stream, positions, *cached, cache.lengths, block_mask)
                keys.append(layer_keys)
                values.append(layer_values)
                if place in inner:
                    streams[place] = stream
            return stream, (jnp.concatenate(keys, axis=1), jnp.concatenate(values, axis=1), streams)

        first = jnp.arange(turns, dtype=jnp.int32) * (period * heads)
        with jax.named_scope(f"layers_{turns}"):
            last, (keys, values, streams) = lax.scan(turn, stream, (states, first))
        shown = {number * period + place + 1: of[number] for place, of in streams.items() for number in range(turns)}
        # Of the heads of each turn [turns, B, period * K, T, D] those of all.
        keys, values = (jnp.moveaxis(part, 0, 1) for part in (keys, values))
        keys, values = (part.reshape(len(part), -1, *part.shape[3:]) for part in (keys, values))
        return shown | {0: stream}, last, KVBlock((keys,), (values,))

    def unembed(self, hidden):
        """See :meth:`Decoder.unembed`."""
        matrix = (self.embedding if not hasattr(self, "unembedding") else self.unembedding)[...]
        dtype = jnp.promote_types(hidden.dtype, jnp.float32)
        logits = contract(hidden, matrix, dtype=dtype, parts=self.config.product_parts)
        return soft_cap(logits, self.config.logit_soft_cap)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The pure functions of a decoder: hashable, without parameters (see :class:`specjax.models.base.ModelFunctions`).

    Attributes:
      config: sizes and options.
      feature_layers: hidden states that ``apply`` shows as ``features``: 0 is the embedding, i the output of layer i,
        ``config.num_layers`` the final hidden state (norm applied).
      split: what of it one device of a mesh has, for functions that run inside ``jax.shard_map`` (see ``specjax.parallel``).

    Example:
      >>> config = DecoderConfig(vocab_size=11, num_layers=1, width=8, num_query_heads=2, num_kv_heads=1, head_dim=4,
      ...                        mlp_width=16, max_positions=32)
      >>> decoder = Decoder(config)
      >>> params = decoder.init(jax.random.key(0))
      >>> cache = decoder.init_cache(params, batch=1, capacity=8)
      >>> output = decoder.apply(params, jnp.array([[1, 2, 3]]), jnp.array([[0, 1, 2]]), cache, None)
      >>> decoder.unembed(params, output.hidden).shape
      (1, 3, 11)
    """

    config: DecoderConfig
    feature_layers: tuple[int, ...] = ()
    split: Split = WHOLE

    def __post_init__(self):
        for index in self.feature_layers:
            if not 0 <= index <= self.config.num_layers:
                raise ValueError(
                    f"Decoder: feature_layers holds {index}; a layer is between 0 (the embedding) and {self.config.num_layers}"
                )

    def with_features(self, layers: tuple[int, ...]) -> "Decoder":
        """The same functions showing the hidden states of ``layers`` as features."""
        return dataclasses.replace(self, feature_layers=tuple(layers))

    @functools.lru_cache(maxsize=8)  # noqa: B019 - keyed by the config alone, holds shapes and no parameters
    def _structure(self, dtype):
        return nnx.split(nnx.eval_shape(lambda: DecoderModule(self.config, dtype, self.split)))

    def abstract_params(self, dtype=None) -> dict:
        """The parameters' nested dict with a ``jax.ShapeDtypeStruct`` for each array.

        Args:
          dtype: of the matrices; None: int8 where the configuration says that they are, else float32.

        Raises:
          ValueError: it is int8, and the configuration does not say so, or the other way round.
        """
        stream = self._stream(dtype)

        def stacked(leaf):
            return jax.ShapeDtypeStruct((self.config.num_layers // self.config.period, *leaf.shape), leaf.dtype)

        params = self._scanned(stacked, nnx.to_pure_dict(self._structure(stream)[1]))

        def quantised(leaf):
            values: Any = jax.ShapeDtypeStruct(leaf.shape, jnp.int8)
            scale: Any = jax.ShapeDtypeStruct(leaf.shape[:-1], jnp.float32)
            return QuantisedMatrix(values, scale, stream, self.config.int8_digits)

        return self._quantised(quantised, params)

    def logical_axes(self) -> dict:
        """The parameters' nested dict with a ``PartitionSpec`` of logical axis names for each array."""
        stream = self._stream(None)
        axes = nnx.to_pure_dict(nnx.get_partition_spec(self._structure(stream)[1]))
        axes = self._scanned(lambda spec: PartitionSpec("layers", *spec), axes)

        def quantised(spec):
            of_scale: Any = PartitionSpec(*spec[:-1])
            return QuantisedMatrix(spec, of_scale, stream, self.config.int8_digits)

        return self._quantised(quantised, axes)

    def _stream(self, dtype) -> jnp.dtype:
        """Dtype of what is between the products, with matrices in ``dtype``."""
        stream = self.config.int8_stream
        if dtype is not None and (jnp.dtype(dtype) == jnp.int8) != (stream is not None):
            right = "a dtype of floats, or a configuration with int8_stream" if stream is None else "int8"
            raise ValueError(f"Decoder: dtype is {dtype!r}, and config.int8_stream is {stream!r}; it must be {right}")
        if stream is None:
            return jnp.dtype(jnp.float32 if dtype is None else dtype)
        return jnp.dtype(stream)

    def _scanned(self, function, tree):
        """``tree`` with ``function(leaf)`` in place of every leaf of the layers, where these are scanned."""
        if not self.config.scan_layers:
            return tree
        layers = jax.tree.map(function, tree["layers"], is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
        return tree | {"layers": layers}

    def _quantised(self, function, tree):
        """``tree`` with ``function(leaf)`` in place of what is quantised."""
        if self.config.int8_stream is None:
            return tree

        def of(path, leaf):
            return function(leaf) if path[-1].key in MATRICES else leaf

        return jax.tree.map_with_path(of, tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))

    def init(self, key: jax.Array, dtype=None, scale: float | None = None) -> dict:
        """Random parameters: norms 1, biases and matrices normal with ``scale`` (default: 1 / sqrt(inputs))."""
        in_line = dataclasses.replace(self, config=dataclasses.replace(self.config, scan_layers=False))
        params = random_params(nnx.to_pure_dict(in_line._structure(self._stream(dtype))[1]), key, scale)
        if self.config.scan_layers:
            params["layers"] = stacked_layers(params["layers"], self.config.period)
        return in_the_form_of(self.abstract_params(dtype), params)

    def _module(self, params) -> DecoderModule:
        graph, _ = self._structure(params["embedding"].dtype)
        return nnx.merge(graph, params)

    def apply(self, params, tokens, positions, cache, block_mask=None) -> ModelOutput:
        """See :meth:`specjax.models.base.ModelFunctions.apply`."""
        chex.assert_rank(tokens, 2)
        chex.assert_equal_shape([tokens, positions])
        num_tokens = tokens.shape[1]
        if block_mask is None:
            block_mask = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
        chex.assert_shape(block_mask, (..., num_tokens, num_tokens))
        return self._module(params)(tokens, positions, cache, block_mask, self.feature_layers)

    def unembed(self, params, hidden) -> jax.Array:
        """Logits [..., V], at least float32, of hidden states [..., E]; of the share of the vocabulary where that is split."""
        return self._module(params).unembed(hidden)

    def embedding_matrix(self, params) -> Matrix:
        """[V, E], the rows that tokens become."""
        return params["embedding"]

    def output_matrix(self, params) -> Matrix:
        """[V, E], the rows that hidden states are compared with."""
        return params["embedding"] if self.config.tied_embedding else params["unembedding"]

    def init_cache(self, params, batch: int, capacity: int) -> KVCache:
        """An empty cache for ``batch`` rows of at most ``capacity`` tokens."""
        config = self.config
        sizes = (config.num_layers, batch, config.num_kv_heads)
        if config.scan_layers:
            sizes = (1, batch, config.num_layers * config.num_kv_heads)
        return KVCache.zeros(*sizes, capacity, config.head_dim, params["embedding"].dtype)


def stacked_layers(layers: dict, period: int) -> dict:
    """Parameters as a decoder has them whose layers are scanned.

    Args:
      layers: from the number of each layer to its parameters.
      period: see :attr:`specjax.models.config.DecoderConfig.period`.

    Returns:
      From the place in the period to a tree of arrays [L / period, ...].

    Example:
      >>> layers = {layer: {"scale": jnp.full((1,), layer)} for layer in range(4)}
      >>> stacked_layers(layers, period=2)[1]["scale"].tolist()
      [[1], [3]]
    """
    places = {place: [layers[layer] for layer in range(place, len(layers), period)] for place in range(period)}
    return {place: jax.tree.map(lambda *leaves: jnp.stack(leaves), *same) for place, same in places.items()}
