#!/usr/bin/env python3
"""Measures what a round costs on this machine: plain steps and verify passes by dtype and size, and the share of sampling.

    .venv/bin/python scripts/measure_round.py [--model NAME] [--dtypes NAME ...] [--repeats N] [--output FILE.json]

A round drafts a fixed number of tokens (whatever they are), so that the target verifies exactly T = K + 1. All cases are
compiled first and then timed in turns; medians and quartiles are printed. The share of sampling is the time from logits to a
verdict (temperature 0.7, top-p 0.9, min-p 0.05, gumbel rule) over that of a round with these settings.
"""

import argparse
import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from record import record

import specjax
from specjax.benchmark.parts import judge, target_pass
from specjax.decoding.costs import propose_once
from specjax.decoding.generate import Batch
from specjax.decoding.round import prefill, run_rounds
from specjax.drafters import BoundDrafter, NoDrafter
from specjax.tree import Draft, DraftTree, Law
from specjax.user_cache import processor

SIZES = (1, 2, 4, 8, 16)
PROMPT = "Describe a walk along the coast in autumn."


@dataclasses.dataclass(frozen=True)
class FixedDrafter(NoDrafter):
    """Always drafts the same tokens."""

    num_tokens: int
    law_choices = (Law.DETERMINISTIC,)

    @property
    def tree(self):
        return DraftTree.chain(self.num_tokens)

    def propose(self, params, state, context, choices, num_draft):
        batch, laws = num_draft.shape[0], (Law.DETERMINISTIC,) * self.num_tokens
        tokens = jnp.broadcast_to(jnp.arange(7, 7 + self.num_tokens), (batch, self.num_tokens))
        return Draft(tokens, jnp.ones(tokens.shape, bool), None, self.tree, laws), state


def prepared(model, params, size):
    """A batch of one prompt whose state is ready for rounds of ``size`` tokens."""
    drafter = BoundDrafter(FixedDrafter(size - 1)) if size > 1 else None
    batch = Batch.prepare(model, [[{"role": "user", "content": PROMPT}]], params, drafter, "auto", False)
    state = prefill(batch.program, batch.params, batch.initial_state(), jnp.int32(100))
    return batch, state


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output")
    arguments = parser.parse_args()

    greedy = specjax.SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    sampled = specjax.SamplingParams(temperature=0.7, top_p=0.9, min_p=0.05, max_tokens=400, seed=1, ignore_eos=True)
    cases = {}
    for dtype in arguments.dtypes:
        model = specjax.load_model(arguments.model, dtype=dtype)
        for size in SIZES:
            for kind, params in (("greedy", greedy), ("sampled", sampled)):
                if kind == "sampled" and size not in (1, 8):
                    continue
                batch, state = prepared(model, params, size)
                state, _ = run_rounds(batch.program, batch.params, state, jnp.int32(1))
                cases[dtype, size, kind] = [batch, state]
            if size in (1, 8):
                program, params = batch.program, batch.params
                draft = propose_once(program, params, state)
                logits = target_pass(program, params, state, draft)[0]
                cases[dtype, size, "sampling"] = [batch, functools.partial(judge, program, params, draft=draft, logits=logits)]
                cases[dtype, size, "pass"] = [batch, functools.partial(target_pass, program, params, draft=draft)]
                for kind in ("sampling", "pass"):
                    jax.block_until_ready(cases[dtype, size, kind][1](state=state))
        print(f"{dtype}: compiled", flush=True)

    seconds = {case: [] for case in cases}
    for _ in range(arguments.repeats):
        for case, entry in cases.items():
            batch, second = entry
            start = time.perf_counter()
            if case[2] in ("sampling", "pass"):
                jax.block_until_ready(second(state=cases[*case[:2], "sampled"][1]))
            else:
                entry[1], info = run_rounds(batch.program, batch.params, second, jnp.int32(1))
                jax.block_until_ready(info)
                assert int(info.rounds) == 1, "the prompt's budget is used up: fewer repeats"
            seconds[case].append(time.perf_counter() - start)

    def milliseconds(case):
        return [round(float(q) * 1e3, 2) for q in np.quantile(seconds[case], (0.25, 0.5, 0.75))]

    rounds = {f"{d} {s} {k}": milliseconds((d, s, k)) for d, s, k in cases}
    plain = min(milliseconds((d, 1, "greedy"))[1] for d in arguments.dtypes)
    verify = {d: {str(s): round(milliseconds((d, s, "greedy"))[1] / plain, 3) for s in SIZES if s > 1} for d in arguments.dtypes}
    sampling = {
        f"{d} {s}": round(milliseconds((d, s, "sampling"))[1] / milliseconds((d, s, "sampled"))[1], 3)
        for d in arguments.dtypes
        for s in (1, 8)
    }
    result = {
        "environment": {
            "processor": processor(),
            "model": arguments.model,
            "repeats": arguments.repeats,
        },
        "milliseconds_quartiles": rounds,
        "fastest_plain_milliseconds": plain,
        "verify_cost_over_fastest_plain": verify,
        "share_of_sampling": sampling,
    }
    record("scripts/measure_round.py", result, arguments.output)


if __name__ == "__main__":
    main()
