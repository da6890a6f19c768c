#!/usr/bin/env python3
"""Measures what a dtype costs in quality: perplexity on a text, and how often the most likely token is float32's.

    python scripts/measure_quality.py TEXT.txt [TEXT.txt ...] [--model NAME] [--dtypes NAME ...] [--tokens N] [--output FILE.json]

From each text some N tokens are taken, from evenly spread places, in pieces that are each fed in one pass and scored from their
second token on. Differences from float32 are token by token; the standard error of the mean change of log p says how much of it
could be chance.
"""

import argparse
import functools
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from record import record

import specjax

CHARACTERS_PER_TOKEN = 12
"""More than tokens have, so that a stretch of the text is long enough for a piece."""


def pieces_of(model, text: str, count: int, size: int) -> np.ndarray:
    """[count, size] ids."""
    stretch = CHARACTERS_PER_TOKEN * size
    if len(text) < count * stretch:
        raise SystemExit(f"the text has {len(text)} characters; {count} pieces of {size} tokens need {count * stretch}")
    starts = np.linspace(0, len(text) - stretch, count).astype(int)
    # From the second line of each stretch: the first is cut somewhere.
    stretches = [text[start : start + stretch].partition("\n")[2] or text[start : start + stretch] for start in starts]
    return np.array([model.tokenizer.encode(part)[:size] for part in stretches], np.int32)


@functools.partial(jax.jit, static_argnames="functions")
def score(functions, params, tokens):
    """Log-probability of every token from the second on, and the most likely one: [T - 1] each, of [1, T] tokens."""
    positions = jnp.arange(tokens.shape[1])[None]
    output = functions.apply(params, tokens, positions, functions.init_cache(params, 1, 1), None)
    logits = functions.unembed(params, output.hidden)[0, :-1].astype(jnp.float32)
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    return jnp.take_along_axis(log_probs, tokens[0, 1:, None], axis=1)[:, 0], jnp.argmax(logits, axis=-1)


def scores(model, pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same of all pieces, one after the other: [count, T - 1]."""
    both = [jax.device_get(score(model.functions, model.params, jnp.asarray(piece[None]))) for piece in pieces]
    return np.stack([log_probs for log_probs, _ in both]).astype(np.float64), np.stack([best for _, best in both])


def compared(scored, reference) -> dict:
    """What is reported of one dtype."""
    (log_probs, best), (exact, exact_best) = scored, reference
    change = exact - log_probs
    return {
        "perplexity": round(math.exp(-log_probs.mean()), 4),
        "perplexity_over_float32": round(math.exp(change.mean()), 5),
        "standard_error_of_mean_change": round(float(change.std() / math.sqrt(change.size)), 6),
        "mean_absolute_change_of_log_p": round(float(np.abs(change).mean()), 5),
        "top_1_agreement": round(float((best == exact_best).mean()), 5),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="a text in UTF-8")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "int8"], help="beside float32")
    parser.add_argument("--tokens", type=int, default=4096, help="of each text")
    parser.add_argument("--size", type=int, default=256, help="tokens of a pass")
    parser.add_argument("--output")
    arguments = parser.parse_args()
    texts = {pathlib.Path(name).name: pathlib.Path(name).read_text() for name in arguments.texts}
    pieces, references, results = {}, {}, {name: {} for name in texts}
    for dtype in ["float32", *arguments.dtypes]:
        model = specjax.load_model(arguments.model, dtype=dtype)
        for name, text in texts.items():
            if name not in pieces:
                pieces[name] = pieces_of(model, text, -(-arguments.tokens // arguments.size), arguments.size)
            scored = scores(model, pieces[name])
            references.setdefault(name, scored)
            results[name][dtype] = compared(scored, references[name])
            print(name, dtype, results[name][dtype], flush=True)
    result = {
        "model": arguments.model,
        "tokens_per_pass": arguments.size,
        "tokens_scored": {name: int(some.shape[0] * (some.shape[1] - 1)) for name, some in pieces.items()},
        "results": results,
    }
    record("scripts/measure_quality.py", result, arguments.output)


if __name__ == "__main__":
    main()
