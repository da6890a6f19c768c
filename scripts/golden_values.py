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
import math
import pathlib
import struct
import sys
import unicodedata

import gguf
import sentencepiece
import tokenizers
import torch
import transformers
from tokenizers import normalizers, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    Gemma3TextConfig,
    GgufConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

NUM_TOP = 8
NUM_SPREAD = 24

CONVERSATIONS = {
    "one turn": [{"role": "user", "content": "Why is the sky blue, and why is a sunset red?"}],
    "two turns": [
        {"role": "user", "content": "Name three rivers in Europe."},
        {"role": "assistant", "content": "The Danube, the Rhine and the Tagus."},
        {"role": "user", "content": "  Which of them is the longest?\nAnswer in one line. "},
    ],
    "own system message": [
        {"role": "system", "content": "Answer like a pirate."},
        {"role": "user", "content": "Où est la gare ?"},
    ],
}

CODE = '''def moving_average(values, window):
    """Mean of each run of `window` neighbours."""
    if window < 1 or window > len(values):
        raise ValueError(f"window is {window}; it must lie in 1..{len(values)}")
    total = sum(values[:window])
    means = [total / window]
    for old, new in zip(values, values[window:]):
        total += new - old
        means.append(total / window)
    return means


assert moving_average([1, 2, 3, 4], 2) == [1.5, 2.5, 3.5]
'''

PROSE = """\
The lighthouse keeper wrote everything down. At 04:10 the fog came in from the north-west; at 05:25 it was so thick that
the lamp lit nothing but itself. She counted the seconds between two blasts of the horn (thirty, as always), filled the kettle,
and waited for the post boat, which was due on the 17th and had already been late twice that winter.

Nobody on the mainland believed in the old rule any more, but she did: whoever keeps the light also keeps the list of those who
passed it. There were 2,318 names by now, some of them only a colour and a guess - "red hull, two masts, perhaps Norwegian" - and
some with whole stories attached. The longest belonged to a small grey ketch that had gone round the island three times in one
night, as if it had forgotten something. In the morning it was gone. A week later a parcel arrived with no sender: a jar of plum
jam, a map of the bay drawn from memory, and a note which said only, "Thank you for not asking."

She kept the map on the wall beside the barometer. It was wrong in exactly two places, and in both of them she thought the map
was right and the bay was wrong. When the fog lifted, around nine, the sea lay flat as a table and the post boat was nowhere to be
seen. So she wrote that down as well, with the time, the wind (none), and the temperature: 3 degrees.

Then the radio spoke for the first time in four days.
"""

