"""What a batch carries from round to round, and what a round reports.

Letters in shapes: B rows, S cache capacity, R rounds of one dispatch, T tokens per verify pass, M stop ids, depth: longest
draft path, n: number of most likely tokens that are reported.
"""

import enum
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specjax.cache import KVCache
from specjax.decoding.adaptive import RecentAcceptance
from specjax.sampling.params import SamplingArrays

NO_TOKEN = -1
"""Fills places of token arrays where no token is; never fed to a model."""


class Finish(enum.IntEnum):
    """Why a row stopped, or that it has not."""

    RUNNING = 0
    STOP = 1
    """It emitted an end token, one of its stop ids or (the host sees to that) one of its stop strings."""
    LENGTH = 2
    """It reached ``max_tokens`` or the end of the context."""
    NAN = 3
    """The target's output for its next token was not a number, or no token was allowed; the tokens before it were emitted."""
    CANCELLED = 4
    """Nobody wants more of it (only the host gives a row up)."""


@flax.struct.dataclass
class SourceCounters:
    """The same by the drafter that a draft came from; J of them, none for drafters that are not made of several.

    A round that drafted nothing belongs to none.

    Attributes:
      num_drafts: [B, J] int32, rounds.
      num_draft_tokens: [B, J] int32, valid draft nodes.
      num_accepted_tokens: [B, J] int32, accepted and emitted draft tokens.
      num_tokens: [B, J] int32, emitted tokens.
    """

    num_drafts: jax.Array
    num_draft_tokens: jax.Array
    num_accepted_tokens: jax.Array
    num_tokens: jax.Array


@flax.struct.dataclass
class Counters:
    """Statistics of the rows so far; see ``specjax.statistics`` for what is made of them.

    Attributes:
      num_drafts: [B] int32, rounds, empty drafts included.
      num_draft_tokens: [B] int32, valid draft nodes.
      num_accepted_tokens_per_pos: [B, depth] int32, accepted and emitted draft tokens by depth.
      num_tested_per_pos: [B, depth] int32, nodes before emitted tokens that had a valid child, by depth: places where acceptance
        was decided.
      overlap_per_pos: [B, depth] float, sum over those nodes of sum(min(p, q)), where the drafter knows q.
      by_source: counts by the drafter that a draft came from.
    """

    num_drafts: jax.Array
    num_draft_tokens: jax.Array
    num_accepted_tokens_per_pos: jax.Array
    num_tested_per_pos: jax.Array
    overlap_per_pos: jax.Array
    by_source: SourceCounters

    @classmethod
    def zeros(cls, batch: int, depth: int, dtype, num_sources: int = 0) -> "Counters":
        """Nothing counted yet."""
        per_row, per_pos = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch, depth), jnp.int32)
        by_source = SourceCounters(*[jnp.zeros((batch, num_sources), jnp.int32)] * 4)
        return cls(per_row, per_row, per_pos, per_pos, per_pos.astype(dtype), by_source)


@flax.struct.dataclass
class Parameters:
    """What a compiled round computes with, beside the state: one pytree.

    Attributes:
      target: the target's parameters.
      drafter: the drafter's.
      next_state: [Q, V] int32, table of the grammar that all rows keep to; None without one.
      round_seconds: [n] float32, what a round takes whose drafts are as deep as ``Round.draft_depths`` say; every round then
        drafts as deep as pays. None: as deep as ``DecodingState.max_depths`` says.
    """

    target: Any
    drafter: Any = ()
    next_state: jax.Array | None = None
    round_seconds: jax.Array | None = None


@flax.struct.dataclass
class DecodingState:
    """A batch between two rounds.

    Attributes:
      tokens: [B, S + 1] int32, prompt and emitted tokens; valid below ``lengths``.
      prompt_lengths: [B] int32, how many of them are the prompt's.
      lengths: [B] int32, committed tokens n. The target's cache holds n - 1 of them: the newest is not in it.
      limits: [B] int32, the row ends at this length.
      finish: [B] int32, a :class:`Finish`; of the RUNNING rows those take part in rounds whose prompt is in.
      stop_token_ids: [B, M] int32, ids that end the row; ``NO_TOKEN`` fills.
      sampling: settings of the rows.
      states: [B] int32, state of the grammar behind the committed text; ``START`` where there is none.
      cache: the target's cache, ``lengths - 1`` entries once the prompt is in.
      observed: [B] int32, tokens that the drafter has observed; ``lengths`` once the prompt is in.
      max_depths: [B] int32, how deep a draft of the row may be at most; 0 makes its rounds steps of plain decoding.
      drafter: the drafter's own state.
      counters: statistics.
      acceptance: what was accepted lately, by which ``max_depths`` are set before every round; None where they are given.
    """

    tokens: jax.Array
    prompt_lengths: jax.Array
    lengths: jax.Array
    limits: jax.Array
    finish: jax.Array
    stop_token_ids: jax.Array
    sampling: SamplingArrays
    states: jax.Array
    cache: KVCache
    observed: jax.Array
    max_depths: jax.Array
    drafter: Any
    counters: Counters
    acceptance: RecentAcceptance | None = None

    @property
    def running(self) -> jax.Array:
        """[B] bool, rows that take part in rounds: they have not finished, and their prompt is in."""
        return (self.finish == Finish.RUNNING) & (self.observed == self.lengths)


@flax.struct.dataclass
class TokenLogprobs:
    """Log-probabilities of emitted tokens, as the target's own logits have them: before temperature, penalties and filters.

    Leading axes are those of the tokens; where no token was emitted, the values mean nothing.

    Attributes:
      chosen: [...] float, of the emitted token.
      top_ids: [..., n] int32, the n most likely tokens, the most likely first.
      top: [..., n] float, theirs.
    """

    chosen: jax.Array
    top_ids: jax.Array
    top: jax.Array


@flax.struct.dataclass
class RoundInfo:
    """What one round reports.

    Attributes:
      tokens: [B, depth + 1] int32, emitted tokens; ``NO_TOKEN`` behind the last.
      counts: [B] int32, how many; 0 for rows that had finished.
      drafted: int32, tokens drafted by all rows together; 0 makes the round a step of plain decoding.
      logprobs: those of the emitted tokens, [B, depth + 1] each; None where the round makes none.
    """

    tokens: jax.Array
    counts: jax.Array
    drafted: jax.Array
    logprobs: TokenLogprobs | None = None


@flax.struct.dataclass
class DispatchInfo:
    """What a dispatch of up to R rounds reports; small, it is all that goes to the host.

    Attributes:
      tokens: [B, R, depth + 1] int32, tokens emitted by each round; ``NO_TOKEN`` fills.
      finish: [B] int32, a :class:`Finish`.
      rounds: int32, rounds that were run.
      drafted: [R] int32, tokens drafted in each of them.
      logprobs: those of the emitted tokens, [B, R, depth + 1] each; None where the rounds make none.
    """

    tokens: jax.Array
    finish: jax.Array
    rounds: jax.Array
    drafted: jax.Array
    logprobs: TokenLogprobs | None = None
