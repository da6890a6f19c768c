"""What a round emitted and what is counted of it, made of a draft and its verdict."""

import jax
import jax.numpy as jnp

from specjax.decoding.state import Counters, DecodingState, SourceCounters
from specjax.tree import ROOT, Draft
from specjax.verification.base import Verdict


def gather(values: jax.Array, places: jax.Array) -> jax.Array:
    """[B, C, ...] the entries of ``values`` [B, S, ...] at ``places`` [B, C]; places behind the end repeat the last."""
    places = jnp.clip(places, 0, values.shape[1] - 1)
    return jnp.take_along_axis(values, places.reshape(places.shape + (1,) * (values.ndim - 2)), axis=1)


def path_nodes(verdict: Verdict) -> jax.Array:
    """[B, depth + 1] the root and the accepted nodes: those whose outputs the emitted tokens were drawn from."""
    return jnp.pad(verdict.path, ((0, 0), (1, 0)), constant_values=ROOT)


def emitted_tokens(draft: Draft, verdict: Verdict) -> jax.Array:
    """[B, depth + 1] accepted tokens, then the correction or bonus token; the rest repeats it."""
    depth = draft.tree.depth
    place = jnp.arange(depth + 1)[None, :]
    accepted = jnp.where(verdict.path > ROOT, gather(draft.tokens, verdict.path - 1), 0) if depth else verdict.path
    accepted = jnp.pad(accepted, ((0, 0), (0, 1)))
    return jnp.where(place < verdict.num_accepted[:, None], accepted, verdict.next_token[:, None]).astype(jnp.int32)


def _overlap(target, proposed):
    """[...] sum(min(p, q)) of log-probabilities [..., V]."""
    return jnp.sum(jnp.exp(jnp.minimum(target, proposed)), axis=-1)


def overlap_on_path(draft: Draft, verdict: Verdict, log_probs) -> jax.Array:
    """[B, depth] by depth the overlap at the node of the accepted path whose children are looked at; 0 without q."""
    tree = draft.tree
    if draft.parent_log_probs is None:
        return jnp.zeros((len(log_probs), tree.depth), log_probs.dtype)
    nodes = path_nodes(verdict)[:, :-1]
    inner, rows = tree.inner_nodes, jnp.asarray(tree.inner_index)[nodes]
    if len(inner) <= tree.depth:
        # A chain, where gathering rows first would cost more than it saves.
        return gather(_overlap(log_probs[:, jnp.asarray(inner)], draft.parent_log_probs), rows)
    return _overlap(gather(log_probs, nodes), gather(draft.parent_log_probs, rows))


def count(state: DecodingState, draft: Draft, verdict: Verdict, common, counts) -> Counters:
    """The rows' counters after a round that emitted ``counts`` [B]; ``common`` [B, depth] is the overlap on the path."""
    counters, tree = state.counters, draft.tree
    took_part = state.running & (counts > 0)
    accepted = jnp.minimum(verdict.num_accepted, counts)
    by_depth = (jnp.arange(tree.depth)[None, :] < accepted[:, None]) & took_part[:, None]
    num_tested, overlap = jnp.zeros_like(counters.num_tested_per_pos), jnp.zeros_like(counters.overlap_per_pos)
    if tree.num_nodes:
        # By depth the node of the accepted path whose children are looked at.
        place, nodes = jnp.arange(tree.depth)[None, :], path_nodes(verdict)[:, :-1]
        parents = jnp.atleast_2d(jnp.asarray(tree.parents, jnp.int32))[:, 1:]
        is_child = parents[:, None, :] == nodes[:, :, None]
        # Not behind an end token: what was accepted there is not emitted and not counted either.
        there = (place <= verdict.num_accepted[:, None]) & (place < counts[:, None])
        tested = there & jnp.any(draft.valid[:, None, :] & is_child, axis=-1)
        num_tested = tested.astype(jnp.int32)
        overlap = jnp.where(tested, common, 0)
    drafted = jnp.where(took_part, jnp.sum(draft.valid, axis=1, dtype=jnp.int32), 0)
    return Counters(
        num_drafts=counters.num_drafts + took_part,
        num_draft_tokens=counters.num_draft_tokens + drafted,
        num_accepted_tokens_per_pos=counters.num_accepted_tokens_per_pos + by_depth,
        num_tested_per_pos=counters.num_tested_per_pos + num_tested,
        overlap_per_pos=counters.overlap_per_pos + overlap,
        by_source=_count_source(counters.by_source, draft.source, took_part, drafted, accepted, counts),
    )


def _count_source(counters: SourceCounters, source, took_part, drafted, accepted, counts) -> SourceCounters:
    if source is None:
        return counters
    is_source = (source[:, None] == jnp.arange(counters.num_drafts.shape[1])[None, :]) & took_part[:, None]

    def added(counter, values):
        return counter + jnp.where(is_source, values[:, None], 0)

    return SourceCounters(
        num_drafts=counters.num_drafts + is_source,
        num_draft_tokens=added(counters.num_draft_tokens, drafted),
        num_accepted_tokens=added(counters.num_accepted_tokens, accepted),
        num_tokens=added(counters.num_tokens, counts),
    )
