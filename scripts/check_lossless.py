#!/usr/bin/env python3
"""Speculation changes no token of a real model: every drafter beside no drafter, on many prompts.

    python scripts/check_lossless.py [--model NAME] [--prompts FILE] [--max-tokens N] [--output FILE.json]

In float32 the tokens of each request must be those of plain decoding: greedy, and sampled with the gumbel rule (temperature 0.7,
top-p 0.9, all three penalties). Passes over other numbers of tokens round differently, so a first difference is allowed where the
deciding margin is below the tolerance; how often that happens is counted. Log-probabilities are compared with those of one
pass over the whole text. In bfloat16 the same is counted with a wider tolerance.
"""

import argparse
import itertools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from record import record

import specjax
from specjax.choices import KeyedChoices
from specjax.models.shallow import keep_layers
from specjax.tree import DraftTree

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.5}
"""Largest deciding margin, in log p + g (or log p for greedy), at which a first difference is put down to rounding."""

FORK = DraftTree((-1, 0, 0, 1, 1, 2))
BATCH = 8


def settings(kind: str, seed: int, max_tokens: int) -> specjax.SamplingParams:
    """The request of one prompt."""
    if kind == "greedy":
        return specjax.SamplingParams(temperature=0, max_tokens=max_tokens, seed=seed, logprobs=1)
    return specjax.SamplingParams(
        temperature=0.7,
        top_p=0.9,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        max_tokens=max_tokens,
        seed=seed,
        logprobs=1,
    )


def drafters(model) -> dict:
    """What is compared with no drafter: a lookup, and a draft model of the target's first layers as chain and as tree."""
    early = keep_layers(model, range(model.config.num_layers // 3))
    return {
        "prompt_lookup, K = 8": specjax.drafters.prompt_lookup(8),
        "draft_model, K = 4": specjax.drafters.draft_model(early, 4),
        f"draft_model, tree of {FORK.num_nodes}": specjax.drafters.draft_model(early, tree=FORK),
    }


def run(model, prompts, kind, max_tokens, drafter):
    """Completions of all prompts, in batches of one size."""
    out = []
    for batch in itertools.batched(enumerate(prompts), BATCH):
        requests = [settings(kind, 1000 + index, max_tokens) for index, _ in batch]
        chats = [[{"role": "user", "content": text}] for _, text in batch]
        out += specjax.generate(model, chats, requests, drafter, rule="gumbel")
    return out


@jax.jit
def whole_pass(model_params, tokens, functions=None):
    raise NotImplementedError


def teacher_forced(model, prompt, token_ids, width):
    """[tokens, V] raw log-probabilities of every new token's place, from one pass over the whole text."""
    ids = [*prompt, *token_ids]
    padded = jnp.asarray([ids + [0] * (width - len(ids))])
    output = _forward(model.functions, model.params, padded)
    logits = _unembed(model.functions, model.params, output[:, len(prompt) - 1 : len(ids) - 1])
    return np.asarray(jax.nn.log_softmax(logits[0, :, : model.vocab_size], axis=-1))


def _forward(functions, params, tokens):
    return _jitted_forward(functions)(params, tokens)


def _unembed(functions, params, hidden):
    return functions.unembed(params, hidden)