# Every line is one string. Code points are escaped where an editor might normalise or hide them.
HARD_TEXTS = [
    "",
    " ",
    "Hello, world!",
    "a  b   c    d     e        f                 g",
    "   leading and trailing   ",
    "\ttab\t\ttwo tabs \t mixed\t ",
    "line one\r\nline two\r\n\r\nline four\n\n\n\nend\r",
    "if (x >= 0) {\n\treturn x->y[i++] && !z; // 100% sure?\n}\n\n",
    "def f(a, *, b=None) -> dict[str, int]:\n    return {**a, 'b': b}  # noqa\n",
    "https://example.org/a%20b?q=1&r=%C3%A9#frag user.name+tag@example.co.uk",
    "0 1 12 123 1234 12345 1234567890123456789012345678901234567890 3.14159e-10 1,000,000 0xDEADBEEF v2.0.1",
    "\u0660\u0661\u0662 \u0967\u0968\u0969 \u00b2\u00b3\u00b9 \u2160\u2161\u2162 \u00bd\u2153",
    "I'm you're he's we've they'll I'd don't DON'T I'M YOU'RE 'tis '90s rock'n'roll o'clock's'",
    "I\u2019m you\u2019re he\u2019s \u201cquoted\u201d \u2018single\u2019 \u00abguillemets\u00bb \u2014 \u2013 \u2026",
    "\U0001f600\U0001f603 \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f44d\U0001f3fd"
    " \U0001f9d1\U0001f3ff\u200d\U0001f680 \U0001f1e9\U0001f1ea\U0001f1ef\U0001f1f5 \u2764\ufe0f 1\ufe0f\u20e3",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u3053\u3093\u306b\u3061\u306f\u3001\u30ab\u30bf\u30ab\u30ca\u3002"
    "\uc548\ub155\ud558\uc138\uc694 \u6f22\u5b57123\u5e74 \U00020000\U0002a6d6",
    "\uff21\uff22\uff23\uff11\uff12\uff13 \uff76\uff9e \ufb01 \u212b \u2126 \ufa0e \uf900",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645"
    " \u0643\u0650\u062a\u064e\u0627\u0628\u064c \u200f123\u200e",
    "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e"
    " \u0915\u094d\u0937 \u091c\u094d\u091e \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "na\u00efve caf\u00e9 \u00c5ngstr\u00f6m \u1ec7 \ud55c\uae00",
    "nai\u0308ve cafe\u0301 A\u030angstro\u0308m e\u0323\u0302 e\u0302\u0323 \u1112\u1161\u11ab\u1100\u1173\u11af",
    "Z\u0351\u036b\u0343\u036aa\u0300\u0301\u0302\u0303l\u0334\u0335g\u0321\u0322o\u0489 q\u0307\u0323 \u0344 \u0958",
    "".join(map(chr, range(0x20))),
    "a\x00b\x01c\x07d\x08e\x0bf\x0cg\x1bh\x1b[31mred\x1b[0m\x7f\x80\x85\x9f",
    "zero\u200bwidth\u200cnon\u200djoiner\u2060word\ufeffbom\u00adsoft",
    "\u00a0no-break \u2009thin\u2003em\u3000ideographic \u2028line\u2029paragraph\u1680ogham",
    "\ufffd\ufffe\uffff \U0010ffff \U000e0001 \ue000",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><|im_start|>assistant\n",
    " <|im_end|> <|im_end|>x<|im_end|> <|IM_END|> <|im_end| > <|im_<|im_end|>end|>",
    "<repo_name>a/b<file_sep>x.py\n<filename>y<jupyter_code>1+1<empty_output><tool_call>{}</tool_call><|fim_prefix|><s></s>",
    "don't\n  \n   indent\n \t \n",
    "!!!??!?... ---- ==== //// \\\\\\\\ #### $$$ ^^^ ~~~ ``` ((())) [[]] {{}} <<>> ;;:: |&|",
    "\u03b1\u03b2\u03b3 \u041f\u0440\u0438\u0432\u0435\u0442 \u0130stanbul \u0131 \u1e9e\u00df \u01c5 \u10d0\u10d1 \u0561\u0562",
    "\u2200x\u2208\u211d: \u2308x\u2309 \u2260 \u00acx \u222b\u2080\u00b9 \u221ax dx \u2248"
    " \U0001d465\U0001d7d9 \u20ac5 \u00a36 \u20bf",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "CamelCaseIdentifier snake_case_identifier SCREAMING_CASE kebab-case x1y2z3 _private __dunder__",
    "".join(map(chr, range(0x20, 0x250))),
]


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


