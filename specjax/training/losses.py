"""How far a draft's distribution is from the target's, over the tokens that the draft knows.

Letters in shapes: ... any leading axes, R tokens that the draft knows.
"""

import jax
import jax.numpy as jnp

LOSSES = ("kl", "ce", "tv")
"""``kl``: KL(target || draft). ``ce``: -log draft of the token that came. ``tv``: total variation, 1 less the chance that token
verification accepts (Leviathan et al. 2023, arXiv:2211.17192, corollary 3.6)."""


def distances(kind: str, draft_logits: jax.Array, target_logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss [...] at every place.

    Args:
      kind: one of ``LOSSES``.
      draft_logits: [..., R].
      target_logits: [..., R], the target's for the same tokens; both are normalised over them.
      labels: [...] int32, which of the R tokens came; R where it was another one, whose loss is 0 with ``ce``.

    Example:
      >>> logits = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.9, 0.1]]))
      >>> [round(float(distances(kind, *logits, jnp.array([0]))[0]), 3) for kind in LOSSES]
      [0.368, 0.693, 0.4]
    """
    log_q = jax.nn.log_softmax(draft_logits, axis=-1)
    if kind == "ce":
        known = labels < log_q.shape[-1]
        chosen = jnp.take_along_axis(log_q, jnp.where(known, labels, 0)[..., None], axis=-1)[..., 0]
        return jnp.where(known, -chosen, 0)
    log_p = jax.nn.log_softmax(target_logits, axis=-1)
    if kind == "kl":
        return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    return 0.5 * jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), axis=-1)


def check_loss(kind: str, owner: str) -> None:
    """Raises ValueError unless ``kind`` is one of ``LOSSES``."""
    if kind not in LOSSES:
        raise ValueError(f"{owner}: loss is {kind!r}; it must be one of {', '.join(LOSSES)}")


def weighted_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Mean of ``values`` with ``weights`` of the same shape; 0 where all weights are."""
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1e-9)


NO_RANK = 1 << 20
"""Rank of a token that the draft does not know."""


def rank_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """[...] int32, how many of the R tokens come before ``labels`` [...] in ``logits`` [..., R]; ``NO_RANK`` for label R.

    Example:
      >>> rank_of(jnp.array([[0.1, 0.9, 0.5]] * 2), jnp.array([2, 3])).tolist()
      [1, 1048576]
    """
    known = labels < logits.shape[-1]
    own = jnp.take_along_axis(logits, jnp.where(known, labels, 0)[..., None], axis=-1)
    return jnp.where(known, jnp.sum(logits > own, axis=-1, dtype=jnp.int32), NO_RANK)
