"""A benchmark's document as pictures (SVG); needs matplotlib, the extra ``plots``."""

import importlib.util
from pathlib import Path

from specjax.benchmark.parts import PARTS
from specjax.benchmark.report import passes
from specjax.benchmark.show import label

HEIGHT, WIDTH = 0.32, 9.0
"""Inches of a bar, and of a picture."""


def check_pictures(folder: str | Path) -> Path:
    """The folder, made where it is not there yet.

    Raises:
      ValueError: matplotlib is not installed, or there cannot be such a folder.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("pictures need the library matplotlib: pip install 'specjax[plots]'")
    folder = Path(folder).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"pictures go into a folder, and {folder} cannot be one: {error.strerror}") from error
    return folder


def draw(document: dict, folder: str | Path) -> list[Path]:
    """Writes the four pictures and returns their paths.

    Args:
      document: from :func:`specjax.benchmark.run.run`.
      folder: that they are written into.

    Raises:
      ValueError: as :func:`check_pictures`.
    """
    folder = check_pictures(folder)
    drawn = {
        "speedup": _speedup,
        "acceptance_by_position": _by_position,
        "acceptance_by_kind": _by_kind,
        "round_time": _round_time,
    }
    environment = document["environment"]
    about = f"{environment['model']}, {environment['processor'] or environment['device']}, {environment['date']}"
    return [_save(folder / f"{name}.svg", function, document["results"], about) for name, function in drawn.items()]


def _save(path: Path, function, rows: list[dict], about: str) -> Path:
    # Not through pyplot, which keeps figures and asks for a display.
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 1.6 + HEIGHT * max(8, len(rows))), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    function(axes, rows)
    figure.text(0.0, 0.0, about, fontsize="x-small", color="0.4")
    figure.savefig(path, metadata={"Date": None})
    return path


def _bars(axes, rows):
    """A bar for each row, the first at the top."""
    axes.set_yticks(range(len(rows)), [label(row) for row in rows], fontsize="small")
    axes.invert_yaxis()
    return range(len(rows))


def _speedup(axes, rows):
    places = _bars(axes, rows)
    values = [row["speedup"] for row in rows]
    spread = [
        [max(0.0, value - row["speedup_spread"][0]) for value, row in zip(values, rows, strict=True)],
        [max(0.0, row["speedup_spread"][1] - value) for value, row in zip(values, rows, strict=True)],
    ]
    axes.barh(places, values, xerr=spread, color="tab:blue", ecolor="0.3", label="measured")
    axes.plot([row["predicted_speedup"] for row in rows], list(places), "D", color="tab:orange", label="predicted")
    axes.axvline(1.0, color="0.3", linewidth=0.8)
    axes.set_xlabel("speedup over the fastest plain decoding")
    axes.legend()


def _drafting(rows):
    return [row for row in rows if row["num_speculative_tokens"]]


def _by_position(axes, rows):
    for row in _drafting(rows):
        shares = row["accepted_per_pos"]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=label(row))
    axes.set(xlabel="position in the draft", ylabel="share of the rounds that accepted so far", ylim=(0, 1))
    if _drafting(rows):
        axes.legend(fontsize="small")


def _by_kind(axes, rows):
    drafting = _drafting(rows)
    kinds = list(rows[0]["by_kind"])
    for number, row in enumerate(drafting):
        places = [place + (number + 0.5) * 0.8 / len(drafting) - 0.4 for place in range(len(kinds))]
        shares = [row["by_kind"][kind]["draft_acceptance_rate"] for kind in kinds]
        axes.bar(places, shares, width=0.8 / len(drafting), label=label(row))
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set(ylabel="accepted of the drafted tokens", ylim=(0, 1))
    if drafting:
        axes.legend(fontsize="small")


def _round_time(axes, rows):
    places = _bars(axes, rows)
    # Bars of parts that came out below zero would lie over others.
    left = [0.0] * len(rows)
    for part in PARTS:
        values = [max(0.0, row["round"]["parts"][part] * 1e3) for row in rows]
        axes.barh(places, values, left=left, label=part)
        left = [before + value for before, value in zip(left, values, strict=True)]
    for place, row in zip(places, rows, strict=True):
        words = passes(row["round"])
        axes.annotate(f" {words} pass" + ("" if words == "1" else "es"), (left[place], place), va="center", fontsize="small")
    axes.plot([row["round"]["least_seconds"] * 1e3 for row in rows], list(places), "|", color="black", label="reading alone")
    axes.set_xlabel("milliseconds of a round that drafts all it can")
    axes.legend(fontsize="small")