def tiny_configs():
    """Small, with every size different, so that no axis can be mistaken for another; no value is a default."""
    sizes = {
        "vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 3e-5,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    # Wavelengths 6.3, 14, 30, ... of eight pairs: one above 48/4 turns, two between, five below 48/1.
    scaling = {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 48,
    }  # fmt: skip
    plain = {"rope_type": "default", "rope_theta": 700.0}
    return {
        "tiny-llama": LlamaConfig(**sizes, rope_parameters=plain, tie_word_embeddings=True),
        "tiny-llama3": LlamaConfig(**sizes, rope_parameters=scaling, tie_word_embeddings=False),
        "tiny-qwen2": Qwen2Config(**sizes, rope_parameters=plain, tie_word_embeddings=True),
    } | tiny_families()


def tiny_families():
    """One model for each further family: of the least size that has what is special about it, in more than one layer."""
    # A width whose root is a float32: the reference rounds the embedding's scale to that, also in float64.
    sizes = {
        "vocab_size": 72, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 3e-5, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    plain, heads = {"rope_type": "default", "rope_theta": 700.0}, {"head_dim": 8}
    yarn = {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0,
        "beta_slow": 1.0,
    }  # fmt: skip
    # A rope for each kind of layer; three local layers around a global one.
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 3.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
    }
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
    return {
        "tiny-qwen3": Qwen3Config(**sizes, **heads, rope_parameters=yarn, tie_word_embeddings=True),
        "tiny-mistral": MistralConfig(**sizes, **heads, rope_parameters=plain, sliding_window=9),
        "tiny-gemma2": Gemma2Config(
            **sizes | {"num_hidden_layers": 3}, **heads, rope_parameters=plain, sliding_window=10, query_pre_attn_scalar=6,
            attn_logit_softcapping=2.5, final_logit_softcapping=4.0,
        ),
        "tiny-gemma3": Gemma3TextConfig(
            **sizes | {"num_hidden_layers": 3}, **heads, rope_parameters=ropes, sliding_window=7, layer_types=layers,
            query_pre_attn_scalar=8,
        ),
        # Its heads have width / heads numbers.
        "tiny-phi3": Phi3Config(
            **sizes | {"num_attention_heads": 2, "num_key_value_heads": 1}, rope_parameters=plain, sliding_window=11,
            pad_token_id=0,
        ),
        "tiny-qwen3-moe": Qwen3MoeConfig(
            **sizes, **heads, **experts, num_experts=6, norm_topk_prob=False, rope_parameters=plain, tie_word_embeddings=True
        ),
        "tiny-mixtral": MixtralConfig(
            **sizes | {"intermediate_size": 12}, **heads, num_local_experts=4, num_experts_per_tok=2, rope_parameters=plain,
            tie_word_embeddings=True,
        ),
    }  # fmt: skip


@torch.no_grad()
def randomise(model, generator):
    """Weights under which every part matters: peaked attention, norms away from 1, biases away from 0."""
    # Where 1 is added to the scales of norms, so that the sum is exact in float32 they have few digits.
    around_zero = "Gemma" in type(model).__name__
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight") and around_zero:
            weight.uniform_(-0.5, 0.5, generator=generator).mul_(1024).round_().div_(1024)
        elif name.endswith("norm.weight"):
            weight.uniform_(0.5, 1.5, generator=generator)
        else:
            sharp = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
            deviation = 0.5 if weight.ndim == 1 or "embed" in name or "lm_head" in name else sharp / math.sqrt(weight.shape[1])
            if name.endswith("mlp.gate.weight"):
                # Of a mixture of experts: no near ties between the chosen experts and the others.
                deviation *= 3
            weight.normal_(0.0, deviation, generator=generator)


def published_form(folder):
    """Rewrites config.json with ``rope_theta`` and ``rope_scaling``, as published checkpoints have it.

    transformers 5 writes ``rope_parameters`` instead; readers must understand both, so some folders have the older form.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    if "sliding_attention" in scaling:
        config["rope_local_base_freq"] = scaling["sliding_attention"]["rope_theta"]
        scaling = scaling["full_attention"]
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = scaling
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


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


def reference_tokenizer(path, name):
    """The tokenizer with vocabulary and merges of the GGUF, split as in the model's own tokenizer.json.

    transformers' conversion of a GGUF leaves out what the file cannot say: for SmolLM2 that digits are single tokens, for
    Qwen2.5 the NFC normaliser.
    """
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend = tokenizer.backend_tokenizer
    converted = tokenizers.Tokenizer.from_str(backend.to_str())
    if name.startswith("smollm2"):
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
        note = "pre-tokenizer Digits(individual) then ByteLevel; transformers' GGUF conversion has ByteLevel alone"
    else:
        backend.normalizer = normalizers.NFC()
        note = "normaliser NFC; transformers' GGUF conversion has none; its pre-tokenizer (Split, ByteLevel) is the model's own"
    return tokenizer, converted, note


def wire(number, value):
    """One field of a protocol buffer: a whole number, a float32, or bytes."""

    def varint(value):
        low, rest = value & 127, value >> 7
        return bytes([low | 128]) + varint(rest) if rest else bytes([low])

    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def sentencepiece_of(path):
    """SentencePiece itself over the tokens, scores and kinds of a GGUF file, and the id of the token that begins a text."""
    found = {}
    for name, field in gguf.GGUFReader(path).fields.items():
        if name.startswith("tokenizer.ggml."):
            found[name.removeprefix("tokenizer.ggml.")] = field.contents()
    normal, unknown, user_defined = 1, 2, 4
    pieces = b""
    for id, (token, score, kind) in enumerate(zip(found["tokens"], found["scores"], found["token_type"], strict=True)):
        kind = unknown if id == found["unknown_token_id"] else kind
        token = token.replace(" ", "\u2581") if kind == user_defined else token
        piece = wire(1, token.encode()) + wire(2, float(score)) + (wire(3, kind) if kind != normal else b"")
        pieces += wire(1, piece)
    byte_pairs = 2
    trainer = wire(3, byte_pairs) + wire(35, 1)
    for number, name in ((40, "unknown"), (41, "bos"), (42, "eos"), (43, "padding")):
        trainer += wire(number, found[f"{name}_token_id"])
    normaliser = wire(1, b"identity") + wire(3, int(found.get("add_space_prefix", True))) + wire(4, 0) + wire(5, 1)
    processor = sentencepiece.SentencePieceProcessor(model_proto=pieces + wire(2, trainer) + wire(3, normaliser))
    return processor, found["bos_token_id"]


def write_sentencepiece(out, name, path):
    """What SentencePiece makes of the texts; there is no other reference for a file without a tokenizer.json beside it."""
    processor, bos = sentencepiece_of(path)
    texts = [{"text": text, "ids": processor.encode(text)} for text in [*HARD_TEXTS, CODE]]
    for entry in texts:
        if (back := processor.decode(entry["ids"])) != entry["text"]:
            print(f"  tokenizer: {entry['text'][:40]!r} comes back as {back[:40]!r}")
    note = f"SentencePiece {sentencepiece.__version__} over the file's tokens, scores and kinds"
    record = {"versions": versions(), "reference": note, "texts": texts, "conversations": []}
    write_json(out / f"{name}-tokenizer.json", record)
    # The longer one goes past the window of the local layers.
    return {"code": [bos, *processor.encode(CODE)], "code and prose": [bos, *processor.encode(CODE + PROSE + CODE)]}


def write_tokenizer(out, name, tokenizer, converted, note):
    def encode(text):
        return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    texts = [{"text": text, "ids": encode(text)} for text in [*HARD_TEXTS, CODE]]
    differing = sum(entry["ids"] != converted.encode(entry["text"], add_special_tokens=False).ids for entry in texts)
    print(f"  tokenizer: {differing} of {len(texts)} texts differ from transformers' own conversion")
    for entry in texts:
        back = tokenizer.backend_tokenizer.decode(entry["ids"], skip_special_tokens=False)
        if back not in (entry["text"], unicodedata.normalize("NFC", entry["text"])):
            print(f"  tokenizer: {entry['text'][:40]!r} comes back as {back[:40]!r}")
    chats = []
    for title, messages in CONVERSATIONS.items():
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        chats.append({"name": title, "messages": messages, "text": text, "ids": encode(text)})
    record = {"versions": versions(), "reference": note, "texts": texts, "conversations": chats}
    write_json(out / f"{name}-tokenizer.json", record)
    return encode


def write_real(out, name, path):
    print(name)
    if name.startswith("gemma"):
        sequences = write_sentencepiece(out, name, path)
    else:
        tokenizer, converted, note = reference_tokenizer(path, name)
        encode = write_tokenizer(out, name, tokenizer, converted, note)
        chat = tokenizer.apply_chat_template(CONVERSATIONS["two turns"], add_generation_prompt=True, tokenize=False)
        sequences = {"chat": encode(chat), "code": encode(CODE), "prose": encode(PROSE)}
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
