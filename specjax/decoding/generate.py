"""Generation from prompts: the host's part around the compiled round."""

import dataclasses
import functools
import secrets
import statistics
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.round import Round, prefill, run_rounds
from specjax.decoding.state import NO_TOKEN, DecodingState, Finish, Parameters
from specjax.drafters.base import BoundDrafter, bind
from specjax.models.loaded import Model
from specjax.sampling.allowed_tokens import AllowedTokens
from specjax.sampling.params import SamplingArrays, SamplingParams
from specjax.sampling.path import LogitsProcessor
from specjax.statistics import Stats
from specjax.text import IncrementalDecoder
from specjax.tree import Law
from specjax.verification.rules import choose_rule

PREFILL_WIDTHS = (16, 64, 256)
"""Prompt tokens per pass; a prompt takes the smallest that holds it, or several passes of the largest."""

STOP_IDS_STEP = 8
"""The number of stop ids per row is rounded up to a multiple of this, so that it is no reason to compile again."""

FINISH_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.NAN: "nan"}


@dataclasses.dataclass(frozen=True)
class Completion:
    """What one prompt led to.

    Attributes:
      text: the new text, without the end token; None for a model without tokenizer.
      token_ids: the new tokens, the end or stop token that finished them included.
      finish_reason: "stop" (an end or stop token), "length" (``max_tokens`` or the end of the context), or "nan" (the
        target's output was not a number; the tokens before it are kept).
      logprobs: None; not supported yet.
      seed: the seed that was used, drawn where none was given.
      stats: acceptance statistics and times.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: str
    logprobs: None
    seed: int
    stats: Stats


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a streamed completion.

    Attributes:
      text: new text; "" while a character is not complete.
      token_ids: the tokens of this piece.
      completion: the whole, with the last piece; None before.
    """

    text: str
    token_ids: list[int]
    completion: Completion | None = None


def generate(
    model: Model,
    prompts,
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    drafter: Any = None,
    rule: Any = "auto",
    *,
    logits_processor: LogitsProcessor | None = None,
    allowed_tokens: AllowedTokens | None = None,
    allow_lossy: bool = False,
) -> list[Completion]:
    """Completes one or many prompts, with or without speculation; the distribution of the outputs is the target's alone.

    Args:
      model: the target.
      prompts: a list of prompts: text, token ids, or chat messages (dicts with ``role`` and ``content``), in any mixture; or
        one text.
      params: settings for all prompts, or a list with one for each.
      drafter: from ``specjax.drafters``, or None for plain decoding.
      rule: a rule's name, a rule object, or ``"auto"``: the lossless rule that accepts most of what the drafter proposes.
      logits_processor: a function ``(tokens [S], prompt_length, length, logits [V]) -> logits [V]`` in JAX, applied to the logits
        of every next token, inside drafts too: ``tokens[:length]`` is the text before it. V is the width of the model's logits;
        ids beyond its vocabulary get probability 0 in any case. It is compiled into the round: pass the same function again
        rather than a new one.
      allowed_tokens: a grammar that every output keeps to (see :class:`specjax.AllowedTokens`).
      allow_lossy: whether a rule that changes the distribution may be used.

    Returns:
      A :class:`Completion` for every prompt, in their order.

    Raises:
      ValueError: names the argument, its value and what would be right, before any model runs.
    """
    batch = Batch.prepare(model, prompts, params, drafter, rule, allow_lossy, logits_processor, allowed_tokens)
    for _ in batch.run():
        pass
    return batch.completions()


def stream(
    model: Model,
    prompt,
    params: SamplingParams | None = None,
    drafter: Any = None,
    rule: Any = "auto",
    *,
    logits_processor: LogitsProcessor | None = None,
    allowed_tokens: AllowedTokens | None = None,
    allow_lossy: bool = False,
) -> Iterator[Piece]:
    """Completes one prompt and yields its text as it comes, a round at a time; see :func:`generate` for the arguments.

    The texts of the pieces join to the completion's text. Errors in the arguments are raised by the call itself.
    """
    batch = Batch.prepare(model, [prompt], params, drafter, rule, allow_lossy, logits_processor, allowed_tokens)
    return _pieces(batch, model)


