"""Rules, drafters and keys that are wrong in ways that were met in practice, and a right one beside them."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from specjax.choices import Stream
from specjax.drafters.base import NoDrafter
from specjax.tree import ROOT, Draft, DraftTree, Law, count_valid_prefix
from specjax.verification import CHAIN, Verdict
from specjax.verification.base import take_node


@dataclasses.dataclass(frozen=True)
class ConstantDrafter(NoDrafter):
    """Drafts a chain, always from the same distribution.

    Attributes:
      probabilities: q.
      length: draft tokens.
      law: as stated to the rule.
      takes_argmax: whether it in truth proposes the most likely token.
    """

    probabilities: tuple[float, ...]
    length: int = 2
    law: Law = Law.INDEPENDENT
    takes_argmax: bool = False
    law_choices: ClassVar = (Law.INDEPENDENT,)

    @property
    def tree(self):
        return DraftTree.chain(self.length)

    def propose(self, params, state, context, choices, num_draft):
        del params
        shape = (num_draft.shape[0], len(self.probabilities))
        log_probs = jnp.broadcast_to(jnp.log(jnp.asarray(self.probabilities))[None], shape).astype(context.logits_dtype)
        if self.takes_argmax:
            tokens = [jnp.argmax(log_probs, axis=1)] * self.length
        else:
            tokens = [choices.categorical(Stream.DRAFT, node, log_probs) for node in range(1, self.length + 1)]
        draft = Draft(
            tokens=jnp.stack(tokens, axis=1).astype(jnp.int32),
            valid=jnp.arange(self.length)[None, :] < num_draft[:, None],
            parent_log_probs=jnp.stack([log_probs] * self.length, axis=1),
            tree=self.tree,
            laws=(self.law,) * self.length,
        )
        return draft, state


@dataclasses.dataclass(frozen=True)
class TokenRule:
    """Token verification written a second time, with places to go wrong in; without ``mistake`` it is right."""

    mistake: str | None = None
    name = "mutant"
    lossless = True
    seed_stable = False
    laws = (Law.INDEPENDENT,)
    shapes = frozenset({CHAIN})

    def __call__(self, choices, draft, target_log_probs):
        target, proposed = jnp.exp(target_log_probs), jnp.exp(draft.parent_log_probs)
        num_nodes = draft.tree.num_nodes
        p, q = (jnp.take_along_axis(values, draft.tokens[..., None], axis=-1)[..., 0] for values in (target[:, :-1], proposed))
        ratio = q / p if self.mistake == "reversed ratio" else p / q
        passed = choices.bernoulli(Stream.ACCEPT, jnp.arange(1, num_nodes + 1), jnp.minimum(ratio, 1))
        num_accepted = count_valid_prefix(passed & draft.valid)
        place = jnp.minimum(num_accepted, num_nodes - 1)
        p, q = take_node(target, num_accepted), take_node(proposed, place)
        excess = jnp.maximum(p - q, 0)
        if self.mistake == "correction from p":
            residual = p
        elif self.mistake == "softmax of the residual":
            residual = jnp.exp(excess) / jnp.sum(jnp.exp(excess), axis=-1, keepdims=True)
        else:
            total = jnp.sum(excess, axis=-1, keepdims=True)
            residual = jnp.where(total > 0, excess / jnp.where(total > 0, total, 1), p)
        bonus = target[:, num_nodes - 1] if self.mistake == "bonus from the node before" else p
        was_drafted = (num_accepted < num_nodes) & take_node(draft.valid, place)
        if self.mistake == "residual where nothing was drafted":
            was_drafted = num_accepted < num_nodes
        emitted = jnp.log(jnp.where(was_drafted[:, None], residual, bonus))
        if self.mistake == "noise of the draft for the residual":
            token = choices.categorical(Stream.DRAFT, place + 1, emitted)
        else:
            token = choices.categorical(Stream.EMIT, num_accepted, emitted)
        nodes = jnp.arange(1, num_nodes + 1)[None, :]
        return Verdict(jnp.where(nodes <= num_accepted[:, None], nodes, ROOT).astype(jnp.int32), num_accepted, token)


def key_of_position(stream, node, committed):
    """Keys that forget which round they are for: a coin behind the accepted prefix comes again."""
    return stream, node + committed
