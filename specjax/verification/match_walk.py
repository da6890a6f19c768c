"""The match walk: draw the target's token, and go on while it is one that was drafted.

At every node of the accepted path the target's own next token y is drawn from p. If y is one of the node's children the
walk goes down to it, else y is the correction token; at a leaf y is the bonus token. Every emitted token is a draw of the
target's, so the rule is lossless for every drafter whatsoever, whatever the shapes of its drafts depend on. What differs is the
noise of the draw:

* ``match``: fresh noise at every node (as llama.cpp and others verify).
* ``membership``: the same, under the name that it has where the children are the most likely tokens of the draft (EAGLE, Li et
  al. 2024, arXiv:2401.15077): the walk goes down if the target's draw is a member of them.
* ``gumbel``: argmax of log p + g with the noise g of the position, which depends on seed and position alone. The emitted
  tokens are then a function of target, prompt and seed (Daliri, Musco and Suresh 2024, arXiv:2408.07978), and a drafter
  that takes the top of log q + g with the same g meets them with probability at least (1 - TV) / (1 + TV).
* ``greedy``: no noise; p must be one-hot.

The walk is a loop over depth that stops when every row has left its draft, so noise is made only for positions that are
emitted.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.choices import Choices, Stream, coupled_draw
from specjax.tree import ROOT, Draft, Law
from specjax.verification.base import SHAPES, Verdict, check_inputs, no_path, take_node

# A drafted argmax is met with probability max p, a drawn token with sum p q only.
MOST_LIKELY_FIRST = (Law.DETERMINISTIC, Law.WITHOUT_REPLACEMENT, Law.INDEPENDENT, Law.COUPLED)


def match_walk(draw, draft: Draft, target_log_probs: jax.Array) -> Verdict:
    """Walks down the draft tree along the target's own draws.

    Args:
      draw: from node [B], depth and log-probabilities [B, V] at the node to the target's token [B].
      draft: what was proposed.
      target_log_probs: [B, T, V].
    """
    check_inputs(draft, target_log_probs)
    batch = draft.tokens.shape[0]
    depth = draft.tree.depth
    parents = jnp.atleast_2d(jnp.asarray(draft.tree.parents, jnp.int32))[:, 1:]

    def unfinished(walk):
        return jnp.any(walk[2])

    def step(walk):
        level, node, walking, path, num_accepted, next_token = walk
        token = draw(node, level, take_node(target_log_probs, node))
        next_token = jnp.where(walking, token, next_token)
        # Padding tokens of invalid nodes are never matched; of equal siblings the first is taken.
        matches = (parents == node[:, None]) & draft.valid & (draft.tokens == token[:, None])
        found = walking & jnp.any(matches, axis=1)
        child = jnp.argmax(matches, axis=1).astype(jnp.int32) + 1
        node = jnp.where(found, child, node)
        path = jnp.where((jnp.arange(depth)[None, :] == level) & found[:, None], node[:, None], path)
        return level + 1, node, found, path, num_accepted + found, next_token

    start = (
        jnp.int32(0),
        jnp.full((batch,), ROOT, jnp.int32),
        jnp.ones((batch,), bool),
        no_path(batch, depth),
        jnp.zeros((batch,), jnp.int32),
        jnp.zeros((batch,), jnp.int32),
    )
    if depth == 0:
        _, _, _, path, num_accepted, next_token = (*start[:5], draw(start[1], 0, target_log_probs[:, ROOT]))
    else:
        _, _, _, path, num_accepted, next_token = jax.lax.while_loop(unfinished, step, start)
    return Verdict(path, num_accepted, next_token)


@dataclasses.dataclass(frozen=True)
class Match:
    """Sample and match: a fresh draw of the target's at every node of the path."""

    name = "match"
    lossless = True
    seed_stable = False
    laws: ClassVar[tuple[Law, ...]] = MOST_LIKELY_FIRST
    shapes = frozenset(SHAPES)

    def __call__(self, choices: Choices, draft: Draft, target_log_probs: jax.Array) -> Verdict:
        """See :class:`specjax.verification.base.Rule`."""

        def draw(node, level, log_probs):
            return choices.categorical(Stream.MATCH, node, log_probs)

        return match_walk(draw, draft, target_log_probs)


@dataclasses.dataclass(frozen=True)
class Membership(Match):
    """Sample and match for deterministic children, where no rule that sees one level accepts more."""

    name = "membership"
    laws = (Law.DETERMINISTIC,)
    refusals: ClassVar[dict[Law, str]] = dict.fromkeys(
        (Law.INDEPENDENT, Law.WITHOUT_REPLACEMENT, Law.COUPLED),
        "a drawn token would be met with probability sum(p q) only; use match, or a rule that tests against q",
    )


@dataclasses.dataclass(frozen=True)
class Gumbel:
    """Shared Gumbel noise: the emitted tokens depend on target, prompt and seed alone."""

    name = "gumbel"
    lossless = True
    seed_stable = True
    laws = (Law.COUPLED, *MOST_LIKELY_FIRST[:-1])
    shapes = frozenset(SHAPES)

    def __call__(self, choices: Choices, draft: Draft, target_log_probs: jax.Array) -> Verdict:
        """See :class:`specjax.verification.base.Rule`."""

        def draw(node, level, log_probs):
            return coupled_draw(choices, level, log_probs)

        return match_walk(draw, draft, target_log_probs)


@dataclasses.dataclass(frozen=True)
class Greedy:
    """The most likely token; the run must be greedy (temperature 0), so that this is a draw from p."""

    name = "greedy"
    lossless = True
    seed_stable = True
    laws = MOST_LIKELY_FIRST
    shapes = frozenset(SHAPES)

    def __call__(self, choices: Choices, draft: Draft, target_log_probs: jax.Array) -> Verdict:
        """See :class:`specjax.verification.base.Rule`."""
        del choices  # Nothing is random.

        def draw(node, level, log_probs):
            return jnp.argmax(log_probs, axis=-1).astype(jnp.int32)

        return match_walk(draw, draft, target_log_probs)
