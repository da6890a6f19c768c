"""When a draft model stops early.

How many tokens are drafted must not depend on the values of those that are verified, or verification is biased: a drafter
that drops a token because it came out unlikely hands on a different distribution than the q it states. A hook therefore sees
q and the tokens drawn so far, *before* the next one is drawn, and can only end the draft there. "Draw, keep the unlikely
token, then stop" is allowed; "draw, and drop it" cannot be written.
"""

import dataclasses
import math
from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp

from specjax.numeric import is_real


@flax.struct.dataclass
class DraftStep:
    """What a hook may look at before a draft token is drawn.

    Attributes:
      log_probs: [B, V], log q that the token would be drawn from; of greedy rows as it is at temperature 1.
      tokens: [B, K] int32, draft tokens; the first ``index`` are drawn.
      index: int32, how many are drawn.
      newest_log_prob: [B], of the newest drawn token, from the ``log_probs`` that it was drawn at; 0 before the first.
    """

    log_probs: jax.Array
    tokens: jax.Array
    index: jax.Array
    newest_log_prob: jax.Array


class StopHook(Protocol):
    """Decides before each draw. Hashable: a static part of the compiled round."""

    def __call__(self, step: DraftStep) -> jax.Array:
        """[B] bool: rows that draft no further."""
        ...


@dataclasses.dataclass(frozen=True)
class StopAtEntropy:
    """Stops where q is so flat that acceptance is unlikely (AdaEDL, Agrawal et al. 2024, arXiv:2410.18351, section 3).

    The draft ends where 1 - sqrt(scale H(q)), a lower bound on acceptance with H in nats, falls below ``least``.

    Raises:
      ValueError: names the argument, its value and the range.

    Example:
      >>> flat, sure = jnp.full((1, 4), -math.log(4)), jnp.array([[0.0, -jnp.inf, -jnp.inf, -jnp.inf]])
      >>> hook = StopAtEntropy(least=0.5)
      >>> [bool(hook(DraftStep(q, jnp.zeros((1, 2), int), 0, jnp.zeros(1)))[0]) for q in (flat, sure)]
      [True, False]
    """

    least: float = 0.4
    scale: float = 0.25

    def __post_init__(self):
        _check_share(self)
        _check(self, "scale", lambda scale: 0 < scale < math.inf, "a number above 0")

    def __call__(self, step: DraftStep) -> jax.Array:
        """See :class:`StopHook`."""
        log_q = step.log_probs
        entropy = -jnp.sum(jnp.where(jnp.isneginf(log_q), 0, jnp.exp(log_q) * log_q), axis=-1)
        return 1 - jnp.sqrt(self.scale * jnp.maximum(entropy, 0)) < self.least


@dataclasses.dataclass(frozen=True)
class StopAtConfidence:
    """Stops where even the most likely token has less than this probability.

    Raises:
      ValueError: names the argument, its value and the range.
    """

    least: float = 0.4

    def __post_init__(self):
        _check_share(self)

    def __call__(self, step: DraftStep) -> jax.Array:
        """See :class:`StopHook`."""
        return jnp.max(step.log_probs, axis=-1) < jnp.log(self.least)


@dataclasses.dataclass(frozen=True)
class StopAfterUnlikely:
    """Keeps a token that came out with less than this probability, then stops.

    Raises:
      ValueError: names the argument, its value and the range.
    """

    least: float = 0.4

    def __post_init__(self):
        _check_share(self)

    def __call__(self, step: DraftStep) -> jax.Array:
        """See :class:`StopHook`."""
        return step.newest_log_prob < jnp.log(self.least)


def _check_share(hook):
    _check(hook, "least", lambda least: 0 <= least <= 1, "from 0 to 1")


def _check(hook, name, right, wanted):
    value = getattr(hook, name)
    if not is_real(value) or not right(value):
        raise ValueError(f"{type(hook).__name__}: {name} is {value!r}; it must be {wanted}")
