"""A model behind the token ids of another one.

A draft model need not have its target's vocabulary: what both can spell in one token is enough to draft with (token-level
intersection, Timor et al. 2025, arXiv:2502.05202, section 4.3). Here the draft model is dressed in the target's ids: it reads
every id as the nearest thing that it knows, and its logits stand at the ids whose token it has, -inf elsewhere. Its q, once
normalised, is a distribution over the target's own ids, so nothing else of specjax knows of a second vocabulary, and every rule
is exact.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.cache import KVCache
from specjax.models.base import ModelFunctions, ModelOutput
from specjax.models.loaded import Model

MISSING = -1
"""In place of an id that the other vocabulary lacks."""


@dataclasses.dataclass(frozen=True)
class OtherVocabulary:
    """The pure functions of a model with another one's ids; see :func:`with_other_ids`.

    Its parameters are ``{"model": its own, "read_as": [V] int32, "said_as": [V] int32}``.

    Attributes:
      functions: the model's own.
    """

    functions: ModelFunctions

    def apply(self, params, tokens, positions, cache, block_mask=None) -> ModelOutput:
        """See :meth:`specjax.models.base.ModelFunctions.apply`."""
        # A prompt of raw ids may hold some beyond the tokenizer's.
        known = jnp.minimum(tokens, params["read_as"].shape[0] - 1)
        return self.functions.apply(params["model"], params["read_as"][known], positions, cache, block_mask)

    def unembed(self, params, hidden) -> jax.Array:
        """Logits [..., V] over the other vocabulary, -inf for the tokens that the model lacks."""
        own, said_as = self.functions.unembed(params["model"], hidden), params["said_as"]
        there = jnp.take(own, jnp.maximum(said_as, 0), axis=-1)
        return jnp.where(jnp.expand_dims(said_as == MISSING, tuple(range(own.ndim - 1))), -jnp.inf, there)

    def init_cache(self, params: Any, batch: int, capacity: int) -> KVCache:
        """See :meth:`specjax.models.base.ModelFunctions.init_cache`."""
        return self.functions.init_cache(params["model"], batch, capacity)


def with_other_ids(model: Model, read_as: np.ndarray, said_as: np.ndarray, **changes) -> Model:
    """``model`` with the ids of a vocabulary of V tokens.

    Args:
      model: any.
      read_as: [V] whole numbers, the model's id that each id is fed as.
      said_as: [V] whole numbers, the model's id whose logit each id gets, -1 for none. No two may be the same: the model's
        probability of a token belongs to one id.
      changes: fields of the :class:`Model` to set, such as ``tokenizer``.

    Raises:
      ValueError: the two differ in length, hold an id that the model lacks, or ``said_as`` holds one twice or none at all.

    Example:
      >>> from specjax.certificates.tiny import constant_model
      >>> import numpy as np
      >>> dressed = with_other_ids(constant_model([0.25, 0.75]), np.array([0, 1, 1]), np.array([1, -1, 0]))
      >>> hidden = jnp.log(jnp.array([0.25, 0.75]))  # this model's hidden states are its logits
      >>> jnp.exp(dressed.unembed(dressed.params, hidden)).round(2).tolist()
      [0.75, 0.0, 0.25]
    """
    read_as, said_as = np.asarray(read_as), np.asarray(said_as)
    if read_as.ndim != 1 or read_as.shape != said_as.shape:
        raise ValueError(f"with_other_ids: read_as has shape {read_as.shape} and said_as {said_as.shape}; both must be [V]")
    said = said_as[said_as != MISSING]
    for name, ids in (("read_as", read_as), ("said_as", said)):
        wrong = ids[(ids < 0) | (ids >= model.vocab_size)]
        if len(wrong):
            raise ValueError(f"with_other_ids: {name} holds {wrong[0]}; ids of {model.name} are 0 to {model.vocab_size - 1}")
    if len(said) == 0:
        raise ValueError(f"with_other_ids: said_as is {MISSING} everywhere; {model.name} could not draft a single token")
    if len(np.unique(said)) < len(said):
        values, counts = np.unique(said, return_counts=True)
        raise ValueError(
            f"with_other_ids: said_as holds {values[counts > 1][0]} twice; each of the model's tokens can be one id only"
        )
    params = {"model": model.params} | {
        name: jnp.asarray(ids, jnp.int32) for name, ids in (("read_as", read_as), ("said_as", said_as))
    }
    own = {"functions": OtherVocabulary(model.functions), "params": params, "vocab_size": len(read_as)}
    return dataclasses.replace(model, **{**own, "stop_token_ids": (), "tokenizer": None, **changes})
