"""The cases answer the prompts, in turns."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax.benchmark.cases import Case, request_params
from specjax.benchmark.clock import turns
from specjax.decoding.generate import PREFILL_WIDTHS, Batch, round_capacity
from specjax.models.loaded import Model
from specjax.serving.engine import Engine
from specjax.serving.requests import Request
from specjax.statistics import Stats

WARM_UP_TOKENS = 2
"""Tokens of the answers that have an engine compile its programs."""


@dataclasses.dataclass
class Answers:
    """What one case made of the prompts.

    Attributes:
      tokens: of each prompt's answer; every repeat gave the same, since the seeds are.
      stats: of each prompt's answer. Of an engine the times are none of a prompt's alone.
      seconds: [repeats][prompts] seconds of the rounds of each answer; of an engine [repeats][1], seconds from the first request
        to the last answer.
      compile_seconds: of compilation, all prompts together; of an engine, seconds of the warm-up.
      prefill_seconds: of reading the prompts, all together; 0.0 of an engine, whose ``seconds`` hold it.
      repeatable: whether all repeats gave the same tokens.
    """

    tokens: list[list[int]] = dataclasses.field(default_factory=list)
    stats: list[Stats] = dataclasses.field(default_factory=list)
    seconds: list[list[float]] = dataclasses.field(default_factory=list)
    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    repeatable: bool = True


def layout(prompts: Sequence[list[int]], max_tokens: int) -> tuple[int, int]:
    """(cache entries per row, prompt tokens per pass) with which all prompts are answered alone: one of each, to compile once.

    Example:
      >>> layout([[1] * 100, [1] * 20], 32)
      (256, 128)
    """
    longest = max(map(len, prompts))
    return round_capacity(longest + max_tokens - 1), next((w for w in PREFILL_WIDTHS if longest - 1 <= w), PREFILL_WIDTHS[-1])


def answer_alone(
    models: Mapping[str, Model],
    cases: Sequence[Case],
    prompts: Sequence[list[int]],
    max_tokens: int,
    repeats: int,
    seed: int,
    allow_lossy: bool = False,
    step: Callable[[str], Any] = str,
) -> dict[Case, Answers]:
    """Every prompt answered alone, by all cases in turns.

    A prompt is read once by each case; every repeat starts from a copy of the state behind it. All batches have one capacity and
    read prompts by passes of one width, so that each case is compiled once.

    Args:
      models: the target by dtype.
      cases: with one slot.
      prompts: token ids.
      max_tokens: of each answer.
      repeats: at least 1.
      seed: of the first prompt; the next has the next.
      allow_lossy: whether rules may change the distribution.
      step: called with what comes next, before each of ``num_steps``.
    """
    found = {case: Answers(seconds=[[] for _ in range(repeats)]) for case in cases}
    capacity, width = layout(prompts, max_tokens)

    def prepared(case, prompt, index):
        params = request_params(case, max_tokens, seed + index)
        batch = Batch.prepare(models[case.dtype], [prompt], params, case.made, case.rule, allow_lossy, adaptive=case.adaptive)
        return dataclasses.replace(batch, capacity=capacity, prefill_width=width)

    for index, prompt in enumerate(prompts):
        states = {}
        for case in cases:
            step(f"prompt {index + 1} of {len(prompts)}: {case}")
            batch = prepared(case, prompt, index)
            states[case] = batch.read_prompts()
            found[case].compile_seconds += batch.seconds["compile_seconds"]
            found[case].prefill_seconds += batch.seconds["prefill_seconds"]
        for repeat, case in turns(list(cases), repeats):
            step(f"prompt {index + 1} of {len(prompts)}: {case}")
            batch = prepared(case, prompt, index)
            for _ in batch.rounds(jax.block_until_ready(jax.tree.map(jnp.copy, states[case]))):
                pass
            (completion,) = batch.completions()
            answers = found[case]
            answers.seconds[repeat].append(completion.stats.decode_seconds)
            if len(answers.tokens) == index:
                answers.tokens.append(completion.token_ids)
                answers.stats.append(completion.stats)
            answers.repeatable &= answers.tokens[index] == completion.token_ids
    return found


def answer_together(
    models: Mapping[str, Model],
    cases: Sequence[Case],
    prompts: Sequence[list[int]],
    max_tokens: int,
    repeats: int,
    seed: int,
    allow_lossy: bool = False,
    step: Callable[[str], Any] = str,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Case, Answers]:
    """All prompts answered by an engine of each case's slots, the cases in turns; arguments as of :func:`answer_alone`.

    An engine is made anew for every repeat; only the first has anything to compile.
    """
    found = {case: Answers() for case in cases}
    longest = max(map(len, prompts))

    def answered(case, num_tokens):
        model = models[case.dtype]
        capacity = min(-(-(longest + max_tokens) // 64) * 64, model.max_positions)
        requests = [Request(prompt, request_params(case, num_tokens, seed + index)) for index, prompt in enumerate(prompts)]
        settings = {"rule": case.rule, "slots": case.slots, "allow_lossy": allow_lossy, "adaptive": case.adaptive}
        with Engine(model, drafter=case.made, capacity=capacity, **settings) as engine:
            start = clock()
            done = engine.run(requests)
            return done, clock() - start

    for case in cases:
        step(f"warm-up: {case}")
        found[case].compile_seconds = answered(case, min(WARM_UP_TOKENS, max_tokens))[1]
    for _, case in turns(list(cases), repeats):
        step(str(case))
        done, seconds = answered(case, max_tokens)
        answers = found[case]
        answers.seconds.append([seconds])
        tokens = [completion.token_ids for completion in done]
        if not answers.tokens:
            answers.tokens, answers.stats = tokens, [completion.stats for completion in done]
        answers.repeatable &= answers.tokens == tokens
    return found


def num_steps(cases: Sequence[Case], num_prompts: int, repeats: int) -> int:
    """How often ``step`` is called for cases of any slots."""
    alone = sum(case.slots == 1 for case in cases)
    return (1 + repeats) * (alone * num_prompts + len(cases) - alone)
