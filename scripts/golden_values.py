"""Golden values from transformers, for the parity tests.

Another implementation runs the same weights in float64 (the values) and in float32 (its own rounding error, which is the
yardstick for ours). It needs PyTorch, which never belongs into specjax's environment, so it has one of its own::

    python3.11 -m venv golden-env
    golden-env/bin/pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0 sentencepiece==0.2.3 accelerate
    golden-env/bin/python scripts/golden_values.py --smollm2 smollm2-135m-instruct-q4_1.gguf \\
        --qwen qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --qwen-1.5b qwen2.5-coder-1.5b-instruct-q4_k_m.gguf \\
        --gemma gemma-3-270m-q4_k_m.gguf

Written to ``tests/golden``: ``tiny-*/`` (random models in the usual folder form), ``tiny-*.json``, and for each GGUF file
that is given ``NAME.json`` (model) and ``NAME-tokenizer.json``. About 1.2 MB in all.

A model file holds for each token sequence, at some positions: ``ids`` (the eight likeliest tokens in order, then tokens
spread over the vocabulary; every token, in order, for tiny models), their ``logits``, the ``log_sum_exp`` of all logits and
the ``hidden_norm`` (Euclidean) of the final hidden state; and of the float32 run ``float32_error``, the largest difference, and
``float32_mean_square``, the mean of the squared differences.
"""

import argparse
import contextlib
import hashlib
import json
import pathlib
import sys

import tokenizers
import torch
import transformers
from golden_texts import CODE, CONVERSATIONS, PROSE
from golden_tiny import published_form, randomise, tiny_configs
from golden_tokenizers import by_sentencepiece, by_tokenizer, reference_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GgufConfig

NUM_TOP = 8
NUM_SPREAD = 24


class OnlyFloat64(TorchDispatchMode):
    """Fails at the first operation that takes or gives a floating-point tensor of another dtype than float64."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64:
                raise TypeError(f"{function} computes in {leaf.dtype}; the reference must be float64 throughout")
        return result


@contextlib.contextmanager
def float64_throughout():
    """Everything that transformers widens to float32 on purpose (norms, softmax, rotary angles) is widened to float64.

    It writes ``torch.float32``, ``torch.float`` and ``Tensor.float`` there, so these names mean float64 for a while;
    :class:`OnlyFloat64` proves that nothing was missed.
    """
    saved = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        with OnlyFloat64():
            yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved
        torch.set_default_dtype(saved[0])


def final_hidden(model, token_ids):
    """Final hidden states [T, E] of one sequence."""
    return model.model(torch.tensor([token_ids]), use_cache=False).last_hidden_state[0]


def logits_of(model, hidden):
    """Logits [..., V], with the soft cap of models that have one."""
    logits, cap = model.lm_head(hidden), getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def chosen_positions(length):
    near_the_start = {0, 1, 2, 5, 10, 25, 50}
    return sorted({p for p in near_the_start if p < length} | {length * k // 8 for k in range(3, 8)} | {length - 1})


def significant(values):
    """Thirteen significant digits: far below the tests' tolerances."""
    if isinstance(values, list):
        return [significant(value) for value in values]
    return float(f"{values:.13g}")


@torch.inference_mode()
def golden_values(model, sequences, all_tokens=False):
    """Values of a float32 model, which is converted to float64 in place."""
    # The float32 run comes first, because only one copy of a large model fits; it keeps the logits of the chosen positions.
    rounded_hidden = {name: final_hidden(model, ids)[chosen_positions(len(ids))] for name, ids in sequences.items()}
    rounded_logits = {name: logits_of(model, hidden) for name, hidden in rounded_hidden.items()}
    model.double()
    # The fused attention is one opaque operation; this one shows its steps to OnlyFloat64.
    model.set_attn_implementation("eager")
    if getattr(model.config, "num_experts_per_tok", None):
        # The grouped products know no float64.
        model.set_experts_implementation("eager")
    with float64_throughout():
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        exact_hidden = {name: final_hidden(model, ids)[chosen_positions(len(ids))] for name, ids in sequences.items()}
        exact_logits = {name: logits_of(model, hidden) for name, hidden in exact_hidden.items()}

    def measure(hidden, logits, ids):
        return {"logits": logits.gather(1, ids), "log_sum_exp": logits.logsumexp(dim=-1), "hidden_norm": hidden.norm(dim=-1)}

    records = []
    for name, token_ids in sequences.items():
        ids = exact_logits[name].argsort(dim=-1, descending=True)
        if not all_tokens:
            spread = torch.arange(NUM_SPREAD) * (ids.shape[1] - 1) // (NUM_SPREAD - 1)
            ids = torch.cat([ids[:, :NUM_TOP], spread.expand(len(ids), -1)], dim=1)
        exact = measure(exact_hidden[name], exact_logits[name], ids)
        rounded = measure(rounded_hidden[name], rounded_logits[name], ids)
        record = {"name": name, "token_ids": token_ids, "positions": chosen_positions(len(token_ids)), "ids": ids.tolist()}
        record |= {key: significant(value.tolist()) for key, value in exact.items()}
        differences = {key: rounded[key].double() - value for key, value in exact.items()}
        record["float32_error"] = {key: float(f"{d.abs().max().item():.3g}") for key, d in differences.items()}
        record["float32_mean_square"] = {key: float(f"{d.square().mean().item():.3g}") for key, d in differences.items()}
        agree = (rounded_logits[name].argmax(dim=-1) == ids[:, 0]).all().item()
        print(
            f"  {name}: {len(token_ids)} tokens, float32 error {record['float32_error']}, top-1 {'same' if agree else 'DIFFERS'}"
        )
        records.append(record)
    return records


