"""Traversal verification: whole paths are tested, the deepest first (Weng et al. 2025, arXiv:2505.12398).

The tree is gone through from leaf to root. Every node carries a weight, the probability with which its path is accepted once all
below it was rejected; on the way down, for a child x that was drawn from q (by its law)::

    w(root) = 1,   w(child) = min(1, w(node) p(x) / q(x))

A leaf is accepted with probability w. Where a child is rejected, what it leaves to its parent is::

    r = max(w p - q, 0),   S = sum r,   p becomes r / S,   w becomes S / (S + 1 - w)      (0 / 0 is 1)

and the parent's next child is gone into with these; after its last child the parent is tested itself. The next token is drawn
from what p has become at the accepted node.

On a chain this is block verification (Sun et al. 2024, arXiv:2403.10444, algorithm 2), the best rule that looks at one
path: the deepest node that passes counts, not the first failure.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax.choices import Choices, Stream
from specjax.tree import ROOT, Draft, DraftTree, Law
from specjax.verification.base import CHAIN, NOISE_COMES_AGAIN, TREE, Verdict, check_inputs, fixed_tree, no_path, take_node
from specjax.verification.proposal import normalised_excess, proposal_log_probs, without_broken_proposals


def visits(tree: DraftTree) -> tuple[np.ndarray, np.ndarray]:
    """The order of a traversal: nodes [2 N] and whether each visit goes down into the node, or leaves it.

    The root needs no test: its weight is 1 all along, and it is what is left when nothing else was accepted.

    Example:
      >>> nodes, down = visits(DraftTree((-1, 0, 0, 1)))
      >>> [f"{'down to' if d else 'test'} {node}" for node, d in zip(nodes, down)]
      ['down to 1', 'down to 3', 'test 3', 'test 1', 'down to 2', 'test 2']
    """
    order = []

    def go(node):
        for child in tree.children[node]:
            order.append((child, True))
            go(child)
            order.append((child, False))

    go(ROOT)
    nodes, down = zip(*order, strict=True)
    return np.array(nodes, np.int32), np.array(down)


@dataclasses.dataclass(frozen=True)
class Traversal:
    """Traversal verification of chains and trees."""

    name = "traversal"
    lossless = True
    seed_stable = False
    laws = (Law.WITHOUT_REPLACEMENT, Law.INDEPENDENT, Law.DETERMINISTIC)
    shapes = frozenset({CHAIN, TREE})
    refusals: ClassVar[dict[Law, str]] = {Law.COUPLED: NOISE_COMES_AGAIN}

    def __call__(self, choices: Choices, draft: Draft, target_log_probs: jax.Array) -> Verdict:
        """See :class:`specjax.verification.base.Rule`."""
        check_inputs(draft, target_log_probs)
        draft = without_broken_proposals(draft)
        batch, tree = draft.tokens.shape[0], fixed_tree(draft)
        depth = tree.depth
        if depth == 0:
            token = choices.categorical(Stream.EMIT, ROOT, target_log_probs[:, ROOT])
            return Verdict(no_path(batch, 0), jnp.zeros((batch,), jnp.int32), token)
        vocab_size, dtype = target_log_probs.shape[-1], target_log_probs.dtype
        nodes, down = map(jnp.asarray, visits(tree))
        parents = jnp.asarray(tree.parents, jnp.int32)
        # The root counts as drafted.
        drafted = jnp.pad(draft.valid, ((0, 0), (1, 0)), constant_values=True)
        tokens = jnp.pad(draft.tokens, ((0, 0), (1, 0)))

        def proposal(node):
            return proposal_log_probs(draft, jnp.broadcast_to(node, (batch,)), vocab_size, dtype)

        # ``p`` is what log p has become at the parent of the node.
        def go_down(node, p, log_w, accepted):
            token = tokens[:, node, None]
            p_of_token = jnp.take_along_axis(p, token, axis=1)[:, 0]
            q_of_token = jnp.take_along_axis(proposal(node), token, axis=1)[:, 0]
            weight = jnp.minimum(log_w[:, parents[node]] + p_of_token - q_of_token, 0)
            # What the target excludes is never accepted, whatever q is.
            return p, log_w.at[:, node].set(jnp.where(jnp.isneginf(p_of_token), -jnp.inf, weight)), accepted

        def test(node, p, log_w, accepted):
            testing = (accepted < ROOT) & drafted[:, node]
            probability = jnp.where(testing, jnp.exp(log_w[:, node]), 0)
            passed = testing & choices.bernoulli(Stream.ACCEPT, node, probability)
            rejected = testing & ~passed
            p, log_w = jax.lax.cond(jnp.any(rejected), lambda *rest: reject(node, rejected, *rest), lambda *rest: rest, p, log_w)
            return p, log_w, jnp.where(passed, node, accepted)

        def reject(node, rejected, p, log_w):
            w = log_w[:, parents[node]]
            left, total = normalised_excess(jnp.maximum(jnp.exp(w[:, None] + p) - jnp.exp(proposal(node)), 0), p)
            whole = total - jnp.expm1(w)
            weight = jnp.where(whole > 0, jnp.log(total) - jnp.log(whole), 0)
            weight = jnp.where(jnp.isnan(total), w, weight)
            return jnp.where(rejected[:, None], left, p), log_w.at[:, parents[node]].set(jnp.where(rejected, weight, w))

        def unfinished(carry):
            index, _, _, accepted = carry
            return (index < len(nodes)) & jnp.any(accepted < ROOT)

        def visit(carry):
            index, log_p, log_w, accepted = carry
            node = nodes[index]
            # Only the parent's row goes through the conditions: they would copy the whole array at every visit.
            p, log_w, accepted = jax.lax.cond(down[index], go_down, test, node, log_p[:, parents[node]], log_w, accepted)
            return index + 1, log_p.at[:, parents[node]].set(p), log_w, accepted

        nothing = jnp.full((batch,), ROOT - 1, jnp.int32)
        start = (jnp.int32(0), target_log_probs, jnp.zeros(drafted.shape, dtype), nothing)
        _, log_p, _, accepted = jax.lax.while_loop(unfinished, visit, start)
        accepted = jnp.maximum(accepted, ROOT)
        num_accepted = jnp.asarray(tree.depths, jnp.int32)[accepted]
        token = choices.categorical(Stream.EMIT, accepted, take_node(log_p, accepted))
        return Verdict(jnp.asarray(tree.path_table)[accepted], num_accepted, token)


@dataclasses.dataclass(frozen=True)
class Block(Traversal):
    """Block verification: traversal of a chain."""

    name = "block"
    laws = (Law.INDEPENDENT, Law.WITHOUT_REPLACEMENT, Law.DETERMINISTIC)
    shapes = frozenset({CHAIN})
