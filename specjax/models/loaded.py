"""A model ready to generate: functions, parameters, and what surrounds them."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from specjax.models.base import ModelFunctions

if TYPE_CHECKING:
    from specjax.checkpoints.cards import Card
    from specjax.checkpoints.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """Functions and parameters of a model, with its limits and, where it has one, its tokenizer.

    :func:`specjax.load_model` makes one from a checkpoint; a researcher's own model is
    ``specjax.Model(functions=my_functions, params=params, vocab_size=256, max_positions=1024)``.

    Attributes:
      functions: the pure functions (see :class:`specjax.models.base.ModelFunctions`); hashable, static.
      params: their parameters, a pytree.
      vocab_size: number of ids that may be emitted: 0 to ``vocab_size - 1``. The logits may be wider (padding).
      max_positions: longest sequence, prompt included, in tokens.
      stop_token_ids: ids that end a generation (end of sequence, end of turn).
      tokenizer: text to ids and back, chat template; None: prompts must be ids.
      name: what messages and statistics call the model.
      card: the model card that it came from, if any.
      dtype_reason: why the parameters are in the dtype they are in, for people.

    Raises:
      ValueError: a size below 1, a stop id outside the vocabulary, or a tokenizer of another size.

    Example:
      >>> from specjax.models.config import DecoderConfig
      >>> from specjax.models.decoder import Decoder
      >>> config = DecoderConfig(vocab_size=11, num_layers=1, width=8, num_query_heads=2, num_kv_heads=1, head_dim=4,
      ...                        mlp_width=16, max_positions=32)
      >>> decoder = Decoder(config)
      >>> model = Model(functions=decoder, params=decoder.init(jax.random.key(0)), vocab_size=10, max_positions=32)
      >>> model.dtype.name, model.init_cache(batch=2, capacity=8).capacity
      ('float32', 8)
    """

    functions: ModelFunctions
    params: Any = dataclasses.field(repr=False)
    vocab_size: int
    max_positions: int
    stop_token_ids: tuple[int, ...] = ()
    tokenizer: "Tokenizer | None" = None
    name: str = "model"
    card: "Card | None" = None
    dtype_reason: str = ""

    def __post_init__(self):
        for field in ("vocab_size", "max_positions"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"Model: {field} is {value!r}; it must be an integer of at least 1")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            if not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise ValueError(f"Model: stop_token_ids holds {token!r}; ids are integers from 0 to {self.vocab_size - 1}")
        if self.tokenizer is not None and self.tokenizer.size != self.vocab_size:
            raise ValueError(f"Model: vocab_size is {self.vocab_size}; it must be the tokenizer's size, {self.tokenizer.size}")

    @property
    def config(self) -> Any:
        """The functions' configuration; None where they have none."""
        return getattr(self.functions, "config", None)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of most of the parameters."""
        counts: dict = {}
        for leaf in jax.tree.leaves(self.params):
            counts[leaf.dtype] = counts.get(leaf.dtype, 0) + leaf.size
        return max(counts, key=counts.__getitem__)

    @functools.cached_property
    def logits(self) -> jax.ShapeDtypeStruct:
        """Shape [V] and dtype of the logits of one token. Nothing is computed."""

        def one_token(params):
            token = jnp.zeros((1, 1), jnp.int32)
            cache = self.functions.init_cache(params, 1, 1)
            return self.functions.unembed(params, self.functions.apply(params, token, token, cache, None).hidden)[0, 0]

        return jax.eval_shape(one_token, self.params)

    def apply(self, params, tokens, positions, cache, block_mask=None):
        """See :meth:`specjax.models.base.ModelFunctions.apply`."""
        return self.functions.apply(params, tokens, positions, cache, block_mask)

    def unembed(self, params, hidden) -> jax.Array:
        """See :meth:`specjax.models.base.ModelFunctions.unembed`."""
        return self.functions.unembed(params, hidden)

    def init_cache(self, batch: int, capacity: int):
        """An empty cache for ``batch`` rows of at most ``capacity`` tokens, in the dtype of the parameters."""
        return self.functions.init_cache(self.params, batch, capacity)
