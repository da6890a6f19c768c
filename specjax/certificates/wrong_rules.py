"""Verification rules written a second time, with places to go wrong in; without ``mistake`` they are right.

They follow the published formulas step by step, where the shipped rules share cores and loops: that both are certified and
accept equally often is a check of each other.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.choices import Stream
from specjax.tree import ROOT, Law, count_valid_prefix
from specjax.verification import CHAIN, TREE, Match, Verdict, proposal_log_probs, residual_log_probs
from specjax.verification.base import take_node
from specjax.verification.rejection import acceptance_probability, walk_down


def _chain_path(draft, num_accepted):
    nodes = jnp.arange(1, draft.tree.num_nodes + 1)[None, :]
    return jnp.where(nodes <= num_accepted[:, None], nodes, ROOT).astype(jnp.int32)


def _normalised(excess, otherwise):
    total = jnp.sum(excess, axis=-1, keepdims=True)
    return jnp.where(total > 0, excess / jnp.where(total > 0, total, 1), otherwise)


def _at_drafts(draft, target_log_probs):
    """p and q [B, N] of the draft tokens, and their whole distributions [B, T, V] and [B, N, V]."""
    target, proposed = jnp.exp(target_log_probs), jnp.exp(draft.parent_log_probs)
    p, q = (jnp.take_along_axis(values, draft.tokens[..., None], axis=-1)[..., 0] for values in (target[:, :-1], proposed))
    return p, q, target, proposed


@dataclasses.dataclass(frozen=True)
class TokenRule:
    """Token verification."""

    mistake: str | None = None
    name = "token, written a second time"
    lossless = True
    seed_stable = False
    laws = (Law.INDEPENDENT,)
    shapes = frozenset({CHAIN})

    def __call__(self, choices, draft, target_log_probs):
        """See :class:`specjax.verification.base.Rule`."""
        num_nodes = draft.tree.num_nodes
        nodes = jnp.arange(1, num_nodes + 1)
        p, q, target, proposed = _at_drafts(draft, target_log_probs)
        ratio = q / p if self.mistake == "reversed ratio" else p / q
        passed = choices.bernoulli(Stream.ACCEPT, nodes, jnp.minimum(ratio, 1))
        num_accepted = count_valid_prefix(passed & draft.valid)
        if self.mistake == "batch minimum":
            # How far the batch's other rows come is nothing but a coin to this one.
            others = choices.bernoulli(Stream.ACCEPT, num_nodes + nodes, jnp.full(draft.tokens.shape, 0.5))
            num_accepted = jnp.minimum(num_accepted, count_valid_prefix(others))
        place = jnp.minimum(num_accepted, num_nodes - 1)
        p, q = take_node(target, num_accepted), take_node(proposed, place)
        excess = jnp.maximum(p - q, 0)
        if self.mistake == "correction from p":
            residual = p
        elif self.mistake == "softmax of the residual":
            residual = jax.nn.softmax(excess, axis=-1)
        else:
            residual = _normalised(excess, p)
        bonus = target[:, num_nodes - 1] if self.mistake == "bonus from the node before" else p
        was_drafted = (num_accepted < num_nodes) & take_node(draft.valid, place)
        if self.mistake == "residual where nothing was drafted":
            was_drafted = num_accepted < num_nodes
        emitted = jnp.log(jnp.where(was_drafted[:, None], residual, bonus))
        if self.mistake == "noise of the draft for the residual":
            token = choices.categorical(Stream.DRAFT, place + 1, emitted)
        else:
            token = choices.categorical(Stream.EMIT, num_accepted, emitted)
        return Verdict(_chain_path(draft, num_accepted), num_accepted, token)


@dataclasses.dataclass(frozen=True)
class BlockRule:
    """Block verification, from the root to the end (Sun et al. 2024, arXiv:2403.10444, algorithm 2)."""

    mistake: str | None = None
    name = "block, written a second time"
    lossless = True
    seed_stable = False
    laws = (Law.INDEPENDENT,)
    shapes = frozenset({CHAIN})

    def __call__(self, choices, draft, target_log_probs):
        """See :class:`specjax.verification.base.Rule`."""
        p, q, target, proposed = _at_drafts(draft, target_log_probs)
        # Behind the last draft token nothing is proposed.
        proposed = jnp.pad(proposed, ((0, 0), (0, 1), (0, 0)))
        drafted = jnp.sum(draft.valid, axis=1)
        weights = [jnp.ones_like(p[:, 0])]
        coins = []
        for node in range(1, draft.tree.size):
            weight = jnp.minimum(weights[-1] * p[:, node - 1] / q[:, node - 1], 1)
            left = jnp.sum(jnp.maximum(weight[:, None] * target[:, node] - proposed[:, node], 0), axis=-1)
            whole = left + 1 - weight
            if self.mistake == "another weight":
                whole = jnp.sum(jnp.maximum(target[:, node] - proposed[:, node], 0), axis=-1)
            passes = jnp.where(whole > 0, left / jnp.where(whole > 0, whole, 1), 1)
            passes = jnp.where(node == drafted, weight, passes)
            coins.append(choices.bernoulli(Stream.ACCEPT, node, jnp.where(node <= drafted, passes, 0)))
            weights.append(weight)
        passed = jnp.stack(coins, axis=1)
        if self.mistake == "first failure":
            num_accepted = count_valid_prefix(passed)
        else:
            num_accepted = jnp.max(jnp.where(passed, jnp.arange(1, draft.tree.size)[None, :], 0), axis=1).astype(jnp.int32)
        weight = take_node(jnp.stack(weights, axis=1), num_accepted)
        if self.mistake == "token residual":
            weight = jnp.ones_like(weight)
        p, q = take_node(target, num_accepted), take_node(proposed, num_accepted)
        residual = _normalised(jnp.maximum(weight[:, None] * p - q, 0), p)
        emitted = jnp.log(jnp.where((num_accepted < drafted)[:, None], residual, p))
        return Verdict(_chain_path(draft, num_accepted), num_accepted, choices.categorical(Stream.EMIT, num_accepted, emitted))


@dataclasses.dataclass(frozen=True)
class SiblingRule:
    """Top-down rejection of children without replacement."""

    mistake: str | None = None
    name = "without_replacement, written a second time"
    lossless = True
    seed_stable = False
    laws = (Law.WITHOUT_REPLACEMENT,)
    shapes = frozenset({CHAIN, TREE})
    refusals: ClassVar[dict[Law, str]] = {}

    def __call__(self, choices, draft, target_log_probs):
        """See :class:`specjax.verification.base.Rule`."""

        def test(draft, node, children, target):
            accepted, left = jnp.full_like(node, ROOT), target
            for rank in range(children.shape[1]):
                child = jnp.where(accepted == ROOT, children[:, rank], ROOT)
                drafted = jnp.maximum(child, 1)
                token = jnp.take_along_axis(draft.tokens, drafted[:, None] - 1, axis=1)[:, 0]
                proposed = proposal_log_probs(draft, drafted, target.shape[1], target.dtype)
                if self.mistake == "renormalisation forgotten":
                    proposed = jnp.where(
                        jnp.isneginf(proposed), proposed, take_node(draft.parent_log_probs, self._row(draft, drafted))
                    )
                probability = jnp.where(child > ROOT, acceptance_probability(left, proposed, token), 0)
                passed = choices.bernoulli(Stream.ACCEPT, child, probability)
                rejected = ((child > ROOT) & ~passed)[:, None]
                before = target if self.mistake == "sibling mass kept" else left
                left = jnp.where(rejected, residual_log_probs(before, proposed), left)
                accepted = jnp.where(passed, child, accepted)
            return accepted, left

        return walk_down(test, choices, draft, target_log_probs)

    @staticmethod
    def _row(draft, node):
        return jnp.asarray(draft.tree.inner_index)[jnp.asarray(draft.tree.parents)[node]]


@dataclasses.dataclass(frozen=True)
class FreshNoise(Match):
    """Claims the tokens of plain decoding, and draws fresh ones."""

    name = "gumbel, with fresh noise"
    seed_stable = True
