"""How draft tokens are drawn from q, by law.

Letters in shapes: B rows, V vocabulary, k earlier siblings.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from specjax.choices import Choices, Stream
from specjax.drafters.base import Context
from specjax.tree import Law

DRAWN = (Law.INDEPENDENT, Law.WITHOUT_REPLACEMENT)
"""Laws by which tokens are drawn from q."""


def draw_children(
    choices: Choices,
    laws: Sequence[Law],
    nodes: Sequence[int],
    log_probs: jax.Array,
    noise: jax.Array | None,
    ranking: jax.Array | None = None,
    greedy: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Draws the children of one node, in order.

    ``independent``: from q. ``without_replacement``: from q less the earlier siblings. ``deterministic``: the first of the
    ranking that no earlier sibling is. ``coupled``: the same with the noise of the position added.

    Args:
      choices: where randomness comes from.
      laws: of each child.
      nodes: number of each child.
      log_probs: [B, V], log q at the parent.
      noise: [B, V], shared Gumbel noise of the position; None where no law is coupled.
      ranking: [B, V], what laws that draw nothing order the tokens by; None is log q. Where q is one-hot, what it was made of.
      greedy: [B] bool, rows that draw nothing whatever the law says: theirs are the best of the ranking.

    Returns:
      tokens [B, children] int32, and possible [B, children]: false where no token is left to draw.

    Example:
      >>> laws, q = (Law.DETERMINISTIC,) * 3, jnp.log(jnp.array([[0.2, 0.8, 0.0]]))
      >>> tokens, possible = draw_children(None, laws, (1, 2, 3), q, None)
      >>> tokens.tolist()[0][:2], possible.tolist()
      ([1, 0], [[True, True, False]])
    """
    drawn, possible = [], []
    # Of the tokens that earlier siblings left.
    left, left_in_ranking = log_probs, log_probs if ranking is None else ranking
    ids = jnp.arange(log_probs.shape[-1])[None, :]
    for law, node in zip(laws, nodes, strict=True):
        scores = left_in_ranking
        if law is Law.COUPLED:
            assert noise is not None
            scores = scores + noise
        token = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        available = jnp.any(left_in_ranking > -jnp.inf, axis=-1)
        if law in DRAWN:
            source = log_probs if law is Law.INDEPENDENT else _normalised(left)
            by_chance = choices.categorical(Stream.DRAFT, node, source)
            there = jnp.ones(token.shape, bool) if law is Law.INDEPENDENT else jnp.any(left > -jnp.inf, axis=-1)
            if greedy is None:
                token, available = by_chance, there
            else:
                token, available = jnp.where(greedy, token, by_chance), jnp.where(greedy, available, there)
        drawn.append(token)
        possible.append(available)
        taken = ids == token[:, None]
        left, left_in_ranking = (jnp.where(taken, -jnp.inf, scores) for scores in (left, left_in_ranking))
    return jnp.stack(drawn, axis=1), jnp.stack(possible, axis=1)


def only_where(rows: jax.Array, log_probs: jax.Array) -> jax.Array:
    """``log_probs`` [B, V] of the ``rows`` [B] that draw; the others get a certain token, which takes no noise."""
    certain = jnp.where(jnp.arange(log_probs.shape[-1]) == 0, 0, -jnp.inf).astype(log_probs.dtype)
    return jnp.where(rows[:, None], log_probs, certain[None])


def most_likely(log_probs: jax.Array) -> jax.Array:
    """[..., V] log-probabilities that put everything on the most likely token."""
    best = jnp.argmax(log_probs, axis=-1, keepdims=True)
    ids = jnp.expand_dims(jnp.arange(log_probs.shape[-1]), tuple(range(log_probs.ndim - 1)))
    return jnp.where(ids == best, 0, -jnp.inf).astype(log_probs.dtype)


def evenly(tokens: jax.Array, possible: jax.Array, width: int, dtype) -> jax.Array:
    """[B, width] log-probabilities, the same for each of the ``possible`` [B, k] ``tokens`` [B, k]; token 0's where none is.

    What rows that take the best of a ranking say they drew from. At temperature 0 every q is as right as any: p is one-hot, rules
    accept no other token and correct to none, and the right token is accepted for sure where p is at least q.

    Example:
      >>> jnp.exp(evenly(jnp.array([[2, 0]]), jnp.array([[True, True]]), 3, jnp.float32)).tolist()
      [[0.5, 0.0, 0.5]]
    """
    possible = possible.at[:, 0].set(possible[:, 0] | ~jnp.any(possible, axis=1))
    is_one = (jnp.arange(width)[None, None, :] == tokens[..., None]) & possible[..., None]
    share = -jnp.log(jnp.sum(possible, axis=1, keepdims=True).astype(dtype))
    return jnp.where(jnp.any(is_one, axis=1), share, -jnp.inf)


def softened(context: Context) -> Context:
    """The context with greedy rows at temperature 1: a one-hot q says nothing about how sure the model is."""
    sampling = context.sampling
    greedy = sampling.temperature <= 0
    sampling = sampling.replace(
        temperature=jnp.where(greedy, 1, sampling.temperature),
        top_k=jnp.where(greedy, 0, sampling.top_k),
        top_p=jnp.where(greedy, 1, sampling.top_p),
        min_p=jnp.where(greedy, 0, sampling.min_p),
    )
    return context.replace(distribution=context.distribution.replace(sampling=sampling))


def _normalised(log_probs: jax.Array) -> jax.Array:
    """Log-probabilities [B, V] of what is left; token 0 where nothing is."""
    nothing = jnp.max(log_probs, axis=-1) == -jnp.inf
    return jax.nn.log_softmax(only_where(~nothing, log_probs), axis=-1)
