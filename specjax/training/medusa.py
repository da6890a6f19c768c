"""Medusa heads learn the target's own distributions some places ahead (Medusa-1: the target stays as it is).

With the state h_i of place i, whose output is the token at i + 1 (the root), head k is to say what the target says at place
i + k, whose output is the token k places after the root.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.models.decoder import contract
from specjax.models.medusa_heads import MedusaHeads
from specjax.training.batches import TrainingBatch
from specjax.training.losses import check_loss, distances, rank_of, weighted_mean


@dataclasses.dataclass(frozen=True)
class MedusaObjective:
    """What is minimised: the sum over heads of ``decay``^(k - 1) times their loss (Cai et al. 2024, section 2.2.1).

    Attributes:
      heads: the heads.
      loss: ``kl``, ``ce`` or ``tv``.
      decay: weight of each head over the one before it.
    """

    heads: MedusaHeads
    loss: str = "kl"
    decay: float = 0.8

    def __post_init__(self):
        check_loss(self.loss, "MedusaObjective")

    @property
    def depth(self) -> int:
        """Places ahead that are drafted."""
        return self.heads.config.num_heads

    def logits(self, params, shared, batch: TrainingBatch):
        """The heads' logits [B, T, N, R] and the target's own [B, T, R] at every place."""
        hidden = batch.features[:, :, -1].astype(jax.tree.leaves(params)[0].dtype)
        target = contract(hidden, shared["output"].astype(hidden.dtype), dtype=jnp.float32)
        return self.heads.logits(params, shared, hidden), target

    def __call__(self, params, shared: dict, batch: TrainingBatch) -> tuple[jax.Array, dict]:
        """The loss, and by depth the loss and the share of places where the draft's best is the target's best."""
        draft, target = self.logits(params, shared, batch)
        labels = label_of(batch.tokens, shared["ids"])
        total, by_depth, top = 0.0, [], []
        for k in range(1, self.depth + 1):
            # State i, the target at i + k, its token at i + k + 1.
            there, wanted = draft[:, : -k - 1, k - 1], target[:, k:-1]
            weights = batch.weights[:, k + 1 :]
            loss = weighted_mean(distances(self.loss, there, wanted, labels[:, k + 1 :]), weights)
            total = total + self.decay ** (k - 1) * loss
            by_depth.append(loss)
            top.append(weighted_mean(jnp.argmax(there, -1) == jnp.argmax(wanted, -1), weights))
        return total, {"loss": jnp.stack(by_depth), "top_1": jnp.stack(top)}

    def ranks(self, params, shared, batch: TrainingBatch) -> jax.Array:
        """[B, N, T] ranks of the tokens in the heads' order; see :func:`specjax.training.replay.rank_texts`."""
        draft, _ = self.logits(params, shared, batch)
        labels = label_of(batch.tokens, shared["ids"])
        by_head = [rank_of(draft[:, : -k - 1, k - 1], labels[:, k + 1 :]) for k in range(1, self.depth + 1)]
        size = batch.tokens.shape[1]
        return jnp.stack([jnp.pad(ranks, ((0, 0), (size - ranks.shape[1], 0))) for ranks in by_head], axis=1)


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
