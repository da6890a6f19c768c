#!/usr/bin/env python3
"""Frequencies of the first and second token of many seeded runs of a small model, against the target's exact probabilities.

    python scripts/sample_frequencies.py --model FOLDER [--runs N] [--output FILE.json]

Every run is a request with a seed of its own, through ``specjax.generate`` as it ships. The exact probabilities come from the
target's logits: the first token's directly, the second token's summed over all first tokens. Stated beforehand: each of the
chi-square tests passes if its p-value is at least 0.001; with 14 tests a right sampler fails one of them in 1.4% of
all choices of seeds. Tokens whose expected count is below 5 are counted together.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
from record import record
from scipy import stats

import specjax
from specjax.models.shallow import keep_layers
from specjax.statistics import total
from specjax.tree import DraftTree

LEAST_P_VALUE = 0.001
PROMPT = (1, 403, 407, 261, 378, 432, 383, 286, 261, 376)
BATCH = 1000
TREE = DraftTree((-1, 0, 0, 1, 1, 2, 2))


def exact(model, prompt):
    """[V] probabilities of the first new token, and [V] of the second."""

    @jax.jit
    def after(tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        hidden = model.apply(model.params, tokens, positions, model.init_cache(len(tokens), 1)).hidden[:, -1]
        return jax.nn.softmax(model.unembed(model.params, hidden)[:, : model.vocab_size])

    first = after(jnp.array([prompt]))[0]
    every = jnp.concatenate([jnp.tile(jnp.array([prompt]), (model.vocab_size, 1)), jnp.arange(model.vocab_size)[:, None]], axis=1)
    return np.asarray(first, np.float64), np.asarray(first, np.float64) @ np.asarray(after(every), np.float64)


def p_value(counts, probabilities):
    """Of the chi-square test, rare tokens together."""
    expected = probabilities / probabilities.sum() * counts.sum()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    kept = wanted > 0
    return float(stats.chisquare(observed[kept], wanted[kept] / wanted[kept].sum() * observed[kept].sum()).pvalue), int(
        kept.sum()
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a model with a small vocabulary")
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    model = specjax.load_model(arguments.model, dtype="float32")
    draft = keep_layers(model, range(model.config.num_layers - 1))
    chain, tree = specjax.drafters.draft_model(draft, 2), specjax.drafters.draft_model(draft, tree=TREE)
    cases = {
        "none": (None, "match"),
        "token, K = 2": (chain, "token"),
        "block, K = 2": (chain, "block"),
        "gumbel, K = 2": (chain, "gumbel"),
        f"without_replacement, tree of {TREE.num_nodes}": (tree, "without_replacement"),
        f"kseq, tree of {TREE.num_nodes}": (tree, "kseq"),
        f"traversal, tree of {TREE.num_nodes}": (tree, "traversal"),
    }
    wanted = exact(model, PROMPT)
    results = []
    for case, (drafter, rule) in cases.items():
        counts, stats_of_runs = np.zeros((2, model.vocab_size)), []
        for start in range(0, arguments.runs, BATCH):
            requests = [
                specjax.SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, seed=start + row)
                for row in range(min(BATCH, arguments.runs - start))
            ]
            for completion in specjax.generate(model, [list(PROMPT)] * len(requests), requests, drafter, rule=rule):
                for place in range(2):
                    counts[place, completion.token_ids[place]] += 1
                stats_of_runs.append(completion.stats)
        tests = [p_value(count, probabilities) for count, probabilities in zip(counts, wanted, strict=True)]
        summed = total(stats_of_runs)
        results.append(
            {
                "case": case,
                "p_value": [round(p, 4) for p, _ in tests],
                "cells": [cells for _, cells in tests],
                "passed": all(p >= LEAST_P_VALUE for p, _ in tests),
                "draft_acceptance_rate": round(summed.draft_acceptance_rate, 4),
            }
        )
        print(results[-1], file=sys.stderr, flush=True)
    record(
        "scripts/sample_frequencies.py --model stories260K",
        {"runs": arguments.runs, "least_p_value": LEAST_P_VALUE, "prompt": list(PROMPT), "results": results},
        arguments.output,
    )
    return 0 if all(result["passed"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
