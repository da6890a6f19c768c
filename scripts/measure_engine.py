#!/usr/bin/env python3
"""Throughput of the engine: one request at a time, and many at once, with and without speculation.

python scripts/measure_engine.py [--slots 1 4 16 32] [--drafter lookup] [--repeats N] [--output FILE.json]

64 prompts are answered greedily by plain decoding one at a time (the naive baseline) and by engines of several sizes, in turns;
compilation is apart. Tokens are compared with the baseline's. At the end stands the draft length that paid for each number of
slots, as ``Engine(draft_len_schedule=...)`` takes it.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from record import record

import specjax
from specjax.cli.drafters import make_drafter, parse_drafter
from specjax.serving.device import run_slots

PROMPTS = Path(__file__).with_name("prompts.txt")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--drafter", default="lookup")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    model = specjax.load_model(arguments.model, dtype=arguments.dtype)
    texts = PROMPTS.read_text(encoding="utf-8").splitlines()
    chats = [[{"role": "user", "content": texts[n % len(texts)]}] for n in range(arguments.num_prompts)]
    greedy = specjax.SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens)
    requests = [specjax.Request(chat, greedy) for chat in chats]
    drafter = make_drafter(
        parse_drafter(arguments.drafter, arguments.num_speculative_tokens),
        arguments.num_speculative_tokens,
        arguments.dtype,
        model,
    )

    def one_at_a_time():
        start = time.perf_counter()
        done = [specjax.generate(model, [chat], greedy)[0] for chat in chats]
        compiling = sum(completion.stats.compile_seconds for completion in done)
        return [completion.token_ids for completion in done], time.perf_counter() - start - compiling, {}

    def engine(slots, drafter):
        def run():
            with specjax.Engine(model, drafter=drafter, slots=slots, capacity=256) as e:
                # Every program is compiled before the clock starts.
                e.run([specjax.Request(chat, specjax.SamplingParams(temperature=0.0, max_tokens=4)) for chat in chats[:slots]])
                start = time.perf_counter()
                done = e.run(requests)
                seconds, metrics = time.perf_counter() - start, e.metrics
            gaps = [c.metrics.time_per_output_token for c in done if c.metrics.time_per_output_token]
            more = {
                "time_per_output_token": [round(float(np.percentile(gaps, p)), 4) for p in (50, 99)],
                "time_to_first_token": [round(seconds, 3) for seconds in metrics.time_to_first_token],
                "slot_use": round(metrics.slot_use, 3),
                "tokens_per_round": round(sum(len(c.token_ids) for c in done) / sum(c.stats.num_drafts for c in done), 3),
            }
            return [completion.token_ids for completion in done], seconds, more

        return run

    def host_added(slots):
        """Seconds of a dispatch in an engine whose slots are all busy, and of the same program alone, in turns; their ratio."""
        settings = specjax.SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        with specjax.Engine(model, slots=slots, capacity=256) as e:
            for chat in chats[:slots]:
                e.submit(specjax.Request(chat, settings))
            for _ in range(slots + 3):
                e.step()
            within, alone = [], []
            batch, free = e._batch, np.zeros(slots, bool)
            for _ in range(5):
                start = time.perf_counter()
                for _ in range(5):
                    e.step()
                within.append((time.perf_counter() - start) / 5)
                state = jax.block_until_ready(jax.tree.map(jnp.copy, e._batch.state))
                start = time.perf_counter()
                for _ in range(5):
                    rounds = np.int32(batch.program.rounds_per_dispatch)
                    state, info, _ = run_slots(batch.program, batch.params, state, free, np.int32(0), rounds)
                    info.rounds.block_until_ready()
                alone.append((time.perf_counter() - start) / 5)
        within, alone = statistics.median(within), statistics.median(alone)
        return {"engine": round(within, 4), "program": round(alone, 4), "added": round(within / alone - 1, 4)}

    runs = {"one at a time": one_at_a_time}
    for slots in arguments.slots:
        runs[f"{slots} slots"] = engine(slots, None)
        runs[f"{slots} slots, {arguments.drafter} {arguments.num_speculative_tokens}"] = engine(slots, drafter)
    rates, details, same = {name: [] for name in runs}, {}, {}
    wanted = None
    for repeat in range(arguments.repeats):
        for name, run in runs.items():
            tokens, seconds, more = run()
            wanted = tokens if wanted is None else wanted
            rates[name].append(sum(map(len, tokens)) / seconds)
            details[name], same[name] = more, sum(a == b for a, b in zip(tokens, wanted, strict=True))
            print(f"{repeat} {name}: {rates[name][-1]:.1f} tokens/s {more}", file=sys.stderr, flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    base = medians["one at a time"]
    length = arguments.num_speculative_tokens
    schedule = {
        slots: length if medians[f"{slots} slots, {arguments.drafter} {length}"] > medians[f"{slots} slots"] else 0
        for slots in arguments.slots
    }
    results = [
        {
            "run": name,
            "tokens_per_second": round(medians[name], 2),
            "spread": [round(min(values), 2), round(max(values), 2)],
            "speedup": round(medians[name] / base, 2),
            "answers_equal": same[name],
            **details[name],
        }
        for name, values in rates.items()
    ]
    command = (
        f"python scripts/measure_engine.py --dtype {arguments.dtype} --drafter {arguments.drafter} "
        f"--num-speculative-tokens {length} --max-tokens {arguments.max_tokens} --repeats {arguments.repeats}"
    )
    head = {"model": model.name, "dtype": arguments.dtype, "num_prompts": len(chats), "max_tokens": arguments.max_tokens}
    host = {slots: host_added(slots) for slots in arguments.slots}
    outcome = {"repeats": arguments.repeats, "results": results, "draft_len_schedule": schedule, "dispatch_seconds": host}
    record(command, head | outcome, arguments.output)


if __name__ == "__main__":
    main()
