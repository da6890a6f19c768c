"""What is printed beside the text. The commands print it on standard error, so that standard output holds the text alone."""

import itertools

from rich.console import Console
from rich.table import Table
from rich.text import Text

STANDARD_ERROR = Console(stderr=True, highlight=False)


def print_header(model, console: Console = STANDARD_ERROR) -> None:
    """One line: model, device and dtype, and why this dtype."""
    import jax

    device = jax.devices()[0]
    console.print(f"{model.name} on {device.platform} ({device.device_kind}), {model.dtype}: {model.dtype_reason}", markup=False)


def progress(results, total: int, what: str, console: Console = STANDARD_ERROR):
    """Yields the ``total`` results; a terminal shows ``what`` is at work, and how far it is."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn(what))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        for result in results:
            bar.advance(task)
            yield result


def print_text(pieces, console: Console = STANDARD_ERROR):
    """Prints a stream's text on standard output as it comes, and returns the completion. ``console`` shows the wait before."""
    pieces = iter(pieces)
    with console.status("compiling, and reading the prompt"):
        first = next(pieces)
    for piece in itertools.chain([first], pieces):
        print(piece.text, end="", flush=True)
    print(flush=True)
    return piece.completion


def print_statistics(completion, console: Console = STANDARD_ERROR) -> None:
    """A table of one completion's statistics."""
    stats = completion.stats
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in (
        ("tokens", f"{stats.num_tokens} ({completion.finish_reason})"),
        ("tokens per second", f"{stats.tokens_per_second:.1f}"),
        ("prompt, seconds", f"{stats.prefill_seconds:.2f}"),
        ("rounds", f"{stats.num_drafts}"),
        ("drafted tokens", f"{stats.num_draft_tokens}"),
        ("accepted tokens", f"{stats.num_accepted_tokens} ({stats.draft_acceptance_rate:.0%})"),
        ("tokens per round", f"{stats.mean_acceptance_length:.2f}"),
        ("accepted by position", _by_position(stats)),
        *_by_source(stats),
        ("seed", f"{completion.seed}"),
    ):
        table.add_row(Text(name), value)
    console.print(table)


def print_comparison(plain, speculative, num_draft: int, propose_seconds: float, console: Console = STANDARD_ERROR) -> None:
    """Two completions of one prompt, without and with speculation: figures side by side, then in words.

    Args:
      plain: the completion without.
      speculative: the completion with.
      num_draft: K.
      propose_seconds: measured time of one proposal.
      console: where to.
    """
    from specjax.statistics import explain

    table = Table("", "plain", "speculative")
    for column in table.columns[1:]:
        column.justify = "right"
    pair = (plain.stats, speculative.stats)
    table.add_row("tokens", *(f"{stats.num_tokens}" for stats in pair))
    table.add_row("tokens per second", *(f"{stats.tokens_per_second:.1f}" for stats in pair))
    table.add_row("rounds", *(f"{stats.num_drafts}" for stats in pair))
    table.add_row("tokens per round", *(f"{stats.mean_acceptance_length:.2f}" for stats in pair))
    table.add_row("drafted tokens", *(f"{stats.num_draft_tokens}" for stats in pair))
    table.add_row("accepted tokens", *(f"{stats.num_accepted_tokens}" for stats in pair))
    console.print(table)
    console.print(f"Accepted by position in the draft: {_by_position(speculative.stats)}")
    for name, words in _by_source(speculative.stats):
        console.print(f"{name}: {words}.", markup=False)
    console.print(_same_tokens(plain.token_ids, speculative.token_ids))
    for line in explain(plain.stats, speculative.stats, num_draft, propose_seconds):
        console.print(line)


def _by_position(stats) -> str:
    return " ".join(str(count) for count in stats.num_accepted_tokens_per_pos) or "-"


def _by_source(stats):
    """(name, words) of each of the drafters that a stack is made of."""
    for name, source in stats.by_source.items():
        accepted = f"{source.num_accepted_tokens} of {source.num_draft_tokens} tokens accepted"
        length = f"{source.mean_acceptance_length:.2f} tokens per round"
        yield f"from {name}", f"{source.num_drafts} rounds, {accepted}" + (f", {length}" if source.num_drafts else "")


def _same_tokens(plain, speculative) -> str:
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(plain, speculative, strict=False)))
    if same == len(plain) == len(speculative):
        return f"Both runs gave the same {same} tokens."
    return (
        f"The runs differ from token {same + 1} on. One-token and longer passes round differently, which decides where "
        "the target's two best tokens are nearly equal; in float32 that is rare."
    )
