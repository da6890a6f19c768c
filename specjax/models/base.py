"""What every part of specjax may ask of a model."""

from typing import Any, Protocol

import flax.struct
import jax

from specjax.cache import KVBlock, KVCache
from specjax.models.products import Matrix


@flax.struct.dataclass
class ModelOutput:
    """Result of one pass over T tokens per row.

    Attributes:
      hidden: [B, T, E], final hidden states (the last norm applied), what ``unembed`` takes.
      features: [B, T, F, E], hidden states of the layers that the model was built to show; F may be 0.
      block: keys and values of these tokens, for ``cache.commit``.
    """

    hidden: jax.Array
    features: jax.Array
    block: KVBlock


class ModelFunctions(Protocol):
    """The pure functions of a model. Hashable: it is a static part of every compiled round.

    A researcher's own model needs these four methods and nothing else; see ``examples/own_model.py``. ``block`` and
    ``cache`` may be of any pytree type as long as ``cache`` has ``lengths``, ``capacity``, ``commit`` and ``roll_back``
    like :class:`specjax.cache.KVCache`.
    """

    def apply(
        self, params: Any, tokens: jax.Array, positions: jax.Array, cache: KVCache, block_mask: jax.Array | None
    ) -> ModelOutput:
        """One pass; writes nothing.

        Args:
          params: the model's parameters.
          tokens: [B, T] int32.
          positions: [B, T] int32, position of each token in its row's sequence.
          cache: committed tokens; a token attends to the first ``cache.lengths[b]`` entries of its row.
          block_mask: [T, T] or [B, T, T] bool, ``[i, j]`` true where token i attends to token j of this pass; None is
            causal.
        """
        ...

    def unembed(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Logits [..., V], at least float32, of hidden states [..., E]."""
        ...

    def init_cache(self, params: Any, batch: int, capacity: int) -> KVCache:
        """An empty cache in the dtype of the parameters."""
        ...


class TargetFunctions(ModelFunctions, Protocol):
    """The functions of a model that trained heads can draft for; a :class:`specjax.models.decoder.Decoder` has them.

    See :func:`specjax.models.trained_head.target_functions`.
    """

    def with_features(self, layers: tuple[int, ...]) -> ModelFunctions:
        """The same functions showing the hidden states of ``layers`` as features."""
        ...

    def embedding_matrix(self, params: Any) -> Matrix:
        """[V, E], the rows that tokens become."""
        ...

    def output_matrix(self, params: Any) -> Matrix:
        """[V, E], the rows that hidden states are compared with."""
        ...