def versions():
    names = {"torch": torch, "transformers": transformers, "tokenizers": tokenizers}
    return {name: module.__version__ for name, module in names.items()}


def write_json(path, value):
    """Readable and small: a line per entry, lists of plain values on one line; ASCII, so that no editor changes a text."""

    def render(value, indent):
        nested = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value))
        if not nested or not value:
            return json.dumps(value)
        inner = " " * (indent + 1)
        if isinstance(value, dict):
            items = [f"{json.dumps(key)}: {render(item, indent + 1)}" for key, item in value.items()]
        else:
            items = [render(item, indent + 1) for item in value]
        opening, closing = "{}" if isinstance(value, dict) else "[]"
        return opening + "\n" + ",\n".join(inner + item for item in items) + "\n" + " " * indent + closing

    path.write_text(render(value, 0) + "\n", encoding="ascii")
    print(f"  wrote {path} ({path.stat().st_size / 1e3:.0f} kB)")


def write_tiny(out, seed=20):
    for index, (name, config) in enumerate(tiny_configs().items()):
        print(name)
        generator = torch.Generator().manual_seed(seed + index)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        randomise(model, generator)
        folder = out / name
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        if name in ("tiny-llama3", "tiny-gemma3"):
            published_form(folder)
        # What the tests read is what is measured: the files, not the model in memory.
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        sequences = {
            f"random {length}": torch.randint(config.vocab_size, (length,), generator=generator).tolist()
            for length in ((64, 96) if config.vocab_size > 100 else (40, 48))
        }
        record = {"versions": versions(), "sequences": golden_values(model, sequences, all_tokens=True)}
        write_json(out / f"{name}.json", record)


def write_real(out, name, path):
    print(name)
    if name.startswith("gemma"):
        record, encode = by_sentencepiece(path)
        # The longer one goes past the window of the local layers.
        sequences = {"code": encode(CODE), "code and prose": encode(CODE + PROSE + CODE)}
    else:
        tokenizer, converted, note = reference_tokenizer(path, name)
        record, encode = by_tokenizer(tokenizer, converted, note)
        chat = tokenizer.apply_chat_template(CONVERSATIONS["two turns"], add_generation_prompt=True, tokenize=False)
        sequences = {"chat": encode(chat), "code": encode(CODE), "prose": encode(PROSE)}
    write_json(out / f"{name}-tokenizer.json", {"versions": versions()} | record)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    source = {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    write_json(out / f"{name}.json", {"versions": versions(), "source": source, "sequences": golden_values(model, sequences)})


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smollm2", type=pathlib.Path, metavar="FILE.gguf", help="SmolLM2-135M-Instruct")
    parser.add_argument("--qwen", type=pathlib.Path, metavar="FILE.gguf", help="Qwen2.5-Coder-0.5B-Instruct")
    parser.add_argument("--qwen-1.5b", type=pathlib.Path, metavar="FILE.gguf", help="Qwen2.5-Coder-1.5B-Instruct; takes 14 GB")
    parser.add_argument("--gemma", type=pathlib.Path, metavar="FILE.gguf", help="Gemma-3-270M")
    default_out = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden"
    parser.add_argument("--out", type=pathlib.Path, default=default_out, help="default: %(default)s")
    options = parser.parse_args(arguments)
    real = {
        "smollm2-135m-instruct": options.smollm2,
        "qwen2.5-coder-0.5b-instruct": options.qwen,
        "qwen2.5-coder-1.5b-instruct": vars(options)["qwen_1.5b"],
        "gemma-3-270m": options.gemma,
    }
    for path in real.values():
        if path is not None and not path.is_file():
            sys.exit(f"{path} is not a file")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options.out.mkdir(parents=True, exist_ok=True)
    write_tiny(options.out)
    for name, path in real.items():
        if path is not None:
            write_real(options.out, name, path)
    total = sum(path.stat().st_size for path in options.out.rglob("*") if path.is_file())
    print(f"{total / 1e3:.0f} kB in all")


if __name__ == "__main__":
    main()
