#!/usr/bin/env python3
"""specjax beside transformers, without and with speculation: the same weights, prompts and machine, in turns.

    .venv/bin/python scripts/bench_peers.py --other PYTHON --model FILE.gguf [--draft FILE.gguf] [--output FILE.json]

PYTHON is the interpreter of an environment of its own, Python 3.11 with torch (CPU), transformers and gguf. It runs as a second
process that decodes when it is told to, so that both are warm and never run at once; weights of GGUF files are dequantised on
both sides. Greedy, in float32 and bfloat16 on each side. Times are those of whole calls, the prompt pass included, compilation
and loading apart: what a user waits for.

Without --draft nothing is asked of transformers' assisted generation.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

WORKER = """
import json, os, sys, time
import torch
from transformers import AutoModelForCausalLM, GgufConfig

def load(path, dtype):
    folder, file = os.path.split(path)
    config = GgufConfig(gguf_file=file, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=getattr(torch, dtype), quantization_config=config
    ).eval()
    # Settings of the checkpoint's own would change what is greedy.
    model.generation_config = type(model.generation_config)(eos_token_id=ends, pad_token_id=ends[0] if ends else 0)
    return model

path, draft, dtypes, ends = json.loads(sys.argv[1])
models = {dtype: load(path, dtype) for dtype in dtypes}
drafts = {dtype: load(draft, dtype) for dtype in dtypes} if draft else {}
for line in sys.stdin:
    request = json.loads(line)
    ids = torch.tensor([request["ids"]])
    how = {}
    if request["how"] == "assisted":
        how["assistant_model"] = drafts[request["dtype"]]
    if request["how"] == "lookup":
        how["prompt_lookup_num_tokens"] = request["length"]
    start = time.perf_counter()
    with torch.inference_mode():
        out = models[request["dtype"]].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=request["tokens"], do_sample=False, **how
        )
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "ids": out[0, ids.shape[1]:].tolist()}), flush=True)
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", required=True, help="Python of the environment with transformers")
    parser.add_argument("--model", required=True, help="the .gguf file, or the name of a model that comes as one")
    parser.add_argument("--draft", help="the .gguf file of a draft model, for draft_model and for assisted generation")
    parser.add_argument("--prompts", help="JSON lines with 'turns' or 'prompt'; by default prompts of six kinds that come along")
    parser.add_argument("--prompts-per-kind", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--length", type=int, default=7, help="draft tokens of both sides' prompt lookup")
    parser.add_argument("--draft-length", type=int, default=4, help="draft tokens of draft_model; transformers finds its own")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--without", nargs="*", default=[], help="parts of the names of contestants that are left out")
    parser.add_argument("--output")
    arguments = parser.parse_args()
    for name in ("prompts_per_kind", "length", "draft_length", "max_tokens", "repeats"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it must be at least 1")

    from record import record

    import specjax
    from specjax.benchmark.clock import Spread, turns
    from specjax.benchmark.prompts import built_in_prompts, conversations, read_prompts, some_of_each
    from specjax.benchmark.report import places_by_kind, speedup
    from specjax.checkpoints.heads import heads_of
    from specjax.decoding.auto import choose_drafter, measure_costs
    from specjax.user_cache import processor

    found = built_in_prompts() if arguments.prompts is None else read_prompts(arguments.prompts)
    found = some_of_each(found, arguments.prompts_per_kind)
    params = specjax.SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
    models = {dtype: specjax.load_model(arguments.model, dtype=dtype) for dtype in arguments.dtypes}
    first = models[arguments.dtypes[0]]
    asked = conversations(first, found, lambda ids: specjax.generate(first, [ids], params)[0].text)
    kinds, prompts = [kind for kind, _ in asked], [ids for _, ids in asked]

    file = os.path.abspath(arguments.model) if os.path.exists(arguments.model) else downloaded(first)
    setup = [file, arguments.draft and os.path.abspath(arguments.draft), arguments.dtypes, list(first.stop_token_ids)]
    worker = subprocess.Popen(
        [arguments.other, "-c", WORKER, json.dumps(setup)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def theirs(how, dtype):
        def call(ids):
            request = {"ids": ids, "tokens": arguments.max_tokens, "dtype": dtype, "how": how, "length": arguments.length}
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
            if not line:
                raise SystemExit(f"the other process ended with {worker.wait()}; its message is above")
            answer = json.loads(line)
            return answer["seconds"], answer["ids"]

        return call

    def ours(drafter, dtype, adaptive=False):
        def call(ids):
            start = time.perf_counter()
            (completion,) = specjax.generate(models[dtype], [ids], params, drafter, adaptive=adaptive)
            # The call lays out a batch and finds its programs compiled; that is part of what a user waits for.
            return time.perf_counter() - start, completion.token_ids

        return call

    contestants = {}
    for dtype, model in models.items():
        auto, reason = choose_drafter(model, heads_of(model), measure_costs(model))
        print(f"{dtype}: auto is {auto.name}: {reason}", file=sys.stderr)
        contestants["specjax plain", dtype] = ours(None, dtype)
        contestants["specjax lookup", dtype] = ours(specjax.drafters.prompt_lookup(arguments.length), dtype)
        contestants["specjax auto", dtype] = ours(auto, dtype, adaptive=True)
        contestants["transformers plain", dtype] = theirs("plain", dtype)
        contestants["transformers lookup", dtype] = theirs("lookup", dtype)
        if arguments.draft:
            draft = specjax.load_model(arguments.draft, dtype=dtype)
            contestants["specjax draft", dtype] = ours(specjax.drafters.draft_model(draft, arguments.draft_length), dtype)
            contestants["transformers assisted", dtype] = theirs("assisted", dtype)
    contestants = {key: call for key, call in contestants.items() if not any(part in " ".join(key) for part in arguments.without)}

    tokens = {key: [None] * len(prompts) for key in contestants}
    seconds = {key: [[] for _ in range(arguments.repeats)] for key in contestants}
    for index, ids in enumerate(prompts):
        for key, call in contestants.items():
            # Compiles, and warms the other side up.
            tokens[key][index] = call(ids)[1]
        for repeat, key in turns(list(contestants), arguments.repeats):
            seconds[key][repeat].append(contestants[key](ids)[0])
        print(f"{index + 1} of {len(prompts)} prompts", file=sys.stderr, flush=True)
    worker.stdin.close()
    worker.wait()

    def rates(key, places):
        count = sum(len(tokens[key][place]) for place in places)
        return [count / sum(times[place] for place in places) for times in seconds[key]]

    everything = range(len(prompts))
    speeds = {key: rates(key, everything) for key in contestants}
    fastest = {}
    for name, dtype in contestants:
        if name not in fastest or statistics.median(speeds[name, dtype]) > statistics.median(speeds[name, fastest[name]]):
            fastest[name] = dtype

    def over(one, other, places):
        gain = speedup(rates((one, fastest[one]), places), rates((other, fastest[other]), places))
        return [round(value, 3) for value in gain]

    ratios = {}
    for one in fastest:
        for other in fastest:
            if one.startswith("specjax") and (other.startswith("transformers") or other == "specjax plain") and one != other:
                by_kind = {kind: over(one, other, places)[0] for kind, places in places_by_kind(kinds).items()}
                ratios[f"{one} over {other}"] = {"ratio": over(one, other, everything), **by_kind}
    plain = {dtype: tokens.get(("specjax plain", dtype)) for dtype in models}
    result = {
        "processor": processor(),
        "load_now": os.getloadavg()[0],
        "model": first.name,
        "num_prompts": len(prompts),
        "max_tokens": arguments.max_tokens,
        "repeats": arguments.repeats,
        "tokens_per_second": {
            " ".join(key): dict(zip(("median", "least", "most"), (round(v, 2) for v in Spread.of(values)), strict=True))
            for key, values in speeds.items()
        },
        "fastest_dtype": fastest,
        # Median, least and most of all prompts; then the medians by kind of prompt.
        "ratios": ratios,
        "answers_equal_to_specjax_plain": {
            " ".join(key): sum(a == b for a, b in zip(each, plain[key[1]], strict=True))
            for key, each in tokens.items()
            if plain[key[1]] is not None
        },
    }
    for name, each in ratios.items():
        median, least, most = each["ratio"]
        print(f"{name}: {median:.2f} ({least:.2f} to {most:.2f})", file=sys.stderr)
    options = "".join(
        f" --{name} {getattr(arguments, name.replace('-', '_'))}"
        for name in ("prompts-per-kind", "length", "draft-length", "max-tokens", "repeats")
    )
    given = (" --draft FILE.gguf" if arguments.draft else "") + (" --prompts FILE.jsonl" if arguments.prompts else "")
    lists = f" --dtypes {' '.join(arguments.dtypes)}" + (f" --without {' '.join(arguments.without)}" if arguments.without else "")
    record(f"scripts/bench_peers.py --other PYTHON --model FILE.gguf{given}{options}{lists}", result, arguments.output)


def downloaded(model) -> str:
    """The GGUF file that a model was loaded from by its name."""
    from specjax.checkpoints.download import cached_path

    path = cached_path(model.name)
    if path is None or path.suffix != ".gguf":
        raise SystemExit(f"--model: {model.name} did not come from a .gguf file; name one")
    return str(path)


if __name__ == "__main__":
    main()
