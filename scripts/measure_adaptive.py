#!/usr/bin/env python3
"""Drafts as deep as pays beside drafts of fixed lengths: tokens per second by kind of prompt and by slots.

python scripts/measure_adaptive.py [--drafter lookup] [--lengths 1 3 7] [--slots 1 4 16 32] [--kinds chat ...] [--output FILE]

The built-in prompts of a kind are answered greedily by plain decoding, with every fixed length, and adaptively, in turns; with
many slots every prompt is asked so often that all slots are busy. The kind "hostile" is chat with a drafter that always proposes
and is never right. Medians are held against each other, and ratios within a repeat: adaptive over plain, and over the best fixed.
"""

import argparse
import dataclasses
import statistics
import sys

import jax.numpy as jnp
from record import record

import specjax
from specjax.benchmark.answers import answer_alone, answer_together
from specjax.benchmark.cases import PLAIN, Case
from specjax.benchmark.prompts import KINDS, built_in_prompts, conversations
from specjax.benchmark.report import rates, speedup
from specjax.cli.drafters import make_drafter, parse_drafter
from specjax.drafters import BoundDrafter, prompt_lookup
from specjax.drafters.prompt_lookup import PromptLookup

HOSTILE = "hostile"


@dataclasses.dataclass(frozen=True)
class WrongDrafter(PromptLookup):
    """Always proposes what the target never says: the id behind that of the text's newest token, and those behind it."""

    def propose(self, params, state, context, choices, num_draft):
        draft, state = super().propose(params, state, context, choices, num_draft)
        newest = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
        tokens = (newest + 1 + jnp.arange(self.num_speculative_tokens)[None, :]) % context.vocab_size
        asked = jnp.arange(self.num_speculative_tokens)[None, :] < num_draft[:, None]
        return draft.replace(tokens=tokens, valid=jnp.broadcast_to(asked, tokens.shape)), state


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--drafter", default="lookup")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 3, 7])
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--kinds", nargs="+", default=[HOSTILE, *KINDS])
    parser.add_argument("--num-prompts", type=int, default=6, help="of each kind, at least; as many as there are slots")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    model = specjax.load_model(arguments.model, dtype=arguments.dtype)
    parts = parse_drafter(arguments.drafter, None)

    def drafter_of(kind, length):
        if kind == HOSTILE:
            lookup = prompt_lookup(length)
            return BoundDrafter(WrongDrafter(length, 3, 2), lookup.params, None)
        return make_drafter(parts, length, arguments.dtype, model)

    def ratios(own, base):
        """Of the medians, and the least and the most within one repeat."""
        return [round(value, 3) for value in speedup(own, base)]

    results = []
    for slots in arguments.slots:
        for kind in arguments.kinds:
            asked = [prompt for prompt in built_in_prompts() if prompt.kind == ("chat" if kind == HOSTILE else kind)]
            prompts = [ids for _, ids in conversations(model, asked, None)]
            prompts = [prompts[place % len(prompts)] for place in range(max(arguments.num_prompts, slots))]
            cases = [Case(PLAIN, None, "auto", slots, 0.0, arguments.dtype)]
            for length in arguments.lengths:
                cases.append(Case(f"{length}", drafter_of(kind, length), "auto", slots, 0.0, arguments.dtype))
            longest = max(arguments.lengths)
            cases.append(Case("adaptive", drafter_of(kind, longest), "auto", slots, 0.0, arguments.dtype, adaptive=True))
            answer = answer_alone if slots == 1 else answer_together
            found = answer({arguments.dtype: model}, cases, prompts, arguments.max_tokens, arguments.repeats, 0)
            by_case = {case.drafter: rates(answers) for case, answers in found.items()}
            plain = found[cases[0]].tokens
            fixed = [by_case[name] for name in (PLAIN, *map(str, arguments.lengths))]
            best = max(fixed, key=statistics.median)
            adaptive = by_case["adaptive"]
            results.append(
                {
                    "slots": slots,
                    "kind": kind,
                    "tokens_per_second": {name: round(statistics.median(values), 2) for name, values in by_case.items()},
                    "spread": {name: [round(min(values), 2), round(max(values), 2)] for name, values in by_case.items()},
                    "over_plain": ratios(adaptive, by_case[PLAIN]),
                    "over_best_fixed": ratios(adaptive, best),
                    "best_fixed": next(name for name, values in by_case.items() if values is best),
                    "answers_equal": [sum(a == b for a, b in zip(f.tokens, plain, strict=True)) for f in found.values()],
                    "tokens_per_round": {
                        case.drafter: round(sum(map(len, f.tokens)) / sum(stats.num_drafts for stats in f.stats), 3)
                        for case, f in found.items()
                    },
                }
            )
            print(results[-1], file=sys.stderr, flush=True)
    command = (
        f"python scripts/measure_adaptive.py --drafter {arguments.drafter} --lengths {' '.join(map(str, arguments.lengths))} "
        f"--slots {' '.join(map(str, arguments.slots))} --kinds {' '.join(arguments.kinds)} "
        f"--num-prompts {arguments.num_prompts} --max-tokens {arguments.max_tokens} --repeats {arguments.repeats}"
    )
    head = {"model": model.name, "dtype": arguments.dtype, "max_tokens": arguments.max_tokens, "repeats": arguments.repeats}
    record(command, head | {"results": results}, arguments.output)


if __name__ == "__main__":
    main()
