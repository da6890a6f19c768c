"""k-SEQ: several independent children of a node, tested with one common factor (SpecTr, Sun et al. 2023, arXiv:2310.15141).

With K children drawn independently from q, for a factor rho in [1, K]::

    beta = sum min(q, p / rho)                      chance that one child passes
    accept a child x with probability min(1, p(x) / (rho q(x))); the first that passes is taken
    else draw from p - min(q, p / rho) (1 - (1 - beta)^K) / beta, normalised

This leaves p unchanged if 1 - (1 - beta)^K <= rho beta; equality accepts most and is found by bisection. With one child it is
token verification.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.choices import Choices, Stream
from specjax.tree import ROOT, Draft, Law
from specjax.verification.base import CHAIN, NOISE_COMES_AGAIN, TREE, Verdict
from specjax.verification.proposal import normalised_excess, proposal_log_probs
from specjax.verification.rejection import acceptance_probability, walk_down

BISECTIONS = 30
"""Halvings of [1, K]: any factor not below the best one is right, so this bounds only how much acceptance is lost."""


def common_factor(p: jax.Array, q: jax.Array, num_children: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The smallest factor rho [B] that is right for ``num_children`` [B] draws, its beta [B] and chance of any to pass [B].

    Args:
      p: [B, V], probabilities.
      q: [B, V], probabilities.
      num_children: [B] int32, at least 1.

    Example:
      >>> p, q = jnp.array([[0.5, 0.5]]), jnp.array([[1.0, 0.0]])
      >>> rho, beta, passes = common_factor(p, q, jnp.array([1]))
      >>> rho.round(4).tolist(), beta.round(4).tolist()
      ([1.0], [0.5])
    """
    count = num_children.astype(p.dtype)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        # 1 - rho beta <= (1 - beta)^K, as sums that are exact where p and q are close and both sides are tiny.
        missed = jnp.sum(jnp.maximum(q - p / middle[:, None], 0), axis=-1)
        right = jnp.sum(jnp.maximum(p - q * middle[:, None], 0), axis=-1) <= missed**count
        return jnp.where(right, low, middle), jnp.where(right, middle, high)

    _, rho = jax.lax.fori_loop(0, BISECTIONS, halve, (jnp.ones_like(count), count))
    beta = jnp.minimum(jnp.sum(jnp.minimum(q, p / rho[:, None]), axis=-1), 1)
    # 1 - (1 - beta)^K without cancellation for small beta.
    return rho, beta, -jnp.expm1(count * jnp.log1p(-beta))


@dataclasses.dataclass(frozen=True)
class KSeq:
    """k-SEQ at every node of a chain or tree of independent children."""

    name = "kseq"
    lossless = True
    seed_stable = False
    laws = (Law.INDEPENDENT,)
    shapes = frozenset({CHAIN, TREE})
    refusals: ClassVar[dict[Law, str]] = {
        Law.COUPLED: NOISE_COMES_AGAIN,
        Law.DETERMINISTIC: "its factor is derived for children drawn from one q; use membership or traversal",
        Law.WITHOUT_REPLACEMENT: "its factor is derived for children drawn from one q; use without_replacement or traversal",
    }

    def __call__(self, choices: Choices, draft: Draft, target_log_probs: jax.Array) -> Verdict:
        """See :class:`specjax.verification.base.Rule`."""

        def test(draft, node, children, target):
            del node
            tested = children > ROOT
            first = jnp.maximum(jnp.max(children, axis=1), 1)  # any child: all have the same q
            proposed = proposal_log_probs(draft, first, target.shape[1], target.dtype)
            p, q = jnp.exp(target), jnp.exp(proposed)
            rho, beta, passes = common_factor(p, q, jnp.maximum(jnp.sum(tested, axis=1), 1))

            def one(rank, accepted):
                child = jnp.where(accepted == ROOT, jnp.take(children, rank, axis=1), ROOT)
                token = jnp.take_along_axis(draft.tokens, jnp.maximum(child, 1)[:, None] - 1, axis=1)[:, 0]
                probability = acceptance_probability(target, proposed, token, jnp.log(rho))
                probability = jnp.where(child > ROOT, probability, 0)
                passed = choices.bernoulli(Stream.ACCEPT, child, probability) & (child > ROOT)
                return jnp.where(passed, child, accepted)

            accepted = jax.lax.fori_loop(0, children.shape[1], one, jnp.full((len(children),), ROOT, jnp.int32))
            share = jnp.where(beta > 0, passes / jnp.where(beta > 0, beta, 1), 0)
            excess = jnp.maximum(p - jnp.minimum(q, p / rho[:, None]) * share[:, None], 0)
            left = normalised_excess(excess, target)[0]
            return accepted, jnp.where(jnp.any(tested, axis=1)[:, None], left, target)

        return walk_down(test, choices, draft, target_log_probs)
