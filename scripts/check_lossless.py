#!/usr/bin/env python3
"""Speculation changes no token of a real model: every drafter beside no drafter, on many prompts.

    python scripts/check_lossless.py [--model NAME] [--prompts FILE] [--max-tokens N] [--output FILE.json]

The tokens of each request must be those of plain decoding: greedy, and sampled with the gumbel rule (temperature 0.7, top-p 0.9,
all three penalties). Passes over other numbers of tokens round differently, so a first difference is allowed where the deciding
margin (top two of log p, plus noise where sampled, or the distance of a token to the filter's threshold) is below the tolerance;
how often that happens is counted. Log-probabilities are compared with those of one pass over the whole text.
"""

import argparse
import pathlib
import sys

import jax
import numpy as np
from record import record

import specjax
from specjax.benchmark.equality import TOLERANCES, compare, logits_of
from specjax.models.shallow import keep_layers
from specjax.statistics import total
from specjax.tree import DraftTree

TREE = DraftTree((-1, 0, 0, 1, 1))
BATCH = 8
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "gumbel": {
        "temperature": 0.7,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
    },
}


def drafters(model) -> dict:
    """No drafter, a lookup, and a draft model of the target's first layers as chain and as tree."""
    early = keep_layers(model, range(model.config.num_layers * 5 // 6))
    return {
        "none": None,
        "prompt_lookup, K = 8": specjax.drafters.prompt_lookup(8),
        "draft_model, K = 3": specjax.drafters.draft_model(early, 3),
        f"draft_model, tree of {TREE.num_nodes}": specjax.drafters.draft_model(early, tree=TREE),
    }


def generated(model, prompts, requests, drafter):
    """Completions of all prompts, in batches of one size."""
    out = []
    for start in range(0, len(prompts), BATCH):
        part = slice(start, start + BATCH)
        out += specjax.generate(model, prompts[part], requests[part], drafter, rule="gumbel")
        print(".", end="", file=sys.stderr, flush=True)
    return out


def tokens_of(completions):
    """Token ids of each."""
    return [completion.token_ids for completion in completions]


def logprob_error(model, prompts, completions, width):
    """Largest difference of a reported log-probability from that of one pass over the whole text."""
    worst = 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = [*prompt, *completion.token_ids]
        logits = logits_of(model, ids, width)[len(prompt) - 1 : -1, : model.vocab_size]
        exact = np.asarray(jax.nn.log_softmax(logits, axis=-1))
        for row, reported in zip(exact, completion.logprobs, strict=True):
            worst = max(worst, *(abs(row[token] - value) for token, value in reported.items()))
    return float(worst)


def write(arguments, num_prompts, results):
    """The results so far."""
    record(
        "scripts/check_lossless.py",
        {
            "model": arguments.model,
            "prompts": num_prompts,
            "max_tokens": arguments.max_tokens,
            "settings": SETTINGS,
            "tolerances": TOLERANCES,
            "results": results,
        },
        arguments.output,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", default=pathlib.Path(__file__).with_name("prompts.txt"), help="a prompt on each line")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=list(TOLERANCES))
    parser.add_argument("--output")
    arguments = parser.parse_args()
    texts = pathlib.Path(arguments.prompts).read_text().splitlines()
    results = []
    for dtype in arguments.dtypes:
        model = specjax.load_model(arguments.model, dtype=dtype)
        prompts = [model.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
        width = -(-(max(map(len, prompts)) + arguments.max_tokens) // 64) * 64
        for kind, settings in SETTINGS.items():
            requests = [
                specjax.SamplingParams(**settings, max_tokens=arguments.max_tokens, seed=1000 + index, logprobs=1)
                for index in range(len(prompts))
            ]
            plain = None
            for name, drafter in drafters(model).items():
                completions = generated(model, prompts, requests, drafter)
                plain = plain or completions
                row = {"dtype": dtype, "settings": kind, "drafter": name}
                row |= compare(model, prompts, requests, *(tokens_of(each) for each in (plain, completions)), TOLERANCES[dtype])
                row["tokens_per_round"] = round(total(c.stats for c in completions).mean_acceptance_length, 3)
                if dtype == "float32":
                    row["logprob_error"] = round(logprob_error(model, prompts, completions, width), 7)
                    row["passed"] &= row["logprob_error"] <= 1e-4
                results.append(row)
                print(row, file=sys.stderr, flush=True)
                # After each, so that a run that is cut short leaves what it has.
                write(arguments, len(texts), results)
    return 0 if all(row["passed"] for row in results) else 1


if __name__ == "__main__":
    sys.exit(main())
