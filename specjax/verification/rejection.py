"""Top-down rejection: at every node the children are tested one after another against the ratio of p and q.

At the root and at every accepted node, with r = p to begin with, for each child x in order, drawn from q (by its law)::

    accept x with probability min(1, r(x) / q(x)); the walk goes on at x
    else r becomes max(r - q, 0), normalised

When no child is left the correction token is drawn from r; at a leaf that is p itself, and the token is the bonus.

* ``token``: chains (Leviathan et al. 2023, arXiv:2211.17192, algorithm 1; Chen et al. 2023, arXiv:2302.01318).
* ``multi_round``: several independent children (SpecInfer, Miao et al. 2024, arXiv:2305.09781, section 4.3).
* ``without_replacement``: children without replacement (recursive rejection sampling: Jeon et al. 2024, arXiv:2402.14160;
  Sequoia, Chen et al. 2024, arXiv:2402.12374).

The residual is made only where something was rejected, and noise for a token only once, at the emitted position.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.choices import Choices, Stream
from specjax.tree import ROOT, Draft, Law
from specjax.verification.base import CHAIN, NOISE_COMES_AGAIN, TREE, Verdict, check_inputs, fixed_tree, no_path, take_node
from specjax.verification.proposal import proposal_log_probs, residual_log_probs, without_broken_proposals

NodeTest = Callable[[Draft, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""From draft, node [B], its children [B, ranks] (``ROOT`` where there is none that is valid) and log p [B, V] at the node to the
accepted child [B] (``ROOT`` for none) and the log-probabilities [B, V] of the next token if none is accepted. Where a row has no
valid child these are log p."""


def walk_down(test: NodeTest, choices: Choices, draft: Draft, target_log_probs: jax.Array) -> Verdict:
    """Walks from the root to accepted children until none is accepted, and draws the next token there.

    Args:
      test: decides about the children of one node.
      choices: of the next token.
      draft: what was proposed.
      target_log_probs: [B, T, V].
    """
    check_inputs(draft, target_log_probs)
    batch, tree = draft.tokens.shape[0], fixed_tree(draft)
    depth = tree.depth
    draft = without_broken_proposals(draft)
    root = jnp.full((batch,), ROOT, jnp.int32)

    def drafted_children(node):
        children = jnp.asarray(tree.children_table)[node]
        drafted = jnp.take_along_axis(draft.valid, jnp.maximum(children - 1, 0), axis=1)
        return jnp.where((children > ROOT) & drafted, children, ROOT)

    def unfinished(walk):
        return jnp.any(walk[2] > ROOT)

    def step(walk):
        # ``log_probs`` are p at the node while a row walks, and what its next token is drawn from once it has ended.
        level, node, children, path, num_accepted, log_probs = walk
        child, left = test(draft, node, children, log_probs)
        found = child > ROOT
        node = jnp.where(found, child, node)
        log_probs = jnp.where(found[:, None], take_node(target_log_probs, node), left)
        path = jnp.where((jnp.arange(depth)[None, :] == level) & found[:, None], node[:, None], path)
        children = jnp.where(found[:, None], drafted_children(node), ROOT)
        return level + 1, node, children, path, num_accepted + found, log_probs

    walk = jnp.int32(0), root, None, no_path(batch, depth), root, target_log_probs[:, ROOT]
    if depth:
        walk = jax.lax.while_loop(unfinished, step, (*walk[:2], drafted_children(root), *walk[3:]))
    _, node, _, path, num_accepted, log_probs = walk
    return Verdict(path, num_accepted, choices.categorical(Stream.EMIT, node, log_probs))


def acceptance_probability(target: jax.Array, draft: jax.Array, token: jax.Array, log_scale=0.0) -> jax.Array:
    """[B] min(1, p(x) / (q(x) scale)) at ``token`` [B]; 0 where p(x) is 0, NaN (never accepted) where q is.

    Args:
      target: [B, V], log p.
      draft: [B, V], log q.
      token: [B].
      log_scale: [B] or a number, log of what q is multiplied by.
    """
    p, q = (jnp.take_along_axis(values, token[:, None], axis=1)[:, 0] for values in (target, draft))
    return jnp.where(jnp.isneginf(p), 0, jnp.exp(jnp.minimum(p - q - log_scale, 0)))


def one_after_another(choices: Choices) -> NodeTest:
    """The test that passes on the residual of a rejected child to the next child."""

    def test(draft, node, children, target):
        def one(rank, carry):
            accepted, left = carry
            child = jnp.take(children, rank, axis=1)
            child = jnp.where(accepted == ROOT, child, ROOT)
            testing = child > ROOT
            drafted = jnp.maximum(child, 1)  # a node to look at where none is tested
            proposed = proposal_log_probs(draft, drafted, target.shape[1], target.dtype)
            token = jnp.take_along_axis(draft.tokens, drafted[:, None] - 1, axis=1)[:, 0]
            probability = jnp.where(testing, acceptance_probability(left, proposed, token), 0)
            passed = choices.bernoulli(Stream.ACCEPT, child, probability) & testing
            rejected = testing & ~passed
            left = jax.lax.cond(
                jnp.any(rejected),
                lambda left: jnp.where(rejected[:, None], residual_log_probs(left, proposed), left),
                lambda left: left,
                left,
            )
            return jnp.where(passed, child, accepted), left

        return jax.lax.fori_loop(0, children.shape[1], one, (jnp.full_like(node, ROOT), target))

    return test


@dataclasses.dataclass(frozen=True)
class Token:
    """Token verification of chains.

    Draft token x is accepted with probability min(1, p(x) / q(x)); at the first rejection the correction token is drawn from
    max(p - q, 0), normalised; if all pass, the bonus token is drawn from p. A token of p(x) = 0 is never accepted, and a q
    that is no distribution (NaN, infinite) counts as a rejection with the correction drawn from p.
    """

    name = "token"
    lossless = True
    seed_stable = False
    laws: ClassVar[tuple[Law, ...]] = (Law.INDEPENDENT, Law.WITHOUT_REPLACEMENT, Law.DETERMINISTIC)
    shapes = frozenset({CHAIN})
    refusals: ClassVar[dict[Law, str]] = {Law.COUPLED: NOISE_COMES_AGAIN}

    def __call__(self, choices: Choices, draft: Draft, target_log_probs: jax.Array) -> Verdict:
        """See :class:`specjax.verification.base.Rule`."""
        return walk_down(one_after_another(choices), choices, draft, target_log_probs)


@dataclasses.dataclass(frozen=True)
class MultiRound(Token):
    """Several children of a node, each drawn from q independently of the others."""

    name = "multi_round"
    laws = (Law.INDEPENDENT, Law.DETERMINISTIC)
    shapes = frozenset({CHAIN, TREE})
    refusals: ClassVar[dict[Law, str]] = {
        Law.COUPLED: NOISE_COMES_AGAIN,
        Law.WITHOUT_REPLACEMENT: "later siblings come from what earlier ones left of q; use without_replacement or traversal",
    }


@dataclasses.dataclass(frozen=True)
class WithoutReplacement(Token):
    """Children drawn without replacement, in any mixture with independent and deterministic ones."""

    name = "without_replacement"
    laws = (Law.WITHOUT_REPLACEMENT, Law.INDEPENDENT, Law.DETERMINISTIC)
    shapes = frozenset({CHAIN, TREE})