def _pieces(batch: "Batch", model: Model) -> Iterator[Piece]:
    decoder = IncrementalDecoder(model.tokenizer.decode) if model.tokenizer else None
    held: Piece | None = None
    for (tokens,) in batch.run(rounds_per_dispatch=1):
        if held is not None:
            yield held
        text_tokens = tokens[:-1] if tokens and batch.ended_by_stop(0) else tokens
        held = Piece(decoder.push(text_tokens) if decoder else "", tokens)
    (completion,) = batch.completions()
    rest = decoder.finish() if decoder else ""
    yield Piece((held.text if held else "") + rest, held.token_ids if held else [], completion)


@dataclasses.dataclass
class Batch:
    """Prompts on their way through one compiled round.

    Attributes:
      program: what is compiled.
      model: the target.
      params: of target and drafter.
      prompts: token ids of each prompt.
      sampling: settings of each.
      seeds: the seeds in use.
      capacity: S, cache entries per row.
      prefill_width: prompt tokens per pass. The rounds do not depend on it and are not compiled anew for it.
      law: how the drafter draws; q, and with it the overlap, is known unless it is deterministic.
    """

    program: Round
    model: Model
    params: Parameters
    prompts: list[list[int]]
    sampling: list[SamplingParams]
    seeds: list[int]
    capacity: int
    prefill_width: int
    law: Law

    def __post_init__(self):
        self._emitted: list[list[int]] = [[] for _ in self.prompts]
        self._finish = np.zeros(len(self.prompts), int)
        self._counters = None
        self._round_seconds: list[tuple[float, int]] = []
        self._seconds = {"prefill_seconds": 0.0, "decode_seconds": 0.0, "compile_seconds": 0.0}

    @classmethod
    def prepare(cls, model, prompts, params, drafter, rule, allow_lossy, logits_processor=None, allowed_tokens=None) -> "Batch":
        """Checks everything and lays out the batch; no model runs."""
        if not isinstance(model, Model):
            raise ValueError(f"model is {type(model).__name__}; it must be a specjax.Model (see specjax.load_model)")
        if isinstance(prompts, str):
            prompts = [prompts]
        if not isinstance(prompts, Sequence | np.ndarray):
            raise ValueError(f"prompts is {type(prompts).__name__}; it must be a list of prompts, or one text")
        prompts = [prompt_ids(model, prompt, index) for index, prompt in enumerate(prompts)]
        if not prompts:
            raise ValueError("prompts is empty; it must hold at least one prompt")
        params = SamplingParams() if params is None else params
        sampling = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        each = isinstance(sampling, Sequence) and all(isinstance(p, SamplingParams) for p in sampling)
        if not each or len(sampling) != len(prompts):
            raise ValueError(f"params is {params!r:.200}; it must be one SamplingParams or {len(prompts)}, one for each prompt")
        for index, settings in enumerate(sampling):
            _check_ids(model, settings, index)
        if logits_processor is not None:
            check_processor(logits_processor, model)
        if allowed_tokens is not None and not isinstance(allowed_tokens, AllowedTokens):
            raise ValueError(f"allowed_tokens is {type(allowed_tokens).__name__}; it must be a specjax.AllowedTokens")
        if allowed_tokens is not None and allowed_tokens.vocab_size > model.vocab_size:
            raise ValueError(
                f"allowed_tokens has {allowed_tokens.vocab_size} columns; ids of this model are below {model.vocab_size}"
            )
        next_state = None if allowed_tokens is None else allowed_tokens.next_state
        bound: BoundDrafter = bind(drafter)
        bound.check_target(model)
        chosen, law = choose_rule(
            rule,
            bound.functions.tree,
            bound.functions.law_choices,
            greedy=all(p.greedy for p in sampling),
            allow_lossy=allow_lossy,
        )
        longest = max(map(len, prompts))
        most = max(min(len(p) + s.max_tokens, model.max_positions) for p, s in zip(prompts, sampling, strict=True))
        program = Round(
            target=model.functions,
            drafter=bound.functions.with_law(law),
            rule=chosen,
            vocab_size=model.vocab_size,
            logits_width=model.logits.shape[-1],
            logits_dtype=logits_dtype(model),
            logits_processor=logits_processor,
        )
        prefill_width = next((width for width in PREFILL_WIDTHS if longest - 1 <= width), PREFILL_WIDTHS[-1])
        seeds = [secrets.randbits(32) if p.seed is None else p.seed for p in sampling]
        capacity = round_capacity(most - 1)
        return cls(
            program,
            model,
            Parameters(model.params, bound.params, next_state),
            prompts,
            sampling,
            seeds,
            capacity,
            prefill_width,
            law,
        )

    def initial_state(self) -> DecodingState:
        """The prompts on the device, nothing of them fed yet."""
        lengths = np.array([len(p) for p in self.prompts], np.int32)
        tokens = np.zeros((len(self.prompts), self.capacity + 1), np.int32)
        for row, prompt in zip(tokens, self.prompts, strict=True):
            row[: len(prompt)] = prompt
        budgets = np.array([min(s.max_tokens, self.capacity + 1) for s in self.sampling])
        limits = np.minimum(lengths + budgets, self.model.max_positions).astype(np.int32)
        ends = [(() if s.ignore_eos else self.model.stop_token_ids) + s.stop_token_ids for s in self.sampling]
        most_ids = -(-max(1, *map(len, ends)) // STOP_IDS_STEP) * STOP_IDS_STEP
        stop_token_ids = np.full((len(ends), most_ids), NO_TOKEN, np.int32)
        for row, ids in zip(stop_token_ids, ends, strict=True):
            row[: len(ids)] = ids
        arrays = (jnp.asarray(a) for a in (tokens, lengths, limits, stop_token_ids))
        sampling = SamplingArrays.stack(self.sampling, self.seeds)
        return _initial_state(self.program, self.params, *arrays, sampling)

    def run(self, rounds_per_dispatch: int | None = None) -> Iterator[list[list[int]]]:
        """Runs to the end; yields the new tokens of every row after each dispatch."""
        rounds = jnp.int32(rounds_per_dispatch or self.program.rounds_per_dispatch)
        chunks = jnp.int32(self.capacity)  # more than any prompt needs: the loop ends by itself
        state = self.initial_state()
        program = dataclasses.replace(self.program, prefill_width=self.prefill_width)
        # A dispatch of nothing compiles (where that is still to be done) and leaves the state as it is.
        with self._timed("compile_seconds"):
            state = prefill(program, self.params, state, jnp.int32(0))
            state, info = run_rounds(self.program, self.params, state, jnp.int32(0))
            jax.block_until_ready(info)
        with self._timed("prefill_seconds"):
            state = jax.block_until_ready(prefill(program, self.params, state, chunks))
        self._finish = np.asarray(info.finish)
        while np.any(self._finish == Finish.RUNNING):
            start = time.perf_counter()
            state, info = run_rounds(self.program, self.params, state, rounds)
            info = jax.device_get(info)
            seconds = time.perf_counter() - start
            self._seconds["decode_seconds"] += seconds
            if info.rounds == 1:
                self._round_seconds.append((seconds, int(info.drafted[0])))
            self._finish = info.finish
            news = [row[row != NO_TOKEN].tolist() for row in info.tokens]
            for emitted, new in zip(self._emitted, news, strict=True):
                emitted.extend(new)
            yield news
        self._counters = jax.device_get(state.counters)

    def _timed(self, name):
        return _Timer(self._seconds, name)

    def ended_by_stop(self, index: int) -> bool:
        """Whether the row's newest token is an end or stop token."""
        return self._finish[index] == Finish.STOP

    def completions(self) -> list[Completion]:
        """The completions of a batch that has run to its end."""
        return [self._completion(index) for index in range(len(self.prompts))]

    def _completion(self, index: int) -> Completion:
        token_ids, counters = self._emitted[index], self._counters
        text_ids = token_ids[:-1] if self.ended_by_stop(index) else token_ids
        per_position = counters.num_accepted_tokens_per_pos[index].tolist()
        stats = Stats(
            num_drafts=int(counters.num_drafts[index]),
            num_draft_tokens=int(counters.num_draft_tokens[index]),
            num_accepted_tokens=sum(per_position),
            num_accepted_tokens_per_pos=tuple(per_position),
            num_tokens=len(token_ids),
            num_tested=int(counters.num_tested[index]),
            overlap_sum=float(counters.overlap[index]) if self.law is not Law.DETERMINISTIC else None,
            plain_round_seconds=self._median_round(drafting=False),
            drafting_round_seconds=self._median_round(drafting=True),
            **self._seconds,
        )
        return Completion(
            text=self.model.tokenizer.decode(text_ids) if self.model.tokenizer else None,
            token_ids=token_ids,
            finish_reason=FINISH_REASONS[Finish(self._finish[index])],
            logprobs=None,
            seed=self.seeds[index],
            stats=stats,
        )

    def _median_round(self, drafting: bool) -> float | None:
        """Median seconds of the rounds that were dispatched alone and did (not) draft anything; None without any."""
        seconds = [seconds for seconds, drafted in self._round_seconds if (drafted > 0) == drafting]
        return statistics.median(seconds) if seconds else None


class _Timer:
    """Adds the seconds of a ``with`` block to an entry of a dict."""

    def __init__(self, seconds: dict, name: str):
        self._seconds, self._name = seconds, name

    def __enter__(self):
        self._start = time.perf_counter()

    def __exit__(self, *_):
        self._seconds[self._name] += time.perf_counter() - self._start


@functools.partial(jax.jit, static_argnames="program")
def _initial_state(program: Round, params, *arrays) -> DecodingState:
    return program.init(params, *arrays)


def round_capacity(needed: int) -> int:
    """Few cache sizes, so that few programs are compiled: powers of two from 64 to 512, then multiples of 512.

    Example:
      >>> [round_capacity(n) for n in (1, 65, 512, 513)]
      [64, 128, 512, 1024]
    """
    if needed <= 512:
        return max(64, 1 << (needed - 1).bit_length())
    return -(-needed // 512) * 512


def prompt_ids(model: Model, prompt, index: int) -> list[int]:
    """Token ids of a prompt in any of its three forms, checked against the model."""
    name = f"prompts[{index}]"
    is_list = (isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes))) or isinstance(prompt, np.ndarray)
    if isinstance(prompt, str) or (is_list and len(prompt) and isinstance(prompt[0], dict)):
        if model.tokenizer is None:
            raise ValueError(f"{name} is text, but model {model.name!r} has no tokenizer; give token ids")
        ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else model.tokenizer.encode_chat(prompt)
    elif is_list:
        ids = list(prompt)
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < model.vocab_size:
                raise ValueError(f"{name} holds {token!r}; token ids are whole numbers from 0 to {model.vocab_size - 1}")
    else:
        raise ValueError(f"{name} is {type(prompt).__name__}; it must be text, a list of token ids, or a list of chat messages")
    if not ids:
        raise ValueError(f"{name} has no tokens; a prompt needs at least one")
    if len(ids) >= model.max_positions:
        raise ValueError(f"{name} has {len(ids)} tokens; with one new token it must fit into {model.max_positions} positions")
    return [int(token) for token in ids]


