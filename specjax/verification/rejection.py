"""Rejection of draft tokens against the ratio of target and draft probability."""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.choices import Choices, Stream
from specjax.tree import ROOT, Draft, Law, count_valid_prefix
from specjax.verification.base import CHAIN, Verdict, check_inputs, no_path, take_node


def one_hot_log_probs(tokens: jax.Array, vocab_size: int, dtype) -> jax.Array:
    """Log-probabilities [..., V] that put everything on ``tokens`` [...].

    Example:
      >>> one_hot_log_probs(jnp.array([1]), 3, jnp.float32).tolist()
      [[-inf, 0.0, -inf]]
    """
    ids = jnp.expand_dims(jnp.arange(vocab_size), tuple(range(tokens.ndim)))
    hot = ids == tokens[..., None]
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
    total = jnp.sum(excess, axis=-1, keepdims=True)
    # log(0) = -inf is meant: such a token cannot be drawn.
    usable = jnp.isfinite(total) & (total > 0)
    return jnp.where(usable, jnp.log(excess) - jnp.log(jnp.where(usable, total, 1)), target)


@dataclasses.dataclass(frozen=True)
class Token:
    """Token verification (Leviathan et al. 2023, arXiv:2211.17192, algorithm 1; Chen et al. 2023, arXiv:2302.01318).

    Draft token x is accepted with probability min(1, p(x) / q(x)); at the first rejection the correction token is drawn from
    max(p - q, 0), normalised; if all pass, the bonus token is drawn from p. A token of p(x) = 0 is never accepted, and a q
    that is no distribution (NaN, infinite) counts as a rejection with the correction drawn from p.
    """

    name = "token"
    lossless = True
    seed_stable = False
    laws = (Law.INDEPENDENT, Law.WITHOUT_REPLACEMENT, Law.DETERMINISTIC)
    shapes = frozenset({CHAIN})

    def __call__(self, choices: Choices, draft: Draft, target_log_probs: jax.Array) -> Verdict:
        """See :class:`specjax.verification.base.Rule`."""
        check_inputs(draft, target_log_probs)
        batch, num_nodes = draft.tokens.shape
        if num_nodes == 0:
            token = choices.categorical(Stream.EMIT, ROOT, target_log_probs[:, ROOT])
            return Verdict(no_path(batch, 0), jnp.zeros((batch,), jnp.int32), token)
        vocab_size, dtype = target_log_probs.shape[-1], target_log_probs.dtype
        deterministic = jnp.array([law is Law.DETERMINISTIC for law in draft.laws])

        def at_token(log_probs):
            return jnp.take_along_axis(log_probs, draft.tokens[..., None], axis=-1)[..., 0]

        target_at_token = at_token(target_log_probs[:, :-1])
        if draft.parent_log_probs is None:
            draft_at_token = jnp.zeros_like(target_at_token)
        else:
            draft_at_token = jnp.where(deterministic[None], 0, at_token(draft.parent_log_probs)).astype(dtype)
        nodes = jnp.arange(1, num_nodes + 1)
        # NaN passes through the minimum and counts as 0; +inf in q gives probability 0.
        probability = jnp.where(jnp.isneginf(target_at_token), 0, jnp.exp(jnp.minimum(target_at_token - draft_at_token, 0)))
        passed = choices.bernoulli(Stream.ACCEPT, nodes, probability)
        num_accepted = count_valid_prefix(passed & draft.valid)
        path = jnp.where(nodes[None, :] <= num_accepted[:, None], nodes[None, :], ROOT).astype(jnp.int32)

        # The chain's node i is the parent of node i + 1, so num_accepted is also the node where the walk ended.
        target = take_node(target_log_probs, num_accepted)
        child = jnp.minimum(num_accepted, num_nodes - 1)
        one_hot = one_hot_log_probs(take_node(draft.tokens, child), vocab_size, dtype)
        if draft.parent_log_probs is None:
            proposed = one_hot
        else:
            proposed = take_node(draft.parent_log_probs.astype(dtype), child)
            proposed = jnp.where(deterministic[child][:, None], one_hot, proposed)
        rejected = (num_accepted < num_nodes) & take_node(draft.valid, child)
        emitted = jnp.where(rejected[:, None], residual_log_probs(target, proposed), target)
        return Verdict(path, num_accepted, choices.categorical(Stream.EMIT, num_accepted, emitted))
