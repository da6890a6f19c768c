"""A batch job of several processes: process 0 alone has the files, and all answer the lines.

On the other hosts the files need not be. There, stand-ins have the same numbers and hold nothing::

    process 0   BatchInput --lines not answered yet, some at a time--> all processes, the same engine --records--> BatchOutput
    others      InputElsewhere                                                                        --counted--> OutputElsewhere
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from specjax.parallel import Processes
from specjax.serving.batch_lines import failed
from specjax.serving.batch_output import BatchInput, BatchOutput


@dataclasses.dataclass(frozen=True)
class InputElsewhere:
    """The input of a process that has none.

    Attributes:
      num_inputs: lines that are to be answered.
      digest: SHA-256 of the content.
    """

    num_inputs: int
    digest: str

    def __iter__(self) -> Iterator[tuple[int, bytes, int | None]]:
        """Nothing: lines come from process 0."""
        return iter(())


@dataclasses.dataclass
class OutputElsewhere:
    """The output of a process that writes none: it counts.

    Attributes:
      num_answered: lines that have a record.
      num_errors: those of them that could not be answered.
    """

    num_answered: int
    num_errors: int

    def has(self, line: int) -> bool:
        """Process 0 tells no line that has a record."""
        del line
        return False

    def write(self, record: dict) -> None:
        """Counts it."""
        self.num_answered += 1
        self.num_errors += failed(record)

    def finish(self) -> None:
        """Process 0 does that."""

    def close(self) -> None:
        """There is nothing to close."""


def open_input(processes: Processes, path: Path) -> BatchInput | InputElsewhere:
    """The input; process 0 reads it.

    Raises:
      RuntimeError: it cannot be read, or there is nothing in it.
    """
    source, facts = processes.on_first(lambda: BatchInput(path), lambda made: [made.num_inputs, made.digest])
    return InputElsewhere(*facts) if source is None else source


def open_output(
    processes: Processes, path: Path, job: dict, source: BatchInput | InputElsewhere, keep_order: bool
) -> BatchOutput | OutputElsewhere:
    """The output; process 0 writes it.

    Raises:
      RuntimeError: it is that of another job, or cannot be written.
    """

    def opened():
        assert isinstance(source, BatchInput)  # as it is on the first process
        return BatchOutput(path, job, source, keep_order)

    output, facts = processes.on_first(opened, lambda made: [made.num_answered, made.num_errors])
    return OutputElsewhere(*facts) if output is None else output


def unanswered(processes: Processes, source, output, block: int) -> Iterator[tuple[int, bytes, int | None]]:
    """Yields (number, line, earlier line of the same id or None) of every line without a record, on all processes alike.

    Args:
      processes: of the job.
      source: the input.
      output: the output.
      block: lines that process 0 tells at a time.
    """
    # JSON has no bytes: each becomes a character.
    lines = ((number, data.decode("latin-1"), twin) for number, data, twin in source if not output.has(number))
    for number, text, duplicate_of in processes.share(lines, block):
        yield number, text.encode("latin-1"), duplicate_of
