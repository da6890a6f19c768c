#!/usr/bin/env python3
"""The same requests on one device and on meshes of virtual ones: whether the tokens are the same, and what a round takes.

python scripts/measure_meshes.py [--model NAME] [--meshes data=8 data=2,model=3] [--draft-layers N] [--output FILE.json]

The devices are parts of this machine's CPU, so a mesh makes nothing faster here that one device does not already do. With
``--draft-layers`` a model of the target's first layers drafts in place of prompt lookup. The time to bring its probabilities from
one device to another is measured too: what a round would pay on top if draft and target were on different devices.
"""

import argparse
import os
import statistics
import sys
import time

from record import record


def first_difference(ours, theirs):
    """Where two lists first differ; None where they do not."""
    places = range(max(len(ours), len(theirs)))
    return next((place for place in places if ours[place : place + 1] != theirs[place : place + 1]), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--meshes", nargs="+", default=["data=8", "data=2,model=3"])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--draft-layers", type=int, default=0)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    # Before JAX starts: it counts its devices once.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={arguments.devices}"
    import jax
    import jax.numpy as jnp
    from measure_engine import PROMPTS

    import specjax
    from specjax.drafters import draft_model, prompt_lookup
    from specjax.models.shallow import keep_layers

    slots, length = 8, arguments.num_speculative_tokens
    chats = [[{"role": "user", "content": line}] for line in PROMPTS.read_text(encoding="utf-8").splitlines()[:slots]]

    def requests(max_tokens):
        settings = [
            specjax.SamplingParams(temperature=0.7 * (row % 2), seed=row, max_tokens=max_tokens) for row in range(len(chats))
        ]
        return [specjax.Request(chat, params) for chat, params in zip(chats, settings, strict=True)]

    engines, wanted = {}, None
    for mesh in (None, *arguments.meshes):
        model = specjax.load_model(arguments.model, dtype="float32", mesh=mesh)
        drafter = prompt_lookup(length)
        if arguments.draft_layers:
            whole = specjax.load_model(arguments.model, dtype="float32")
            drafter = draft_model(keep_layers(whole, range(arguments.draft_layers)), length)
        engine = specjax.Engine(model, drafter=drafter, rule="gumbel", slots=slots, capacity=128, mesh=mesh)
        start = time.perf_counter()
        engine.run(requests(2))
        print(f"{mesh or 'one device'}: {time.perf_counter() - start:.0f} s to compile and begin", file=sys.stderr, flush=True)
        engines[mesh or "one device"] = engine
    results = {name: {"round_seconds": []} for name in engines}
    for _ in range(arguments.repeats):
        for name, engine in engines.items():
            rounds, start = engine.metrics.num_rounds, time.perf_counter()
            tokens = [completion.token_ids for completion in engine.run(requests(arguments.max_tokens))]
            seconds, result = time.perf_counter() - start, results[name]
            wanted = tokens if wanted is None else wanted
            result["round_seconds"].append(round(seconds / (engine.metrics.num_rounds - rounds), 4))
            places = [first_difference(ours, theirs) for ours, theirs in zip(tokens, wanted, strict=True)]
            result["answers_equal"] = f"{places.count(None)} of {len(places)}"
            result["first_differences"] = [place for place in places if place is not None]
    for result in results.values():
        times = sorted(result.pop("round_seconds"))
        result["round_seconds"], result["spread"] = statistics.median(times), [times[0], times[-1]]
    log_q = jax.device_put(jnp.zeros((slots, length, model.logits.shape[-1])), jax.devices()[0])
    times = []
    for _ in range(20):
        start = time.perf_counter()
        jax.device_put(log_q, jax.devices()[-1]).block_until_ready()
        times.append(time.perf_counter() - start)
    command = (
        f"python scripts/measure_meshes.py --model {arguments.model} --meshes {' '.join(arguments.meshes)} "
        f"--devices {arguments.devices} --draft-layers {arguments.draft_layers} --max-tokens {arguments.max_tokens}"
    )
    moved = {"bytes": log_q.nbytes, "seconds": round(statistics.median(times), 5)}
    record(command, {"slots": slots, "results": results, "probabilities_to_another_device": moved}, arguments.output)


if __name__ == "__main__":
    main()
