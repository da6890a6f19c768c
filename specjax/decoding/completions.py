"""What the host makes of the tokens that come from the device: completions, piece by piece."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from specjax.decoding.round import Round
from specjax.decoding.state import NO_TOKEN, Counters, DispatchInfo, Finish
from specjax.drafters.base import sources_of
from specjax.models.loaded import Model
from specjax.sampling.params import SamplingParams
from specjax.statistics import RequestMetrics, SourceStats, Stats
from specjax.text import CompletionText
from specjax.tree import Law

FINISH_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.NAN: "nan", Finish.CANCELLED: "cancelled"}

LOGPROBS_SIZES = (0, 5, 20)
"""How many of the most likely tokens a compiled round reports: few sizes, so that few rounds are compiled."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """What one prompt led to.

    Attributes:
      text: the new text, without the end token and without the stop string (unless that was to be kept); None for a model
        without tokenizer.
      token_ids: the new tokens, the end or stop token that finished them, or the token that completed a stop string, included.
      finish_reason: "stop" (an end or stop token, or a stop string), "length" (``max_tokens`` or the end of the context), "nan"
        (the target's output was not a number; the tokens before it are kept), or "cancelled" (likewise).
      logprobs: one dict for every token, ``{token id: log-probability}``: the token itself first, then the most likely ones,
        as many as were asked for. None where ``SamplingParams.logprobs`` is.
      seed: the seed that was used, drawn where none was given. All completions of a prompt share it.
      stats: acceptance statistics and times.
      prompt_index: which of the prompts was completed.
      index: which of the prompt's ``n`` completions this is. Seed and index determine it, whatever ``n`` is.
      metrics: how long it waited and took in an engine; None outside.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: str
    logprobs: list[dict[int, float]] | None
    seed: int
    stats: Stats
    prompt_index: int = 0
    index: int = 0
    metrics: RequestMetrics | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a streamed completion.

    Attributes:
      text: new text; "" while a character is not complete, or while the text may be the beginning of a stop string.
      token_ids: the tokens of this piece.
      completion: the whole, with the last piece; None before.
    """

    text: str
    token_ids: list[int]
    completion: Completion | None = None


class Row:
    """One completion in the making: what its row of the batch has emitted.

    Args:
      model: the target, for its tokenizer.
      settings: of the request.
      seed: in use.
      prompt_index: which prompt it completes.
      index: which of that prompt's completions it is.
    """

    def __init__(self, model: Model, settings: SamplingParams, seed: int, prompt_index: int, index: int):
        self._decode = model.tokenizer.decode if model.tokenizer else None
        self.settings = settings
        self.seed = seed
        self.prompt_index = prompt_index
        self.index = index
        self.finish = Finish.RUNNING
        self._token_ids: list[int] = []
        self._text_ids: list[int] = []
        self._logprobs: list[dict[int, float]] | None = None if settings.logprobs is None else []
        self._text: CompletionText | None = None
        if settings.stop:
            self.follow_text()

    @property
    def running(self) -> bool:
        """Whether more tokens will come."""
        return self.finish is Finish.RUNNING

    @property
    def looks_for_stops(self) -> bool:
        """Whether its next tokens may hold a stop string, which only the host sees."""
        return self.running and bool(self.settings.stop)

    def follow_text(self) -> None:
        """Makes the text as the tokens come; otherwise it is made in one go at the end."""
        if self._text is None and self._decode is not None:
            stop, include, least = self.settings.stop or (), self.settings.include_stop_str_in_output, self.settings.min_tokens
            self._text = CompletionText(self._decode, stop, include, least)
            self._text.push(self._text_ids)

    def take_text(self) -> str:
        """Text that has become certain since the last call; needs ``follow_text``, and a tokenizer to be more than ""."""
        return self._text.take() if self._text else ""

    def extend(self, info: DispatchInfo, place: int) -> list[int]:
        """Takes in what row ``place`` of a dispatch emitted, up to the token that completes a stop string; returns the tokens."""
        emitted = info.tokens[place] != NO_TOKEN
        tokens = info.tokens[place][emitted].tolist()
        self.finish = Finish(int(info.finish[place]))
        # A row that the device stops ends in an end or stop token, which is no text.
        text_ids = tokens[:-1] if self.finish is Finish.STOP else tokens
        if self._text is not None:
            taken = self._text.push(text_ids)
            if not self.running:
                self._text.finish()
            if self._text.stopped:
                self.finish = Finish.STOP
                tokens = text_ids = text_ids[:taken]
        self._token_ids.extend(tokens)
        self._text_ids.extend(text_ids)
        if self._logprobs is not None:
            reported = info.logprobs
            assert reported is not None  # the round reports them if any of its rows asks
            chosen, top_ids, top = (a[place][emitted] for a in (reported.chosen, reported.top_ids, reported.top))
            most = self.settings.logprobs
            for token, own, ids, values in zip(tokens, chosen.tolist(), top_ids.tolist(), top.tolist(), strict=False):
                # A token that cannot come is none of the most likely, however few there are.
                others = {i: v for i, v in zip(ids[:most], values[:most], strict=True) if v > -np.inf}
                self._logprobs.append({token: own} | others)
        return tokens

    def cancel(self) -> None:
        """No more tokens are wanted."""
        self.finish = Finish.CANCELLED
        if self._text is not None:
            self._text.finish()

    def completion(self, stats: Stats, metrics: RequestMetrics | None = None) -> Completion:
        """The completion of a row that has finished."""
        text = None
        if self._decode is not None:
            text = self._text.whole if self._text is not None else self._decode(self._text_ids)
        return Completion(
            text=text,
            token_ids=self._token_ids,
            finish_reason=FINISH_REASONS[self.finish],
            logprobs=self._logprobs,
            seed=self.seed,
            stats=stats,
            prompt_index=self.prompt_index,
            index=self.index,
            metrics=metrics,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens emitted so far."""
        return len(self._token_ids)


def row_counters(counters: Counters, place: int) -> Counters:
    """The counters of one row, without the axis of rows."""
    return jax.tree.map(lambda values: values[place], counters)


def row_stats(
    program: Round,
    law: Law | None,
    counters: Counters,
    num_tokens: int,
    plain_round_seconds: float | None = None,
    drafting_round_seconds: float | None = None,
    **times: float,
) -> Stats:
    """Statistics of one row.

    Args:
      program: what it ran in.
      law: how its drafter drew.
      counters: the row's own, NumPy arrays without the axis of rows.
      num_tokens: tokens that it emitted.
      plain_round_seconds, drafting_round_seconds, **times: fields of :class:`specjax.Stats` in seconds.
    """
    per_position = counters.num_accepted_tokens_per_pos.tolist()
    return Stats(
        num_drafts=int(counters.num_drafts),
        num_draft_tokens=int(counters.num_draft_tokens),
        num_accepted_tokens=sum(per_position),
        num_accepted_tokens_per_pos=tuple(per_position),
        num_tokens=num_tokens,
        num_tested=int(np.sum(counters.num_tested_per_pos)),
        overlap_sum=float(np.sum(counters.overlap_per_pos)) if law is not Law.DETERMINISTIC else None,
        by_source={
            name: SourceStats(**{count: int(values[place]) for count, values in vars(counters.by_source).items()})
            for place, name in enumerate(sources_of(program.drafter))
        },
        plain_round_seconds=plain_round_seconds,
        drafting_round_seconds=drafting_round_seconds,
        **times,
    )


def excess_counters(before: Counters, after: Counters, kept: int) -> Counters:
    """What the one round between ``before`` and ``after`` counted of a row behind its first ``kept`` tokens.

    What was drafted stays counted.

    Args:
      before: of the row, NumPy arrays without the axis of rows.
      after: likewise.
      kept: tokens of the round that count.
    """
    excess = jax.tree.map(np.zeros_like, after)
    for name in ("num_accepted_tokens_per_pos", "num_tested_per_pos", "overlap_per_pos"):
        getattr(excess, name)[kept:] = (getattr(after, name) - getattr(before, name))[kept:]
    # All tokens of the round came from one draft.
    for name in ("num_accepted_tokens", "num_tokens"):
        counted = getattr(after.by_source, name) - getattr(before.by_source, name)
        getattr(excess.by_source, name)[:] = np.maximum(counted - kept, 0)
    return excess


def logprobs_size(settings: Sequence[SamplingParams]) -> int | None:
    """How many of the most likely tokens a round must report for all of these requests; None: no log-probabilities at all.

    Example:
      >>> logprobs_size([SamplingParams(), SamplingParams(logprobs=2)]), logprobs_size([SamplingParams()])
      (5, None)
    """
    asked = [s.logprobs for s in settings if s.logprobs is not None]
    return next(size for size in LOGPROBS_SIZES if max(asked) <= size) if asked else None
