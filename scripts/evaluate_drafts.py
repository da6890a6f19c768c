#!/usr/bin/env python3
"""Tokens per round of trained drafts, lookup and stacks on prompts that nothing was trained on.

python scripts/evaluate_drafts.py --prompts PROMPTS.jsonl [--eagle FOLDER] [--medusa FOLDER] [--output FILE.json]

Every drafter answers the same prompts in an engine of several slots, which changes no token and so no acceptance; greedy answers
are checked to be those of plain decoding. Trees of up to 16 nodes are built from the accuracies in the heads' cards.
"""

import argparse
import collections
import json
import sys
import time
from pathlib import Path

from record import record

import specjax
from specjax.drafters import eagle, medusa, prompt_lookup, stacked
from specjax.row_trees import TreeBounds
from specjax.statistics import total
from specjax.tree_shapes import greedy_product_tree


def drafters(arguments) -> dict:
    """What is measured, by name."""
    found = {"none": None, "lookup 8": prompt_lookup(8)}
    if arguments.eagle:
        head = specjax.load_head(arguments.eagle)
        tree = greedy_product_tree(deepened(head.facts["accuracies"], 5), 16)
        found |= {
            "eagle chain 4": eagle(head, 4),
            "eagle tree 16": eagle(head, tree=tree),
            "eagle growing tree 16": eagle(head, tree=TreeBounds(16, 5), branching=4),
            "lookup 8, then eagle chain 4": stacked(prompt_lookup(8), eagle(head, 4)),
            "lookup 8, then eagle tree 16": stacked(prompt_lookup(8), eagle(head, tree=tree)),
        }
    if arguments.medusa:
        heads = specjax.load_head(arguments.medusa)
        found["medusa chain 3"] = medusa(heads, 3)
        found["medusa tree 16"] = medusa(heads, tree=greedy_product_tree(heads.facts["accuracies"], 16))
    if arguments.only:
        found = {name: drafter for name, drafter in found.items() if any(part in name for part in arguments.only)}
    return found


def deepened(accuracies, depth: int) -> list:
    """Accuracies for more depths than were trained: those of the deepest are repeated."""
    return list(accuracies) + [accuracies[-1]] * (depth - len(accuracies))


def read_prompts(path: str, most: int | None) -> list[tuple[str, str]]:
    """(category, first turn) of some prompts, spread evenly over the file."""
    lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    if most is not None and most < len(lines):
        lines = [lines[index * len(lines) // most] for index in range(most)]
    return [(line.get("category", "all"), line.get("prompt") or line["turns"][0]) for line in lines]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", required=True, help="JSON lines with 'turns' or 'prompt', and perhaps 'category'")
    parser.add_argument("--most", type=int, help="so many prompts, spread evenly over the file; all unless given")
    parser.add_argument("--eagle", help="folder of an autoregressive head")
    parser.add_argument("--medusa", help="folder of Medusa heads")
    parser.add_argument("--domain", nargs="*", default=[], help="categories that are counted together; the rest are 'other'")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of the drafters that are measured")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    model = specjax.load_model(arguments.model, dtype="float32")
    prompts = read_prompts(arguments.prompts, arguments.most)
    if arguments.domain:
        unknown = set(arguments.domain) - {category for category, _ in prompts}
        if unknown:
            parser.error(f"--domain names {sorted(unknown)}; the prompts have {sorted({category for category, _ in prompts})}")
        domain = "+".join(arguments.domain)
        prompts = [(domain if category in arguments.domain else "other", text) for category, text in prompts]
    chats = [[{"role": "user", "content": text}] for _, text in prompts]
    longest = max(len(model.tokenizer.encode_chat(chat)) for chat in chats)
    rows, plain = [], None
    for name, drafter in drafters(arguments).items():
        capacity = -(-(longest + arguments.max_tokens) // 64) * 64
        with specjax.Engine(model, drafter=drafter, slots=arguments.slots, capacity=capacity) as engine:
            for temperature in arguments.temperatures if drafter is not None else [0.0]:
                start = time.perf_counter()
                settings = [
                    specjax.SamplingParams(temperature=temperature, max_tokens=arguments.max_tokens, seed=seed)
                    for seed in range(len(chats))
                ]
                requests = [specjax.Request(chat, setting) for chat, setting in zip(chats, settings, strict=True)]
                done = engine.run(requests)
                stats = total(completion.stats for completion in done)
                row = {
                    "drafter": name,
                    "rule": engine.rule.name,
                    "temperature": temperature,
                    "tokens_per_round": round(stats.mean_acceptance_length, 3),
                    "draft_acceptance_rate": round(stats.draft_acceptance_rate, 3),
                    "tested_acceptance_rate": round(stats.tested_acceptance_rate, 3),
                    "accepted_per_pos": [round(n / stats.num_drafts, 3) for n in stats.num_accepted_tokens_per_pos],
                    "overlap": None if stats.overlap is None else round(stats.overlap, 3),
                    "by_source": {source: round(s.mean_acceptance_length, 3) for source, s in stats.by_source.items()},
                    "by_category": by_category(prompts, done, "mean_acceptance_length"),
                    "acceptance_by_category": by_category(prompts, done, "tested_acceptance_rate"),
                    "overlap_by_category": by_category(prompts, done, "overlap"),
                    "num_tokens": stats.num_tokens,
                }
                if temperature == 0:
                    tokens = [completion.token_ids for completion in done]
                    plain = tokens if plain is None else plain
                    row["same_as_plain"] = sum(a == b for a, b in zip(tokens, plain, strict=True))
                rows.append(row)
                print(f"{time.perf_counter() - start:.0f} s: {json.dumps(row)}", file=sys.stderr, flush=True)
    command = (
        f"python scripts/evaluate_drafts.py --prompts {Path(arguments.prompts).name} --max-tokens {arguments.max_tokens}"
        + (f" --most {arguments.most}" if arguments.most else "")
        + (f" --domain {' '.join(arguments.domain)}" if arguments.domain else "")
        + "".join(f" --{kind} FOLDER" for kind in ("eagle", "medusa") if getattr(arguments, kind))
    )
    record(command, {"num_prompts": len(prompts), "max_tokens": arguments.max_tokens, "results": rows}, arguments.output)


def by_category(prompts, done, statistic: str) -> dict:
    """A statistic of each kind of prompt."""
    kinds = collections.defaultdict(list)
    for (category, _), completion in zip(prompts, done, strict=True):
        kinds[category].append(completion.stats)
    values = {category: getattr(total(stats), statistic) for category, stats in kinds.items()}
    return {category: None if value is None else round(value, 3) for category, value in values.items()}


if __name__ == "__main__":
    main()