def logits_dtype(model: Model):
    """Dtype in which the model's logits become probabilities, at least float32."""
    return jnp.promote_types(model.logits.dtype, jnp.float32)


def check_processor(logits_processor, model: Model) -> None:
    """Raises ValueError unless ``logits_processor`` is what ``generate`` takes. Nothing is computed."""
    name = f"logits_processor is {logits_processor!r}"
    if not callable(logits_processor) or not isinstance(logits_processor, Hashable):
        raise ValueError(f"{name}; it must be a hashable function (tokens, prompt_length, length, logits) -> logits")
    logits = jax.ShapeDtypeStruct(model.logits.shape, logits_dtype(model))
    text, number = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((model.max_positions,), ()))
    try:
        result = jax.eval_shape(logits_processor, text, number, number, logits)
    except Exception as error:
        raise ValueError(f"{name}; traced by JAX it fails: {error}") from error
    if jax.tree.structure(result) != jax.tree.structure(logits) or (result.shape, result.dtype) != (logits.shape, logits.dtype):
        raise ValueError(f"{name}; it must return {logits.dtype.name}{list(logits.shape)}, not {result}")


def _check_ids(model: Model, settings: SamplingParams, index: int) -> None:
    for name, ids in (("stop_token_ids", settings.stop_token_ids), ("logit_bias", settings.logit_bias or ())):
        for token in ids:
            if token >= model.vocab_size:
                raise ValueError(f"params[{index}]: {name} holds {token}; ids of this model are below {model.vocab_size}")
