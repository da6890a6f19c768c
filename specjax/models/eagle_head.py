"""An autoregressive draft head: one decoder layer over the target's own hidden states.

EAGLE (Li et al. 2024, arXiv:2401.15077; in the form of EAGLE-3, arXiv:2503.01840, section 3.1): a token is easy to guess for who
knows the state that the target was in *before* it and the token that was drawn there. The head joins both, attends to the
text through a cache of its own, and guesses the next token; fed with its own state instead of the target's, it goes on::

    text              x_0    x_1    x_2   ...   r
    target's states   -      f_0    f_1   ...   f_{r-1}      one place back: the state that made the token
    head's inputs     0,x_0  f_0,x_1  f_1,x_2   f_{r-1},r    (no state comes before the first token)
    head's states     a_0    a_1    a_2   ...   a_r          -> logits of the token after r
    drafting                                    a_r,d_1 -> a' -> logits of the token after d_1; a',d_2 ...

The states of several of the target's layers are joined (``num_features``); embedding and output matrix are the target's, the
latter's rows those of a reduced vocabulary.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.cache import KVBlock, KVCache
from specjax.models.attention import Attention, attend
from specjax.models.config import DecoderConfig
from specjax.models.draft_vocabulary import widen
from specjax.models.mlp import GatedMLP
from specjax.models.norm import RMSNorm
from specjax.models.products import contract, parameter, random_params, take_rows


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """Sizes of an autoregressive head.

    Attributes:
      layer: sizes of its one layer; ``vocab_size`` is V of the target's logits.
      num_features: F, layers of the target whose states it reads.
      draft_vocab_size: R, tokens that it can propose; None is all.

    Raises:
      ValueError: names the field, its value and the range.
    """

    layer: DecoderConfig
    num_features: int = 1
    draft_vocab_size: int | None = None

    def __post_init__(self):
        if self.layer.num_layers != 1:
            raise ValueError(f"EagleConfig: layer has {self.layer.num_layers} layers; a head has one")
        if special := self.layer.not_plain():
            value = getattr(self.layer, special[0])
            raise ValueError(f"EagleConfig: layer has {special[0]} {value!r}; a head has none (see DecoderConfig.plain_layer)")
        count, size = self.num_features, self.draft_vocab_size
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"EagleConfig: num_features is {count!r}; it must be a whole number of at least 1")
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= self.layer.vocab_size):
            raise ValueError(f"EagleConfig: draft_vocab_size is {size!r}; it must be None or from 1 to {self.layer.vocab_size}")

    @property
    def width(self) -> int:
        """E, the target's width."""
        return self.layer.width

    @property
    def vocab_size(self) -> int:
        """V of the target's logits."""
        return self.layer.vocab_size


class EagleModule(nnx.Module):
    """The head's layers. Use :class:`EagleHead`, which hides the module objects."""

    def __init__(self, config: EagleConfig, dtype):
        layer = config.layer
        width = layer.width
        self.feature_norms = nnx.List([RMSNorm(width, layer.norm_eps, dtype) for _ in range(config.num_features)])
        self.fuse = parameter((width, config.num_features * width), ("embed_out", "embed"), dtype)
        self.token_norm = RMSNorm(width, layer.norm_eps, dtype)
        self.state_norm = RMSNorm(width, layer.norm_eps, dtype)
        self.attention = Attention(layer, dtype, input_width=2 * width)
        self.mlp_norm = RMSNorm(width, layer.norm_eps, dtype)
        self.mlp = GatedMLP(layer, dtype)
        self.final_norm = RMSNorm(width, layer.norm_eps, dtype)

    def joined(self, features):
        """States [B, T, E] of the target's ``features`` [B, T, F, E]."""
        normed = [norm(features[:, :, index]) for index, norm in enumerate(self.feature_norms)]
        return contract(jnp.concatenate(normed, axis=2), self.fuse[...])

    def project(self, embedded, states, positions):
        """Queries, keys and values of tokens ``embedded`` [B, T, E] beside ``states`` [B, T, E]."""
        inputs = jnp.concatenate([self.token_norm(embedded), self.state_norm(states)], axis=-1)
        return self.attention.project(inputs, positions)

    def finish(self, states, mixed):
        """The head's states [B, T, E] of what attention ``mixed`` [B, T, K, G, D]."""
        stream = states + self.attention.join(mixed)
        return stream + self.mlp(self.mlp_norm(stream))


