"""Generation from prompts: the host's part around the compiled round."""

import dataclasses
import functools
import secrets
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.completions import Completion, Piece, Row, excess_counters, logprobs_size, row_counters, row_stats
from specjax.decoding.compose import check_model, compose
from specjax.decoding.prompts import check_settings, prompt_ids, stop_ids
from specjax.decoding.round import Round, prefill, run_rounds
from specjax.decoding.round_costs import kept_rounds, measure_rounds, with_depths
from specjax.decoding.state import NO_TOKEN, Counters, DecodingState, DispatchInfo, Parameters
from specjax.models.loaded import Model
from specjax.sampling.allowed_tokens import AllowedTokens
from specjax.sampling.params import SamplingArrays, SamplingParams
from specjax.sampling.path import LogitsProcessor
from specjax.tree import Law

PREFILL_WIDTHS = (16, 64, 128, 256)
"""Prompt tokens per pass; a prompt takes the smallest that holds it, or several passes of the largest."""


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
    adaptive: bool | Mapping[int, float] = False,
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
      adaptive: True: every round drafts only as deep as pays, by what rounds of each depth cost here and by what was accepted
        lately, not at all where drafts cost more than they bring (see ``specjax.decoding.adaptive``). The costs are measured once
        for each model, drafter and number of rows, which takes some seconds, and kept in the user's cache folder. Tokens of
        greedy rows and of the gumbel rule do not depend on it; those of other rules are drawn otherwise, from the same
        distribution. A mapping gives the costs instead, seconds by depth, and those depths alone are used.

    Returns:
      A :class:`Completion` for every prompt, in their order; ``n`` of them, one after the other, where ``params.n`` says so.

    Raises:
      ValueError: names the argument, its value and what would be right, before any model runs.
    """
    batch = Batch.prepare(model, prompts, params, drafter, rule, allow_lossy, logits_processor, allowed_tokens, adaptive)
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
    adaptive: bool | Mapping[int, float] = False,
) -> Iterator[Piece]:
    """Completes one prompt and yields its text as it comes, a round at a time; see :func:`generate` for the arguments.

    The texts of the pieces join to the completion's text. Errors in the arguments are raised by the call itself.
    """
    if params is not None and not isinstance(params, SamplingParams):
        raise ValueError(f"stream: params is {params!r:.200}; it must be one SamplingParams")
    if params is not None and params.n > 1:
        raise ValueError(f"stream: n is {params.n}; it must be 1, a stream has one completion")
    batch = Batch.prepare(model, [prompt], params, drafter, rule, allow_lossy, logits_processor, allowed_tokens, adaptive)
    return _pieces(batch)


def _pieces(batch: "Batch") -> Iterator[Piece]:
    (row,) = batch.rows
    row.follow_text()
    held = Piece("", [])
    for index, (tokens,) in enumerate(batch.run(rounds_per_dispatch=1)):
        if index:
            yield held
        held = Piece(row.take_text(), tokens)
    (completion,) = batch.completions()
    yield dataclasses.replace(held, completion=completion)


@dataclasses.dataclass
class Batch:
    """Prompts on their way through one compiled round.

    Attributes:
      program: what is compiled.
      model: the target.
      params: of target and drafter.
      prompts: token ids of each row's prompt.
      rows: what each row is to become, one for every completion.
      capacity: S, cache entries per row.
      prefill_width: prompt tokens per pass. The rounds do not depend on it and are not compiled anew for it.
      law: how the drafter draws, None if it never does; q, and with it the overlap, is known unless it is deterministic.
      measured: whether rounds draft by costs that are known; else they are measured before the first.
    """

    program: Round
    model: Model
    params: Parameters
    prompts: list[list[int]]
    rows: list[Row]
    capacity: int
    prefill_width: int
    law: Law | None
    measured: bool = True

    def __post_init__(self):
        self._counters: Counters | None = None
        # Of rows that a stop string ended within a round.
        self._excess: dict[int, Counters] = {}
        self._round_seconds: list[tuple[float, int]] = []
        self.seconds = {"prefill_seconds": 0.0, "decode_seconds": 0.0, "compile_seconds": 0.0}
        """Times so far, by their names in :class:`specjax.Stats`."""

    @classmethod
    def prepare(
        cls, model, prompts, params, drafter, rule, allow_lossy, logits_processor=None, allowed_tokens=None, adaptive=False
    ) -> "Batch":
        """Checks everything and lays out the batch; no model runs."""
        check_model(model)
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
            check_settings(model, settings, index)
        program, parameters, law = compose(
            model,
            drafter,
            rule,
            greedy=all(p.greedy for p in sampling),
            allow_lossy=allow_lossy,
            logits_processor=logits_processor,
            allowed_tokens=allowed_tokens,
            num_logprobs=logprobs_size(sampling),
        )
        program, parameters, measured = with_depths("generate", program, parameters, adaptive)
        longest = max(map(len, prompts))
        most = max(min(len(p) + s.max_tokens, model.max_positions) for p, s in zip(prompts, sampling, strict=True))
        prefill_width = next((width for width in PREFILL_WIDTHS if longest - 1 <= width), PREFILL_WIDTHS[-1])
        seeds = [secrets.randbits(32) if p.seed is None else p.seed for p in sampling]
        capacity = round_capacity(most - 1)
        # Every completion is a row of its own, those of one prompt side by side.
        rows = [
            Row(model, settings, seed, prompt_index, index)
            for prompt_index, (settings, seed) in enumerate(zip(sampling, seeds, strict=True))
            for index in range(settings.n)
        ]
        prompts = [prompts[row.prompt_index] for row in rows]
        return cls(program, model, parameters, prompts, rows, capacity, prefill_width, law, measured)

    @property
    def sampling(self) -> list[SamplingParams]:
        """Settings of each row."""
        return [row.settings for row in self.rows]

    @property
    def _before_rounds(self) -> Round:
        """The program that reads the prompts: it does not depend on what rounds report, and is not compiled anew for it."""
        return dataclasses.replace(self.program, num_logprobs=None)

    def initial_state(self) -> DecodingState:
        """The prompts on the device, nothing of them fed yet."""
        lengths = np.array([len(p) for p in self.prompts], np.int32)
        tokens = np.zeros((len(self.prompts), self.capacity + 1), np.int32)
        for row, prompt in zip(tokens, self.prompts, strict=True):
            row[: len(prompt)] = prompt
        budgets = np.array([min(s.max_tokens, self.capacity + 1) for s in self.sampling])
        limits = np.minimum(lengths + budgets, self.model.max_positions).astype(np.int32)
        stop_token_ids = stop_ids(self.model, self.sampling)
        arrays = (jnp.asarray(a) for a in (tokens, lengths, limits, stop_token_ids))
        sampling = SamplingArrays.stack(
            self.sampling, [row.seed for row in self.rows], completion=[row.index for row in self.rows]
        )
        return _initial_state(self._before_rounds, self.params, *arrays, sampling)

    def run(self, rounds_per_dispatch: int | None = None) -> Iterator[list[list[int]]]:
        """Runs to the end; yields the new tokens of every row after each dispatch."""
        yield from self.rounds(self.read_prompts(), rounds_per_dispatch)

    def read_prompts(self) -> DecodingState:
        """The prompts on the device and read; what is needed for it and for the rounds is compiled before."""
        chunks = jnp.int32(self.capacity)  # more than any prompt needs: the loop ends by itself
        if not self.measured:
            self._measure_rounds()
        state = self.initial_state()
        program = dataclasses.replace(self._before_rounds, prefill_width=self.prefill_width)
        # A dispatch of nothing compiles (where that is still to be done) and leaves the state as it is.
        with self._timed("compile_seconds"):
            state = prefill(program, self.params, state, jnp.int32(0))
            state, info = run_rounds(self.program, self.params, state, jnp.int32(0))
            jax.block_until_ready(info)
        with self._timed("prefill_seconds"):
            return jax.block_until_ready(prefill(program, self.params, state, chunks))

    def rounds(self, state: DecodingState, rounds_per_dispatch: int | None = None) -> Iterator[list[list[int]]]:
        """Rounds from ``state``, whose prompts are read, to the end; yields the new tokens of every row after each dispatch.

        The state's buffers are used up. Unless a stop string may end a row, a dispatch is laid out while the one before it runs,
        so that ``decode_seconds`` go from result to result, whatever the caller does between them, but where it keeps the device
        waiting: then no dispatch counts for more than the longest before it.
        """
        if not self.measured:
            self._measure_rounds()
        most_rounds = rounds_per_dispatch or self.program.rounds_per_dispatch
        counters = jax.device_get(state.counters)
        following: tuple[DecodingState, DispatchInfo] | None = None
        begun = longest = 0.0
        while any(row.running for row in self.rows):
            # The device knows no stop strings: where one may come, the host looks at every round before the next.
            stops = any(row.looks_for_stops for row in self.rows)
            # Whether the device has waited for whoever takes the tokens.
            waited = following is not None and following[1].rounds.is_ready()  # type: ignore[attr-defined]  # not in the hints
            if following is None:
                begun = time.perf_counter()
                following = run_rounds(self.program, self.params, state, jnp.int32(1 if stops else most_rounds))
            (state, info), following = following, None
            if not stops:
                # Laying out a call takes the host a while: meanwhile the device is busy. Behind the end it does nothing.
                following = run_rounds(self.program, self.params, state, jnp.int32(most_rounds))
            before = counters
            info, counters = jax.device_get((info, state.counters if stops else before))
            arrived = time.perf_counter()
            seconds, begun = min(arrived - begun, longest) if waited else arrived - begun, arrived
            longest = max(longest, seconds)
            self.seconds["decode_seconds"] += seconds
            if info.rounds == 1:
                self._round_seconds.append((seconds, int(info.drafted[0])))
            news = [row.extend(info, place) if row.running else [] for place, row in enumerate(self.rows)]
            for place, new in enumerate(news):
                if stops and len(new) < np.sum(info.tokens[place] != NO_TOKEN):
                    was, now = row_counters(before, place), row_counters(counters, place)
                    self._excess[place] = excess_counters(was, now, len(new))
            finish = np.array([row.finish for row in self.rows], np.int32)
            if np.any(finish != info.finish):
                state = state.replace(finish=jnp.asarray(finish))
            yield news
        state = state if following is None else following[0]
        self._counters = jax.device_get(state.counters)

    def _measure_rounds(self) -> None:
        """Finds out what rounds cost, on rows like those of this batch."""
        program = dataclasses.replace(self._before_rounds, prefill_width=PREFILL_WIDTHS[1])

        state = None

        def start(prompt):
            nonlocal state
            state = dataclasses.replace(self, prompts=[prompt] * len(self.rows)).initial_state()
            limits, stop_token_ids = jnp.full_like(state.limits, self.capacity + 1), jnp.full_like(state.stop_token_ids, NO_TOKEN)
            state = prefill(
                program, self.params, state.replace(limits=limits, stop_token_ids=stop_token_ids), jnp.int32(self.capacity)
            )
            jax.block_until_ready(state)

        def run(seconds, num_rounds):
            nonlocal state
            state, info = run_rounds(self.program, self.params.replace(round_seconds=seconds), state, jnp.int32(num_rounds))
            return jax.block_until_ready(info)

        def measure():
            return measure_rounds(self.program, start, run, self.capacity)

        greedy = all(settings.greedy for settings in self.sampling)
        seconds = kept_rounds(self.model, self.program, len(self.rows), greedy, measure)
        self.params, self.measured = self.params.replace(round_seconds=np.array(seconds, np.float32)), True

    def _timed(self, name):
        return _Timer(self.seconds, name)

    def completions(self) -> list[Completion]:
        """The completions of a batch that has run to its end."""
        return [self._completion(index) for index in range(len(self.rows))]

    def _completion(self, index: int) -> Completion:
        assert self._counters is not None, "the batch has not run"
        row, counters = self.rows[index], row_counters(self._counters, index)
        if index in self._excess:
            counters = jax.tree.map(np.subtract, counters, self._excess[index])
        stats = row_stats(
            self.program,
            self.law,
            counters,
            row.num_tokens,
            plain_round_seconds=self._median_round(drafting=False),
            drafting_round_seconds=self._median_round(drafting=True),
            **self.seconds,
        )
        return row.completion(stats)

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
