#!/usr/bin/env python3
"""Plain greedy decoding, specjax beside transformers: the same weights, prompt and machine, in turns.

    .venv/bin/python scripts/compare_transformers.py --other PYTHON --model FILE.gguf [--repeats N] [--output FILE.json]

PYTHON is the interpreter of an environment of its own, Python 3.11 with torch (CPU), transformers and gguf. It runs as a second
process that decodes when it is told to, so that both are warm and never run at once. Times are those of whole calls, the prompt
pass included, compilation and loading apart.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

PROMPT = "Explain how rainbows form, in simple words."
TOKENS = 64

WORKER = """
import json, os, sys, time
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
folder, file = os.path.split(sys.argv[1])
config = GgufConfig(gguf_file=file, dequantize=True)
models = {
    name: AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=getattr(torch, name), quantization_config=config
    ).eval()
    for name in ("float32", "bfloat16")
}
for line in sys.stdin:
    request = json.loads(line)
    ids = torch.tensor([request["ids"]])
    start = time.perf_counter()
    with torch.inference_mode():
        out = models[request["dtype"]].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=request["tokens"], do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "ids": out[0, ids.shape[1]:].tolist()}), flush=True)
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", required=True, help="Python of the environment with transformers")
    parser.add_argument("--model", required=True, help="the .gguf file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output")
    arguments = parser.parse_args()

    worker = subprocess.Popen(
        [arguments.other, "-c", WORKER, arguments.model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    from record import record

    import specjax

    params = specjax.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    models = {dtype: specjax.load_model(arguments.model, dtype=dtype) for dtype in ("float32", "bfloat16")}
    ids = models["float32"].tokenizer.encode_chat([{"role": "user", "content": PROMPT}])

    def ours(dtype):
        start = time.perf_counter()
        (completion,) = specjax.generate(models[dtype], [ids], params)
        # The call lays out a batch and finds its programs compiled; that is part of what a user waits for.
        return time.perf_counter() - start, completion.token_ids

    def theirs(dtype):
        worker.stdin.write(json.dumps({"ids": ids, "tokens": TOKENS, "dtype": dtype}) + "\n")
        worker.stdin.flush()
        answer = json.loads(worker.stdout.readline())
        return answer["seconds"], answer["ids"]

    runs = {(name, dtype): call for name, call in (("specjax", ours), ("transformers", theirs)) for dtype in models}
    tokens = {case: call(case[1])[1] for case, call in runs.items()}
    seconds = {case: [] for case in runs}
    for _ in range(arguments.repeats):
        for case, call in runs.items():
            seconds[case].append(call(case[1])[0])
    worker.stdin.close()
    worker.wait()

    speeds = {case: sorted(TOKENS / s for s in times) for case, times in seconds.items()}
    median = {case: statistics.median(values) for case, values in speeds.items()}
    best = {name: max(median[name, dtype] for dtype in models) for name in ("specjax", "transformers")}
    result = {
        "prompt": PROMPT,
        "tokens": TOKENS,
        "repeats": arguments.repeats,
        "tokens_per_second": {
            f"{name} {dtype}": {"median": round(median[name, dtype], 2), "least": round(v[0], 2), "most": round(v[-1], 2)}
            for (name, dtype), v in speeds.items()
        },
        "fastest_over_fastest": round(best["specjax"] / best["transformers"], 3),
        "same_tokens_float32": tokens["specjax", "float32"] == tokens["transformers", "float32"],
    }
    record("scripts/compare_transformers.py", result, arguments.output)


if __name__ == "__main__":
    sys.exit(main())
