"""What a draft token was drawn from, and what is left of the target's distribution when it is rejected.

Letters in shapes: B rows, N draft nodes, T = N + 1, P nodes with children, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.tree import Draft, Law
from specjax.verification.base import fixed_tree


def one_hot_log_probs(tokens: jax.Array, vocab_size: int, dtype) -> jax.Array:
    """Log-probabilities [..., V] that put everything on ``tokens`` [...].

    Example:
      >>> one_hot_log_probs(jnp.array([1]), 3, jnp.float32).tolist()
      [[-inf, 0.0, -inf]]
    """
    hot = _is_token(tokens, vocab_size)
    return jnp.where(hot, jnp.asarray(0, dtype), jnp.asarray(-jnp.inf, dtype))


def residual_log_probs(target: jax.Array, draft: jax.Array) -> jax.Array:
    """log of max(p - q, 0), normalised: what a rejected token is replaced by.

    Args:
      target: [..., V], log p.
      draft: [..., V], log q. A row with a NaN or +inf is not a distribution; the residual is then p.

    Returns:
      [..., V]. Where p - q is nowhere positive (p = q up to rounding) it is log p.

    Example:
      >>> p, q = jnp.array([0.5, 0.3, 0.2]), jnp.array([0.2, 0.3, 0.5])
      >>> jnp.exp(residual_log_probs(jnp.log(p), jnp.log(q))).tolist()
      [1.0, 0.0, 0.0]
    """
    excess = jnp.maximum(jnp.exp(target) - jnp.exp(draft), 0)
    return normalised_excess(jnp.where(jnp.isposinf(draft), jnp.nan, excess), target)[0]


def normalised_excess(excess: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """log of ``excess`` [..., V] over its sum, and the sum [...]; ``target`` where the sum is 0 or not a number."""
    total = jnp.sum(excess, axis=-1, keepdims=True)
    usable = jnp.isfinite(total) & (total > 0)
    # log(0) = -inf is meant: such a token cannot be drawn.
    return jnp.where(usable, jnp.log(excess) - jnp.log(jnp.where(usable, total, 1)), target), total[..., 0]


def without_broken_proposals(draft: Draft) -> Draft:
    """The draft less the nodes whose q is not a distribution (NaN or infinite), and all behind them.

    Such a token was drawn from nobody knows what. Taken as never drafted it is rejected, and the correction comes from p.
    """
    if draft.parent_log_probs is None:
        return draft
    # A NaN is not below infinity either; a row without any possible token is no distribution.
    log_q = draft.parent_log_probs
    broken = ~(jnp.all(log_q < jnp.inf, axis=-1) & jnp.any(log_q > -jnp.inf, axis=-1))
    drawn = np.array([law is not Law.DETERMINISTIC for law in draft.laws])
    tree = fixed_tree(draft)
    of_node = jnp.take(broken, tree.inner_index[list(tree.parents[1:])], axis=1)
    return draft.replace(valid=draft.valid & ~(of_node & drawn[None, :])).checked()


def proposal_log_probs(draft: Draft, node: jax.Array, vocab_size: int, dtype) -> jax.Array:
    """[B, V] log of the distribution that each row's draft ``node`` [B] was drawn from, by its law.

    ``independent``: its parent's q. ``deterministic``: one-hot. ``without_replacement``: q without the tokens of its earlier
    valid siblings, whatever their laws, normalised.

    Args:
      draft: what was proposed.
      node: [B] draft nodes, from 1.
      vocab_size: V.
      dtype: of the result.
    """
    row = jnp.arange(node.shape[0])
    token = draft.tokens[row, node - 1]
    one_hot = one_hot_log_probs(token, vocab_size, dtype)
    if draft.parent_log_probs is None:
        return one_hot
    tree = fixed_tree(draft)
    parent = jnp.asarray(tree.parents, jnp.int32)[node]
    proposed = draft.parent_log_probs[row, jnp.asarray(tree.inner_index)[parent]].astype(dtype)
    kinds = set(draft.laws)
    if Law.WITHOUT_REPLACEMENT in kinds and not tree.is_chain:
        siblings = jnp.asarray(tree.children_table)[parent]
        earlier = (siblings > 0) & (siblings < node[:, None])
        earlier &= jnp.take_along_axis(draft.valid, jnp.maximum(siblings - 1, 0), axis=1)
        taken = jnp.take_along_axis(draft.tokens, jnp.maximum(siblings - 1, 0), axis=1)
        removed = jnp.any(_is_token(taken, vocab_size) & earlier[..., None], axis=1)
        left = jax.nn.log_softmax(jnp.where(removed, -jnp.inf, proposed), axis=-1)
        proposed = jnp.where(_has_law(draft, node, Law.WITHOUT_REPLACEMENT)[:, None], left, proposed)
    if Law.DETERMINISTIC in kinds:
        proposed = jnp.where(_has_law(draft, node, Law.DETERMINISTIC)[:, None], one_hot, proposed)
    return proposed


def _has_law(draft: Draft, node: jax.Array, law: Law) -> jax.Array:
    """[B] whether each row's ``node`` was drawn by ``law``."""
    return jnp.asarray(np.array([each is law for each in draft.laws]))[node - 1]


def _is_token(tokens: jax.Array, vocab_size: int) -> jax.Array:
    """[..., V] bool, true at ``tokens`` [...]."""
    ids = jnp.expand_dims(jnp.arange(vocab_size), tuple(range(tokens.ndim)))
    return ids == tokens[..., None]
