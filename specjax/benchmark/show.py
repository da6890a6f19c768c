"""A benchmark's document as tables and sentences."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specjax.benchmark.parts import PARTS
from specjax.benchmark.report import passes
from specjax.serving.memory import megabytes


def show(document: dict, console: Console) -> None:
    """Prints results, rounds and what memory would allow.

    Args:
      document: from :func:`specjax.benchmark.run.run`.
      console: where to.
    """
    rows = document["results"]
    console.print(_results(rows))
    console.print(
        "Speedups are over the fastest plain decoding of the same slots and temperature, whatever its dtype. Median of the "
        "repeats, and least to most. Predicted: by the formula, from acceptance and from what a round costs."
    )
    console.print(_by_kind(rows))
    console.print(_rounds(rows))
    console.print(
        "Milliseconds of a round that drafts all it can. Parts are timed alone; other is what the whole has beyond them. Passes: "
        "of the target, counted in the traced round. Over least: over the time that reading its weights and cache takes."
    )
    for line in (*roofline(document), *costs(document), *_times(rows), *document["notes"]):
        console.print(line, markup=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns[:2], title=title, title_justify="left")
    for column in columns[2:]:
        table.add_column(column, justify="right")
    return table


def label(row: dict) -> str:
    """A case's name, as short as it is told apart by.

    Example:
      >>> label({"drafter": "none", "dtype": "float32", "slots": 4, "temperature": 0.7, "rule": "gumbel", "adaptive": False})
      'none float32, 4 slots, temperature 0.7'
    """
    name = f"none {row['dtype']}" if row["drafter"] == "none" else f"{row['drafter']} {row['rule']}"
    name += ", adaptive" if row["adaptive"] else ""
    slots = "" if row["slots"] == 1 else f", {row['slots']} slots"
    return name + slots + (f", temperature {row['temperature']:g}" if row["temperature"] else "")


def _results(rows) -> Table:
    table = _table(
        f"{rows[0]['num_prompts']} prompts: {rows[0]['prompts']}",
        *("case", "drafts", "dtype", "tokens/s", "", "speedup", "", "predicted", "accepted", "tokens/round", "as plain"),
    )
    for row in rows:
        same = row["same_tokens"]
        drafts = f"{row['num_speculative_tokens']}, {row['shape']}" if row["num_speculative_tokens"] else "-"
        table.add_row(
            Text(label(row)),
            drafts,
            row["dtype"],
            f"{row['tokens_per_second']:.1f}",
            "{:.1f} to {:.1f}".format(*row["tokens_per_second_spread"]),
            f"{row['speedup']:.2f}",
            "{:.2f} to {:.2f}".format(*row["speedup_spread"]),
            f"{row['predicted_speedup']:.2f}",
            f"{row['draft_acceptance_rate']:.0%}",
            f"{row['mean_acceptance_length']:.2f}",
            "" if same is None else f"{same['equal']} of {row['num_prompts']}" + ("" if same["passed"] else " WRONG"),
        )
    return table


def _by_kind(rows) -> Table:
    drafting = [row for row in rows if row["num_speculative_tokens"]] or rows
    kinds = list(drafting[0]["by_kind"])
    table = _table("Tokens per round by kind of prompt, and speedup", "case", "drafts", *kinds)
    for row in drafting:
        cells = []
        for kind in kinds:
            found = row["by_kind"][kind]
            gain = f" ({found['speedup']:.2f})" if "speedup" in found else ""
            cells.append(f"{found['mean_acceptance_length']:.2f}{gain}")
        table.add_row(Text(label(row)), f"{row['num_speculative_tokens']}", *cells)
    return table


def _rounds(rows) -> Table:
    table = _table("Where the time of a round goes", "case", "drafted", "round", *PARTS, "passes", "over least")
    for row in rows:
        one = row["round"]
        table.add_row(
            Text(label(row)),
            f"{one['num_drafted']:g}",
            f"{one['seconds'] * 1e3:.2f}",
            *(f"{one['parts'][part] * 1e3:.2f}" for part in PARTS),
            passes(one),
            f"{one['over_least']:.2f}",
        )
    return table


def roofline(document: dict) -> list[str]:
    """What memory would allow a plain round, in a sentence for each dtype and number of slots."""
    speed = document["memory_bytes_per_second"]
    best = max(speed.values())
    lines = []
    for row in document["results"]:
        if row["drafter"] == "none":
            one, slots = row["round"], "" if row["slots"] == 1 else f" of {row['slots']} rows"
            line = (
                f"A plain {row['dtype']} round{slots} must read {megabytes(round(one['least_seconds'] * best))}; at the measured "
                f"{best / 1e9:.1f} GB/s that takes {one['least_seconds'] * 1e3:.2f} ms, and the round takes "
                f"{one['over_least']:.2f} times as long."
            )
            lines.append(line)
    return list(dict.fromkeys(lines))


def costs(document: dict) -> list[str]:
    """What verify passes cost, in a sentence."""
    if not document["verify_cost"]:
        return []
    passes = ", ".join(f"{cost:.2f} for {size}" for size, cost in document["verify_cost"].items())
    return [f"A verify pass costs, in passes over one token of the fastest dtype: {passes} tokens."]


def _times(rows) -> list[str]:
    compiling = sum(row["compile_seconds"] for row in rows)
    reading = sum(row["prefill_seconds"] for row in rows)
    return [f"Apart from all that: {compiling:.1f} s of compilation and {reading:.1f} s of reading prompts."]