@dataclasses.dataclass(frozen=True)
class EagleHead:
    """The pure functions of the head: hashable, without parameters.

    What it shares with the target comes beside its parameters: ``shared["embedding"]`` [V, E], ``shared["output"]`` [R, E] rows
    of the target's output matrix, ``shared["ids"]`` [R] int32 the tokens that it can propose, None for all.
    """

    config: EagleConfig
    kind: ClassVar[str] = "eagle"

    @property
    def shared_names(self) -> tuple[str, ...]:
        """The matrices of the target that it reads."""
        return ("embedding", "output")

    @functools.lru_cache(maxsize=8)  # noqa: B019 - keyed by the config alone, holds shapes and no parameters
    def _structure(self, dtype):
        return nnx.split(nnx.eval_shape(lambda: EagleModule(self.config, dtype)))

    def abstract_params(self, dtype=jnp.float32) -> dict:
        """The parameters' nested dict with a ``jax.ShapeDtypeStruct`` for each array."""
        return nnx.to_pure_dict(self._structure(jnp.dtype(dtype))[1])

    def init(self, key: jax.Array, dtype=jnp.float32) -> dict:
        """Random parameters to train from: norms 1, the rest normal with deviation 0.02."""
        return random_params(self.abstract_params(dtype), key, scale=0.02)

    def module(self, params) -> EagleModule:
        """The module over ``params``; for one trace."""
        graph, _ = self._structure(params["fuse"].dtype)
        return nnx.merge(graph, params)

    def joined(self, params, features: jax.Array) -> jax.Array:
        """States [B, T, E] to start from, of the target's ``features`` [B, T, F, E]."""
        return self.module(params).joined(features.astype(params["fuse"].dtype))

    def apply(self, params, shared, tokens, states, positions, cache: KVCache, block_mask=None) -> tuple[jax.Array, KVBlock]:
        """One pass; writes nothing.

        Args:
          params: the head's parameters.
          shared: the target's.
          tokens: [B, T] int32.
          states: [B, T, E], what made each token: the target's, joined, or the head's own.
          positions: [B, T] int32.
          cache: the head's, of committed tokens.
          block_mask: [T, T] or [B, T, T] bool; None is causal.

        Returns:
          The head's states [B, T, E] and the block's keys and values.
        """
        module = self.module(params)
        if block_mask is None:
            block_mask = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        query, keys, values = module.project(self.embed(shared, tokens, states.dtype), states, positions)
        mixed = attend(query, keys, values, cache.keys[0], cache.values[0], cache.lengths, block_mask)
        return module.finish(states, mixed), KVBlock((keys,), (values,))

    def embed(self, shared, tokens, dtype) -> jax.Array:
        """[B, T, E] the target's embedding of ``tokens`` [B, T]."""
        return take_rows(shared["embedding"], tokens).astype(dtype)

    def logits(self, params, shared, states) -> jax.Array:
        """Logits [..., R], at least float32, of the token after each of the head's ``states`` [..., E]."""
        hidden = self.module(params).final_norm(states)
        return contract(hidden, shared["output"].astype(hidden.dtype), dtype=jnp.promote_types(hidden.dtype, jnp.float32))

    def wide_logits(self, params, shared, states, width: int) -> jax.Array:
        """The same over the target's ids, [..., width]."""
        return widen(self.logits(params, shared, states), shared["ids"], width)

    def init_cache(self, params, batch: int, capacity: int) -> KVCache:
        """An empty cache of the head's one layer."""
        layer = self.config.layer
        return KVCache.zeros(1, batch, layer.num_kv_heads, capacity, layer.head_dim, params["fuse"].dtype)
