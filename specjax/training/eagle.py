"""An autoregressive head learns from the states that it will meet: the target's first, then its own.

In use the head guesses the first token from the target's state and every later one from its own. Training unrolls that: step 0
runs over the whole text with the target's states; step j runs over it again with the states that step j - 1 gave, one place
further (training-time test, EAGLE-3, Li et al. 2025, arXiv:2503.01840, section 3.2). What a query may see is what it sees in use:
entries made of the target's states up to the root, and behind it those of its own draft::

    step 2, place t     keys of step 0 at 0 .. t-2      the text up to the root t-2
                        keys of step 1 at t-1           first draft token, fed with the state of step 0
                        keys of step 2 at t             itself
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.attention import attend
from specjax.training.batches import TrainingBatch
from specjax.training.objective import Objective, check_depth


def unrolled_mask(size: int, step: int) -> np.ndarray:
    """[T, (step + 1) T] bool: what places of ``step`` see of the keys of steps 0 to ``step``.

    Example:
      >>> unrolled_mask(3, 1).astype(int).tolist()
      [[0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 1, 0], [1, 1, 0, 0, 0, 1]]
    """
    query, key = np.arange(size)[:, None], np.arange(size)[None, :]
    own_draft = [key == query - step + made for made in range(1, step + 1)]
    return np.concatenate([key <= query - step, *own_draft], axis=1)


def behind_one(values: jax.Array) -> jax.Array:
    """``values`` [B, T, ...] one place later, zeros at the first.

    Example:
      >>> behind_one(jnp.array([[1, 2, 3]])).tolist()
      [[0, 1, 2]]
    """
    return jnp.concatenate([jnp.zeros_like(values[:, :1]), values[:, :-1]], axis=1)


@dataclasses.dataclass(frozen=True)
class EagleObjective(Objective):
    """The sum over the steps of the unroll of their losses; depth d is step d.

    Attributes:
      functions: :class:`specjax.models.eagle_head.EagleHead`.
      depth: steps of the unroll, the tokens that are drafted in a row.
    """

    depth: int = 3

    def __post_init__(self):
        super().__post_init__()
        check_depth(self.depth, "EagleObjective")

    def unroll(self, params, shared, batch: TrainingBatch) -> list[jax.Array]:
        """The head's states [B, T, E] of every step; state t of step j guesses the token after t, t - j being the root."""
        head, size = self.functions, batch.tokens.shape[1]
        module = head.module(params)
        dtype = params["fuse"].dtype
        embedded = head.embed(shared, batch.tokens, dtype)
        positions = jnp.broadcast_to(jnp.arange(size)[None], batch.tokens.shape)
        states = module.joined(behind_one(batch.features).astype(dtype))
        cache = head.init_cache(params, batch.tokens.shape[0], 1)
        keys, values, steps = [], [], []
        for step in range(self.depth):
            query, step_keys, step_values = module.project(embedded, states, positions)
            keys.append(step_keys)
            values.append(step_values)
            mask = jnp.asarray(unrolled_mask(size, step))
            all_keys, all_values = jnp.concatenate(keys, axis=2), jnp.concatenate(values, axis=2)
            mixed = attend(query, all_keys, all_values, cache.keys[0], cache.values[0], cache.lengths, mask)
            made = module.finish(states, mixed)
            steps.append(made)
            states = behind_one(made)
        return steps

    def guesses(self, params, shared: dict, batch: TrainingBatch) -> list[jax.Array]:
        """See :meth:`Objective.guesses`; the first places of a later step have no root before them."""
        steps = self.unroll(params, shared, batch)
        return [self.functions.logits(params, shared, states[:, step:-1]) for step, states in enumerate(steps)]
