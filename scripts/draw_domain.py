#!/usr/bin/env python3
"""A head before and after further training on one domain, inside and outside it: the tables and the picture of docs/training.md.

python scripts/draw_domain.py BEFORE.json AFTER.json --picture domain.svg

Both files are made by ``scripts/evaluate_drafts.py --domain CATEGORY ... --only 'eagle chain 4' --temperatures 0 0.7 1``. Needs
matplotlib (the extra ``plots``).
"""

import argparse
import json
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--picture", required=True)
    arguments = parser.parse_args()
    files = {"before": arguments.before, "after": arguments.after}
    runs = {name: json.loads(path.read_text())["results"] for name, path in files.items()}
    rows = {name: {row["temperature"]: row for row in results if row["drafter"] != "none"} for name, results in runs.items()}
    temperatures, kinds = list(rows["before"]), list(rows["before"][0.0]["by_category"])
    print("| temperature | " + " | ".join(f"{kind}, {name}" for kind in kinds for name in rows) + " |")
    print("|---" * (1 + 2 * len(kinds)) + "|")
    for temperature in temperatures:
        cells = [
            f"{rows[name][temperature]['acceptance_by_category'][kind]:.3f} ({rows[name][temperature]['by_category'][kind]:.2f})"
            for kind in kinds
            for name in rows
        ]
        print(f"| {temperature:g} | " + " | ".join(cells) + " |")
    print("\n| temperature | prompts | head | overlap | accepted of the tested |\n|---|---|---|---|---|")
    for temperature in temperatures:
        for kind in kinds:
            for name in rows:
                row = rows[name][temperature]
                overlap, accepted = row["overlap_by_category"][kind], row["acceptance_by_category"][kind]
                print(f"| {temperature:g} | {kind} | {name} | {overlap:.3f} | {accepted:.3f} |")
    draw(rows, temperatures, kinds, arguments.picture)


def draw(rows, temperatures, kinds, path):
    """Acceptance over temperature, and acceptance over overlap."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "specjax"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for color, kind in zip(("tab:blue", "tab:orange"), kinds, strict=True):
        for marker, line, name in (("o", "--", "before"), ("s", "-", "after")):
            found = [rows[name][temperature] for temperature in temperatures]
            accepted = [row["acceptance_by_category"][kind] for row in found]
            overlap = [row["overlap_by_category"][kind] for row in found]
            left.plot(temperatures, accepted, line, marker=marker, color=color, label=f"{kind}, {name}")
            right.plot(overlap, accepted, marker, color=color)
    left.set(xlabel="temperature", ylabel="accepted of the tested tokens")
    left.legend(fontsize=8)
    right.axline((0.4, 0.4), slope=1, color="gray", linewidth=0.8)
    right.set(xlabel="overlap, mean of sum(min(p, q))", ylabel="accepted of the tested tokens")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
