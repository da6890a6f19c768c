"""What the host makes of the tokens that come from the device: completions, piece by piece."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from specjax.decoding.state import NO_TOKEN, DispatchInfo, Finish
from specjax.models.loaded import Model
from specjax.sampling.params import SamplingParams
from specjax.statistics import Stats
from specjax.text import CompletionText

FINISH_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.NAN: "nan"}

LOGPROBS_SIZES = (0, 5, 20)
"""How many of the most likely tokens a compiled round reports: few sizes, so that few rounds are compiled."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """What one prompt led to.

    Attributes:
      text: the new text, without the end token and without the stop string (unless that was to be kept); None for a model
        without tokenizer.
      token_ids: the new tokens, the end or stop token that finished them, or the token that completed a stop string, included.
      finish_reason: "stop" (an end or stop token, or a stop string), "length" (``max_tokens`` or the end of the context), or
        "nan" (the target's output was not a number; the tokens before it are kept).
      logprobs: one dict for every token, ``{token id: log-probability}``: the token itself first, then the most likely ones,
        as many as were asked for. None where ``SamplingParams.logprobs`` is.
      seed: the seed that was used, drawn where none was given. All completions of a prompt share it.
      stats: acceptance statistics and times.
      prompt_index: which of the prompts was completed.
      index: which of the prompt's ``n`` completions this is. Seed and index determine it, whatever ``n`` is.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: str
    logprobs: list[dict[int, float]] | None
    seed: int
    stats: Stats
    prompt_index: int = 0
    index: int = 0


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
            stop, include, least = self.settings.stop, self.settings.include_stop_str_in_output, self.settings.min_tokens
            self._text = CompletionText(self._decode, stop, include, least)

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
            chosen, top_ids, top = (a[place][emitted] for a in (info.logprobs.chosen, info.logprobs.top_ids, info.logprobs.top))
            most = self.settings.logprobs
            for token, own, ids, values in zip(tokens, chosen.tolist(), top_ids.tolist(), top.tolist(), strict=False):
                # A token that cannot come is none of the most likely, however few there are.
                others = {i: v for i, v in zip(ids[:most], values[:most], strict=True) if v > -np.inf}
                self._logprobs.append({token: own} | others)
        return tokens

    def completion(self, stats: Stats) -> Completion:
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
        )

    @property
    def num_tokens(self) -> int:
        """Tokens emitted so far."""
        return len(self._token_ids)


def logprobs_size(settings: Sequence[SamplingParams]) -> int | None:
    """How many of the most likely tokens a round must report for all of these requests; None: no log-probabilities at all.

    Example:
      >>> logprobs_size([SamplingParams(), SamplingParams(logprobs=2)]), logprobs_size([SamplingParams()])
      (5, None)
    """
    asked = [s.logprobs for s in settings if s.logprobs is not None]
    return next(size for size in LOGPROBS_SIZES if max(asked) <= size) if asked else None
