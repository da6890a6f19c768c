#!/usr/bin/env python3
"""Acceptance, overlap and tokens per round of every rule, over temperatures from 0 to 1.5.

    python scripts/temperature_sweep.py --model MODEL [--draft MODEL] [--output docs/measurements/temperature.json]
    python scripts/temperature_sweep.py --draw docs/measurements/temperature.json

Without ``--draft`` the draft is the target's first four fifths of layers with its own head: too dear to be of use, but right
often enough to compare the rules. A model without tokenizer goes on from its first token. ``--draw`` makes of the results the
picture and prints the table of docs/rules.md (needs matplotlib: the extra ``plots``).
"""

import argparse
import json
import pathlib
import sys

from record import record

import specjax
from specjax.models.shallow import keep_layers
from specjax.statistics import total
from specjax.tree import DraftTree

TEMPERATURES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
LENGTH = 4
TREE = DraftTree((-1, 0, 0, 1, 1, 2, 3, 4))
FIRST_TOKEN = 1
PROMPTS = 40
MAX_TOKENS = 64


def sweep(arguments):
    model = specjax.load_model(arguments.model, dtype="float32")
    layers = model.config.num_layers * 4 // 5
    draft = specjax.load_model(arguments.draft, dtype="float32") if arguments.draft else keep_layers(model, range(layers))
    chain = specjax.drafters.draft_model(draft, LENGTH)
    tree = specjax.drafters.draft_model(draft, tree=TREE)
    if model.tokenizer is None:
        prompts = [[FIRST_TOKEN]] * PROMPTS
    else:
        lines = pathlib.Path(__file__).with_name("prompts.txt").read_text().splitlines()
        prompts = [[{"role": "user", "content": text}] for text in lines[:PROMPTS]]
    cases = [("chain", chain, rule) for rule in ("match", "gumbel", "token", "block")]
    cases += [
        ("tree", tree, rule) for rule in ("membership", "gumbel", "multi_round", "kseq", "without_replacement", "traversal")
    ]
    results = []
    for shape, drafter, rule in cases:
        for temperature in TEMPERATURES:
            requests = [
                specjax.SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, ignore_eos=True, seed=seed)
                for seed in range(PROMPTS)
            ]
            stats = total([c.stats for c in specjax.generate(model, prompts, requests, drafter, rule=rule)])
            overlap = stats.overlap
            results.append(
                {
                    "shape": shape,
                    "rule": rule,
                    "temperature": temperature,
                    "draft_acceptance_rate": round(stats.draft_acceptance_rate, 3),
                    "overlap": None if overlap is None else round(overlap, 3),
                    "tokens_per_round": round(stats.mean_acceptance_length, 3),
                }
            )
            print(results[-1], file=sys.stderr, flush=True)
    record(
        "scripts/temperature_sweep.py",
        {
            "model": model.name,
            "draft": draft.name,
            "draft_length": LENGTH,
            "tree": list(TREE.parents),
            "prompts": PROMPTS,
            "max_tokens": MAX_TOKENS,
            "results": results,
        },
        arguments.output,
    )


def draw(path: pathlib.Path):
    """The picture beside the file, and the table on standard output."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "specjax"
    from matplotlib import pyplot

    document = json.loads(path.read_text())
    temperatures = sorted({row["temperature"] for row in document["results"]})
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    cases = list(dict.fromkeys((row["shape"], row["rule"]) for row in document["results"]))
    print("| draft | rule | " + " | ".join(f"T = {t:g}" for t in temperatures) + " |")
    print("|---" * (len(temperatures) + 2) + "|")
    for shape, rule in cases:
        rows = sorted(
            (r for r in document["results"] if (r["shape"], r["rule"]) == (shape, rule)), key=lambda r: r["temperature"]
        )
        style = "-" if shape == "chain" else "--"
        for axis, name in zip(axes, ("draft_acceptance_rate", "overlap", "tokens_per_round"), strict=True):
            if all(row[name] is not None for row in rows):
                axis.plot(temperatures, [row[name] for row in rows], style, marker="o", markersize=3, label=f"{rule} ({shape})")
        cells = []
        for row in rows:
            overlap = "" if row["overlap"] is None else f", {row['overlap']:.2f}"
            cells.append(f"{row['tokens_per_round']:.2f} ({row['draft_acceptance_rate']:.2f}{overlap})")
        print(f"| {shape} | `{rule}` | " + " | ".join(cells) + " |")
    for axis, title in zip(axes, ("accepted / drafted", "overlap, mean of sum(min(p, q))", "tokens per round"), strict=True):
        axis.set_title(title)
        axis.set_xlabel("temperature")
    axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a card's name, a file or a folder")
    parser.add_argument("--draft", help="a card's name or a file, instead of the target's own layers")
    parser.add_argument("--output")
    parser.add_argument("--draw", type=pathlib.Path, metavar="FILE.json")
    arguments = parser.parse_args()
    if arguments.draw:
        draw(arguments.draw)
    else:
        sweep(arguments)


if __name__ == "__main__":
    main()
