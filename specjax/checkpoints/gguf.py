"""Models in GGUF files: which decoder a file describes, and its parameters."""

import dataclasses
from typing import Any

import numpy as np

from specjax.checkpoints import fuse
from specjax.checkpoints.gguf_file import GGUFFile
from specjax.models.config import DecoderConfig, FrequencyFactors, RopeConfig

ROPE_FACTORS = "rope_freqs.weight"


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What ``general.architecture`` stands for.

    Attributes:
      qkv_bias: whether query, key and value have biases.
      paired_rotary: whether query and key rows lie in interleaved pairs in the file.
    """

    qkv_bias: bool
    paired_rotary: bool


ARCHITECTURES = {
    "llama": Architecture(qkv_bias=False, paired_rotary=True),
    "qwen2": Architecture(qkv_bias=True, paired_rotary=False),
}

# Keys (behind "llama." and the like) that change the computation in ways that the decoder does not have, with the values
# that change nothing.
NEUTRAL_VALUES = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "attention.clamp_kqv": (0.0,),
}
# Keys that say nothing about the computation, or something that is checked elsewhere.
DESCRIPTIVE = {"vocab_size", "tensor_data_layout", "rope.scaling.original_context_length", "rope.scaling.finetuned"}
USED = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
}


def read_config(file: GGUFFile) -> tuple[DecoderConfig, Architecture]:
    """The decoder that a file describes.

    Raises:
      ValueError: an architecture, a key or a value that is not supported, or a key that is missing; names file, key, value.
    """
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ValueError(f"{file.path}: general.architecture is {name!r}; supported: {', '.join(ARCHITECTURES)}")
    options = {key.removeprefix(f"{name}."): value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    for key, value in options.items():
        if key in NEUTRAL_VALUES:
            if value not in NEUTRAL_VALUES[key]:
                raise ValueError(f"{file.path}: {name}.{key} is {value!r}; supported: {_listed(NEUTRAL_VALUES[key])}")
        elif key not in USED | DESCRIPTIVE:
            raise ValueError(f"{file.path}: {name}.{key} is {value!r}; this key is not known, so it cannot be honoured")

    def need(key, kind: type = int) -> Any:
        if key not in options:
            raise ValueError(f"{file.path}: {name}.{key} is missing")
        # A list (one value per layer) would be another architecture.
        if not isinstance(options[key], kind) or isinstance(options[key], bool):
            raise ValueError(f"{file.path}: {name}.{key} is {options[key]!r:.80}; it must be one {kind.__name__}")
        return options[key]

    width, heads = need("embedding_length"), need("attention.head_count")
    head_dim = need("attention.key_length") if "attention.key_length" in options else width // max(heads, 1)
    for key in ("attention.value_length", "rope.dimension_count"):
        if options.get(key, head_dim) != head_dim:
            raise ValueError(f"{file.path}: {name}.{key} is {options[key]}; it must be the head size, {head_dim}")
    shapes = file.shapes()
    if fuse.GGUF.embedding not in shapes:
        raise ValueError(f"{file.path}: tensor {fuse.GGUF.embedding!r} is missing")
    vocab_size = shapes[fuse.GGUF.embedding][0]
    if options.get("vocab_size", vocab_size) != vocab_size:
        raise ValueError(
            f"{file.path}: {name}.vocab_size is {options['vocab_size']}; tensor {fuse.GGUF.embedding!r} has {vocab_size} rows"
        )
    theta = need("rope.freq_base", float) if "rope.freq_base" in options else 10_000.0
    try:
        config = DecoderConfig(
            vocab_size=vocab_size,
            num_layers=need("block_count"),
            width=width,
            num_query_heads=heads,
            num_kv_heads=need("attention.head_count_kv") if "attention.head_count_kv" in options else heads,
            head_dim=head_dim,
            mlp_width=need("feed_forward_length"),
            max_positions=need("context_length"),
            norm_eps=_shortest(need("attention.layer_norm_rms_epsilon", float)),
            rope=RopeConfig(theta=theta, scaling=_factors(file, head_dim)),
            qkv_bias=ARCHITECTURES[name].qkv_bias,
            tied_embedding=fuse.GGUF.unembedding not in shapes,
        )
    except ValueError as error:
        if str(error).startswith(str(file.path)):
            raise
        raise ValueError(f"{file.path}: {error}") from None
    return config, ARCHITECTURES[name]


def load_gguf_params(file: GGUFFile, config: DecoderConfig, architecture: Architecture, dtype, shardings=None) -> dict:
    """The parameters of ``Decoder(config)``; see :func:`specjax.checkpoints.fuse.load_params`."""
    paired, unneeded = architecture.paired_rotary, (ROPE_FACTORS,)
    return fuse.load_params(config, file, fuse.GGUF, dtype, paired_rotary=paired, unneeded=unneeded, shardings=shardings)


def _factors(file: GGUFFile, head_dim: int) -> FrequencyFactors | None:
    """Llama 3's rope scaling, which GGUF files carry as a tensor of divisors."""
    shapes = file.shapes()
    if ROPE_FACTORS not in shapes:
        return None
    if shapes[ROPE_FACTORS] != (head_dim // 2,):
        raise ValueError(f"{file.path}: tensor {ROPE_FACTORS!r} has shape {shapes[ROPE_FACTORS]}; it must be ({head_dim // 2},)")
    return FrequencyFactors(tuple(file.read(ROPE_FACTORS, np.float32).tolist()))


def _shortest(value: float) -> float:
    """The decimal that a float32 in a file was made from: 1e-05, where widening gives 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _listed(values) -> str:
    return " or ".join(map(repr, values))
