"""What every objective shares: a draft's guesses held against the target's own distributions, place by place.

A new kind of draft is one subclass that says what the draft guesses (:meth:`Objective.guesses`) and one recipe.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from specjax.models.attention import soft_cap
from specjax.models.products import contract
from specjax.training.batches import TrainingBatch
from specjax.training.losses import check_loss, distances, rank_of, weighted_mean


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is minimised: the sum over depths d = 0, 1, ... of ``decay``^d times the loss there.

    Attributes:
      functions: of what is trained, one of :data:`specjax.models.trained_head.KINDS`.
      loss: ``kl``, ``ce`` or ``tv``.
      decay: weight of each depth over the one before it.
    """

    functions: Any
    loss: str = dataclasses.field(default="kl", kw_only=True)
    decay: float = dataclasses.field(default=0.8, kw_only=True)

    def __post_init__(self):
        check_loss(self.loss, type(self).__name__)

    if TYPE_CHECKING:

        @property
        def depth(self) -> int:
            """Tokens in a row that are drafted; every kind has it as a field or a property."""

    def guesses(self, params, shared: dict, batch: TrainingBatch) -> list[jax.Array]:
        """For every depth that is trained the logits [B, T - 1 - f, R] of places f to T - 2, beside the target's there.

        The output at place t guesses token t + 1; f, a depth's own, is the first place that has what a guess of this depth needs.
        """
        raise NotImplementedError

    def target_logits(self, shared: dict, batch: TrainingBatch) -> jax.Array:
        """The target's own logits [B, T, R] for the draft's tokens at every place, from its final hidden states."""
        hidden = batch.features[:, :, -1].astype(shared["output"].dtype)
        logits = contract(hidden, shared["output"], dtype=jnp.promote_types(hidden.dtype, jnp.float32))
        return soft_cap(logits, shared.get("soft_cap"))

    def __call__(self, params, shared: dict, batch: TrainingBatch) -> tuple[jax.Array, dict]:
        """The loss, and by depth the loss and the share of places where the draft's best is the target's best."""
        target, labels = self.target_logits(shared, batch), label_of(batch.tokens, shared["ids"])
        by_depth, top = [], []
        total: Any = 0.0  # an array from the first depth on
        for depth, draft in enumerate(self.guesses(params, shared, batch)):
            first = target.shape[1] - 1 - draft.shape[1]
            wanted, weights = target[:, first:-1], batch.weights[:, first + 1 :]
            loss = weighted_mean(distances(self.loss, draft, wanted, labels[:, first + 1 :]), weights)
            total = total + self.decay**depth * loss
            by_depth.append(loss)
            top.append(weighted_mean(jnp.argmax(draft, -1) == jnp.argmax(wanted, -1), weights))
        return total, {"loss": jnp.stack(by_depth), "top_1": jnp.stack(top)}

    def ranks(self, params, shared: dict, batch: TrainingBatch) -> jax.Array:
        """[B, D, T] ranks of the tokens in the draft's order; see :func:`specjax.training.replay.rank_texts`."""
        labels, size = label_of(batch.tokens, shared["ids"]), batch.tokens.shape[1]
        by_depth = [rank_of(draft, labels[:, size - draft.shape[1] :]) for draft in self.guesses(params, shared, batch)]
        return jnp.stack([jnp.pad(ranks, ((0, 0), (size - ranks.shape[1], 0))) for ranks in by_depth], axis=1)


def check_depth(depth, owner: str) -> None:
    """Raises ValueError unless ``depth`` is a whole number of at least 1."""
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise ValueError(f"{owner}: depth is {depth!r}; it must be a whole number of at least 1")


def label_of(tokens: jax.Array, ids: jax.Array | None) -> jax.Array:
    """Which of the draft's R tokens each of ``tokens`` is; R where it is none of them.

    Example:
      >>> label_of(jnp.array([[7, 2, 3]]), jnp.array([2, 7])).tolist()
      [[1, 0, 2]]
    """
    if ids is None:
        return tokens
    place = jnp.searchsorted(ids, tokens)
    found = jnp.take(ids, place, mode="clip") == tokens
    return jnp.where(found, place, len(ids)).astype(jnp.int32)
