"""A distilled draft model: a few decoder layers between the target's own embedding and output matrix.

For a small target the two matrices are most of a draft model's parameters, and a model of the target's own family needs none of
its own: its layers start as some of the target's and learn to say what the whole of it says. It reads tokens alone, so it drafts
as any draft model does; the output may be cut to a reduced vocabulary (see :mod:`specjax.models.draft_vocabulary`).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.cache import KVCache
from specjax.models.attention import soft_cap
from specjax.models.base import ModelOutput
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.draft_vocabulary import widen
from specjax.models.loaded import Model
from specjax.models.products import contract, random_params
from specjax.models.shallow import keep_layers

OWN = ("layers", "final_norm")
"""Parameters that are not the target's."""


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """Sizes of a distilled draft model.

    Attributes:
      decoder: sizes of its layers; width and ``vocab_size`` are the target's.
      draft_vocab_size: R, tokens that it can propose; None is all. It reads all in any case.

    Raises:
      ValueError: names the field, its value and the range.
    """

    decoder: DecoderConfig
    draft_vocab_size: int | None = None

    def __post_init__(self):
        size = self.draft_vocab_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= self.vocab_size):
            raise ValueError(f"DraftConfig: draft_vocab_size is {size!r}; it must be None or from 1 to {self.vocab_size}")
        if self.decoder.int8_stream is not None:
            raise ValueError(f"DraftConfig: decoder has int8_stream {self.decoder.int8_stream!r}; trained layers are floats")
        if self.decoder.scan_layers:
            raise ValueError("DraftConfig: decoder has scan_layers True; the few layers of a draft model are not scanned")

    @property
    def width(self) -> int:
        """E, the target's width."""
        return self.decoder.width

    @property
    def vocab_size(self) -> int:
        """V of the target's logits."""
        return self.decoder.vocab_size


@dataclasses.dataclass(frozen=True)
class DraftLayers:
    """The pure functions of the draft model: hashable, without parameters.

    Its parameters are ``layers`` and ``final_norm``. What it shares with the target comes beside them: ``shared["embedding"]``
    [V, E], ``shared["output"]`` [R, E] rows of the target's output matrix, ``shared["ids"]`` [R] int32 the tokens that it can
    propose, None for all. With ``{"own": params, "shared": shared}`` as parameters these are the functions of a model
    (:class:`specjax.models.base.ModelFunctions`).

    Example:
      >>> sizes = DecoderConfig(vocab_size=11, num_layers=1, width=8, num_query_heads=2, num_kv_heads=1, head_dim=4,
      ...                       mlp_width=16, max_positions=32)
      >>> draft = DraftLayers(DraftConfig(sizes, draft_vocab_size=2))
      >>> matrix = jnp.ones((11, 8))
      >>> shared = {"embedding": matrix, "output": matrix[:2], "ids": jnp.array([3, 5])}
      >>> params = {"own": draft.init(jax.random.key(0)), "shared": shared}
      >>> cache = draft.init_cache(params, batch=1, capacity=4)
      >>> output = draft.apply(params, jnp.array([[1, 2]]), jnp.array([[0, 1]]), cache)
      >>> draft.unembed(params, output.hidden).shape
      (1, 2, 11)
    """

    config: DraftConfig
    kind: ClassVar[str] = "draft"

    @functools.cached_property
    def decoder(self) -> Decoder:
        """The layers with the target's embedding."""
        return Decoder(dataclasses.replace(self.config.decoder, tied_embedding=True))

    @property
    def shared_names(self) -> tuple[str, ...]:
        """The matrices of the target that it reads."""
        return ("embedding", "output")

    def abstract_params(self, dtype=jnp.float32) -> dict:
        """The parameters' nested dict with a ``jax.ShapeDtypeStruct`` for each array."""
        whole = self.decoder.abstract_params(dtype)
        return {name: whole[name] for name in OWN}

    def init(self, key: jax.Array, dtype=jnp.float32) -> dict:
        """Random parameters; see :func:`layers_of` for better ones to start from."""
        return random_params(self.abstract_params(dtype), key)

    def apply(self, params, tokens, positions, cache, block_mask=None) -> ModelOutput:
        """See :meth:`specjax.models.base.ModelFunctions.apply`."""
        own = params["own"]
        embedding = params["shared"]["embedding"].astype(_dtype(own))
        return self.decoder.apply(own | {"embedding": embedding}, tokens, positions, cache, block_mask)

    def logits(self, shared, hidden) -> jax.Array:
        """Logits [..., R], at least float32, of hidden states [..., E]."""
        logits = contract(hidden, shared["output"].astype(hidden.dtype), dtype=jnp.promote_types(hidden.dtype, jnp.float32))
        return soft_cap(logits, self.config.decoder.logit_soft_cap)

    def unembed(self, params, hidden) -> jax.Array:
        """Logits [..., V] over the target's ids, -inf for tokens that it cannot propose."""
        return widen(self.logits(params["shared"], hidden), params["shared"]["ids"], self.config.vocab_size)

    def init_cache(self, params, batch: int, capacity: int) -> KVCache:
        """An empty cache for ``batch`` rows of at most ``capacity`` tokens."""
        config = self.config.decoder
        sizes = (config.num_layers, batch, config.num_kv_heads, capacity, config.head_dim)
        return KVCache.zeros(*sizes, _dtype(params["own"]))


def layers_of(target: Model, layers: Sequence[int], draft_vocab_size: int | None = None) -> tuple[DraftLayers, dict]:
    """A draft model that starts as some of its target's layers and its final norm; the arrays are the target's own.

    Args:
      target: a model whose functions are a :class:`specjax.models.decoder.Decoder`.
      layers: indices of the layers, in order.
      draft_vocab_size: R; None is all tokens.

    Raises:
      ValueError: the target is of another kind, or an index is not one of its layers.
    """
    shallow = keep_layers(target, layers)
    return DraftLayers(DraftConfig(shallow.config, draft_vocab_size)), {name: shallow.params[name] for name in OWN}


def _dtype(own):
    # Norms are in at least float32, whatever the rest is in.
    return own["layers"][0]["attention"]["out"].dtype
