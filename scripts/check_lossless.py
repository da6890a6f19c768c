#!/usr/bin/env python3
"""Speculation changes no token of a real model: every drafter beside no drafter, on many prompts.

    python scripts/check_lossless.py [--model NAME] [--prompts FILE] [--max-tokens N] [--output FILE.json]

The tokens of each request must be those of plain decoding: greedy, and sampled with the gumbel rule (temperature 0.7, top-p 0.9,
all three penalties). Passes over other numbers of tokens round differently, so a first difference is allowed where the deciding
margin (top two of log p, plus noise where sampled, or the distance of a token to the filter's threshold) is below the tolerance;
how often that happens is counted. Log-probabilities are compared with those of one pass over the whole text.
"""

import argparse
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from record import record

import specjax
from specjax.choices import KeyedChoices
from specjax.models.shallow import keep_layers
from specjax.sampling import PathDistribution, SamplingArrays
from specjax.statistics import total
from specjax.tree import DraftTree

TOLERANCES = {"float32": 1e-3, "bfloat16": 1.0, "int8": 1.0}
"""Largest deciding margin, in units of log p, at which a first difference is put down to rounding."""

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


@functools.partial(jax.jit, static_argnames="functions")
def whole_pass(functions, params, tokens):
    """Logits [1, T, V] of a text that is fed at once."""
    positions = jnp.arange(tokens.shape[1])[None]
    output = functions.apply(params, tokens, positions, functions.init_cache(params, 1, 1), None)
    return functions.unembed(params, output.hidden).astype(jnp.float32)


def logits_of(model, ids, width):
    """Logits [len(ids), V]."""
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(ids)] = ids
    return whole_pass(model.functions, model.params, jnp.asarray(padded))[0, : len(ids)]


def margin(model, prompt, emitted, request, width):
    """How far the token behind ``emitted`` was from being another one, computed from one pass over the text."""
    ids = [*prompt, *emitted]
    logits = logits_of(model, ids, width)[-1][None, None]
    lengths = jnp.array([len(ids)])
    sampling = SamplingArrays.stack([request], [request.seed])
    stops = jnp.array([[*model.stop_token_ids]])
    text = jnp.asarray([ids])
    distribution = PathDistribution.create(
        sampling, text, jnp.array([len(prompt)]), lengths, stops, model.vocab_size, width=logits.shape[-1]
    )
    no_path, no_drafts = jnp.zeros((1, 1, 0), jnp.int32), jnp.zeros((1,), jnp.int32)
    unfiltered = distribution.replace(
        sampling=sampling.replace(top_p=jnp.ones(1), temperature=jnp.array([request.temperature or 1.0]))
    )
    soft = unfiltered.log_probs(logits, no_path, no_drafts)[0, 0]
    if request.greedy:
        best = jnp.sort(soft)[-2:]
        return float(best[1] - best[0])
    kept = distribution.log_probs(logits, no_path, no_drafts)[0, 0]
    noise = KeyedChoices.from_seeds([request.seed], committed=lengths).gumbel(0, logits.shape[-1], jnp.float32)[0]
    best = jnp.sort(kept + noise)[-2:]
    # A token just inside or outside of the filter, whose noise would have won.
    winning = soft + noise > best[0]
    edge = jnp.min(jnp.where(kept > -jnp.inf, soft, jnp.inf))
    distance = jnp.min(jnp.where(winning, jnp.abs(soft - edge), jnp.inf))
    return float(jnp.minimum(best[1] - best[0], distance))


def compare(model, prompts, requests, plain, others, tolerance, width):
    """Counts of equal texts and of first differences, with their margins."""
    margins = []
    for prompt, request, one, other in zip(prompts, requests, plain, others, strict=True):
        pairs = list(zip(one.token_ids, other.token_ids, strict=False))
        place = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
        if place is not None:
            margins.append(margin(model, prompt, one.token_ids[:place], request, width))
        elif len(one.token_ids) != len(other.token_ids):
            margins.append(float("inf"))
    return {
        "equal": len(prompts) - len(margins),
        "differ": len(margins),
        "largest_margin": round(max(margins, default=0.0), 6),
        "passed": all(m <= tolerance for m in margins),
        "tokens_per_round": round(total([o.stats for o in others]).mean_acceptance_length, 3),
    }


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
                row |= compare(model, prompts, requests, plain, completions, TOLERANCES[dtype], width)
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
