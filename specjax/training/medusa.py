"""Medusa heads learn the target's own distributions some places ahead (Medusa-1: the target stays as it is).

With the state h_i of place i, whose output is the token at i + 1 (the root), head k is to say what the target says at place
i + k, whose output is the token k places after the root.
"""

import dataclasses

import jax

from specjax.training.batches import TrainingBatch
from specjax.training.objective import Objective


@dataclasses.dataclass(frozen=True)
class MedusaObjective(Objective):
    """The sum over heads of their losses (Cai et al. 2024, section 2.2.1); depth d is head d + 1.

    Attributes:
      functions: :class:`specjax.models.medusa_heads.MedusaHeads`.
    """

    @property
    def depth(self) -> int:
        """Places ahead that are drafted."""
        return self.functions.config.num_heads

    def guesses(self, params, shared: dict, batch: TrainingBatch) -> list[jax.Array]:
        """See :meth:`Objective.guesses`; beside the target's output at place i + k stands head k of state i."""
        hidden = batch.features[:, :, -1].astype(jax.tree.leaves(params)[0].dtype)
        logits = self.functions.logits(params, shared, hidden)
        return [logits[:, : -k - 1, k - 1] for k in range(1, self.depth + 1)]
