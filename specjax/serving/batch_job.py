"""A batch job: every line of a file through an engine, each answered once, however often the job is interrupted."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from specjax.decoding.completions import Completion
from specjax.sampling.params import SamplingParams
from specjax.serving.batch_hosts import InputElsewhere, OutputElsewhere, unanswered
from specjax.serving.batch_lines import Asked, answer, failure, read_line
from specjax.serving.batch_output import BatchInput, BatchOutput
from specjax.serving.engine import Engine
from specjax.statistics import Stats, total


@dataclasses.dataclass
class Progress:
    """How far a job is.

    Attributes:
      num_inputs: lines to be answered.
      num_answered: lines that have their record, those of earlier runs included.
      num_errors: those of them that could not be answered.
      num_tokens: tokens of this run.
      seconds: of this run.
      stats: acceptance statistics of this run, summed.
      answered_before: lines that had their record when this run began.
      stopped: whether the run was asked to stop before the end.
    """

    num_inputs: int
    num_answered: int
    num_errors: int
    answered_before: int
    num_tokens: int = 0
    seconds: float = 0.0
    stats: Stats = dataclasses.field(default_factory=Stats)
    stopped: bool = False

    @property
    def complete(self) -> bool:
        """Whether every line has its record."""
        return self.num_answered == self.num_inputs

    @property
    def seconds_left(self) -> float | None:
        """At the rate of this run; None before anything was answered."""
        now = self.num_answered - self.answered_before
        return None if not now else self.seconds / now * (self.num_inputs - self.num_answered)

    def to_dict(self) -> dict:
        """Ready for JSON."""
        rates = ("draft_acceptance_rate", "mean_acceptance_length")
        counts = ("num_inputs", "num_answered", "num_errors", "answered_before", "num_tokens", "seconds", "stopped", "complete")
        rate = self.num_tokens / self.seconds if self.seconds else 0.0
        named = {name: getattr(self, name) for name in counts} | {"tokens_per_second": rate}
        return named | {name: getattr(self.stats, name) for name in rates}


def run_batch(
    engine: Engine,
    source: BatchInput | InputElsewhere,
    output: BatchOutput | OutputElsewhere,
    defaults: SamplingParams,
    *,
    chat: bool = True,
    progress: Callable[[Progress], None] = lambda state: None,
    stop: Callable[[], bool] = lambda: False,
) -> Progress:
    """Answers every line of ``source`` that ``output`` has no record of.

    Lines are read as slots become free, so memory does not grow with their number.

    Over several processes all call it, each with its own ``source`` and ``output`` of ``specjax.serving.batch_hosts``.

    Args:
      engine: answers them; nothing else should be in it.
      source: the input.
      output: the output.
      defaults: settings where a line says nothing.
      chat: whether a plain prompt goes through the model's chat template.
      progress: called with the state of the job after every step that finished something.
      stop: asked at every step (of several processes, now and then); once it is true of one process, rows that are being answered
        are finished and nothing new begins.

    Returns:
      How far the job is at the end.
    """
    model, start, stop = engine.model, time.perf_counter(), engine.processes.agreed(stop)
    state = Progress(source.num_inputs, output.num_answered, output.num_errors, output.num_answered)

    def wrote(record):
        output.write(record)
        state.num_answered, state.num_errors = output.num_answered, output.num_errors

    def asked_lines() -> Iterator[Asked]:
        for number, data, duplicate_of in unanswered(engine.processes, source, output, engine.num_slots):
            yield read_line(data, number, defaults, model.name, chat, duplicate_of)

    open_lines: dict[Any, tuple[Asked, list[Completion]]] = {}
    lines, more = asked_lines(), True
    while (more and not state.stopped) or open_lines:
        if stop() and not state.stopped:
            state.stopped = True
            for id in engine.waiting:
                engine.cancel(id)
                open_lines.pop(id)
        while more and not state.stopped and engine.num_waiting < engine.num_slots:
            asked = next(lines, None)
            if asked is None:
                more = False
                break
            error = asked.error
            if asked.request is not None:
                try:
                    engine.submit(asked.request)
                except ValueError as refused:
                    error = str(refused)
            if error is None:
                open_lines[asked.line] = (asked, [])
            else:
                wrote(failure(dataclasses.replace(asked, error=error)))
        finished = False
        for event in engine.step():
            if event.completion is None or event.id not in open_lines:
                continue
            asked, completions = open_lines[event.id]
            # It was submitted, and its line has settings.
            assert asked.request is not None
            assert asked.request.params is not None
            completions.append(event.completion)
            if len(completions) == asked.request.params.n:
                del open_lines[event.id]
                completions.sort(key=lambda completion: completion.index)
                wrote(answer(asked, completions, event.num_prompt_tokens, model))
                state.num_tokens += sum(len(completion.token_ids) for completion in completions)
                state.stats = total([state.stats, *(completion.stats for completion in completions)])
                finished = True
        state.seconds = time.perf_counter() - start
        if finished:
            progress(state)
    if state.complete:
        output.finish()
    return state
