"""A draft model is distilled from its target: it reads tokens alone and learns the target's distribution behind every one.

In use it reads the committed text and behind it its own draft. Behind a correct guess the text *is* the draft, so a plain pass
over a text meets every state that matters in use, at every depth: there is nothing to unroll, and one loss.
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.training.batches import TrainingBatch
from specjax.training.objective import Objective, check_depth


@dataclasses.dataclass(frozen=True)
class DraftObjective(Objective):
    """The loss of a teacher-forced pass.

    Attributes:
      functions: :class:`specjax.models.draft_layers.DraftLayers`.
      depth: tokens in a row that the replay drafts; it changes nothing of the training.
    """

    depth: int = 4

    def __post_init__(self):
        super().__post_init__()
        check_depth(self.depth, "DraftObjective")

    def guesses(self, params, shared: dict, batch: TrainingBatch) -> list[jax.Array]:
        """See :meth:`Objective.guesses`; a single one."""
        tokens = batch.tokens
        params = {"own": params, "shared": shared}
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        cache = self.functions.init_cache(params, tokens.shape[0], 1)
        hidden = self.functions.apply(params, tokens, positions, cache).hidden
        return [self.functions.logits(shared, hidden[:, :-1])]

    def ranks(self, params, shared: dict, batch: TrainingBatch) -> jax.Array:
        """[B, depth, T]; see :meth:`Objective.ranks`.

        The rank of token t, seen from any root before it, is that of the teacher-forced pass, hence the same at every depth:
        where replay asks for it, all drafts before t were the text.
        """
        return jnp.repeat(super().ranks(params, shared, batch), self.depth, axis=1)
