"""Models in GGUF files: which decoder a file describes, and its parameters."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.checkpoints import fuse
from specjax.checkpoints.gguf_file import GGUFFile
from specjax.checkpoints.tensor_names import GGUF, GGUF_EXPERTS, GGUF_FUSED, TensorNames
from specjax.models.config import (
    DecoderConfig,
    ExpertsConfig,
    FrequencyFactors,
    LinearRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnRopeScaling,
)

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS = "rope_factors_long.weight"


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What ``general.architecture`` stands for.

    Attributes:
      paired_rotary: whether query and key rows lie in interleaved pairs in the file.
      names: of the tensors.
      options: fields of :class:`specjax.models.config.DecoderConfig` that all of its models share.
      scaled_embedding: whether the embedding is multiplied with the root of the width.
      local_every: where a window is given, all layers but every n-th have it; None: all have it.
      window: of the local layers where the file does not say; None: there are none then.
      local_theta: base of the local layers' rotary embedding where the file does not say; None: as in the others.
      soft_caps: of scores and logits where the file does not say.
      scaled_by_width: the number of layers of the models whose scores are scaled by the root of width per head, not head size,
        which files do not say.
    """

    paired_rotary: bool = False
    names: TensorNames = GGUF
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scaled_embedding: bool = False
    local_every: int | None = None
    window: int | None = None
    local_theta: float | None = None
    soft_caps: tuple[float | None, float | None] = (None, None)
    scaled_by_width: int | None = None


# Norms lie in GGUF files as they are applied: what gemma adds to them, converters have added.
_GEMMA = {"post_norms": True, "activation": "gelu_tanh"}
ARCHITECTURES = {
    # Mistral and Mixtral too.
    "llama": Architecture(paired_rotary=True),
    "qwen2": Architecture(options={"qkv_bias": True}),
    "qwen3": Architecture(options={"query_key_norm": True}),
    "qwen3moe": Architecture(options={"query_key_norm": True}),
    "gemma2": Architecture(
        options=_GEMMA, scaled_embedding=True, local_every=2, window=4096, soft_caps=(50.0, 30.0), scaled_by_width=46
    ),
    "gemma3": Architecture(
        options=_GEMMA | {"query_key_norm": True}, scaled_embedding=True, local_every=6, local_theta=1e4, scaled_by_width=62
    ),
    "phi3": Architecture(names=GGUF_FUSED),
}
"""``general.architecture`` to what it stands for: all that can be loaded from GGUF files."""

# Keys (behind "llama." and the like) that change the computation in ways that the decoder does not have, with the values
# that change nothing.
NEUTRAL_VALUES = {
    "attention.causal": (True,),
    "expert_shared_count": (0,),
    "expert_gating_func": (1,),
    "expert_weights_scale": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
}
# Keys that say nothing about the computation, or something that is checked elsewhere.
DESCRIPTIVE = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
USED = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_weights_norm",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
ROPE_TYPES = ("none", "linear", "yarn")


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
    reader = _ConfigReader(file, name, ARCHITECTURES[name], options)
    try:
        config = reader.config()
    except ValueError as error:
        if str(error).startswith(str(file.path)):
            raise
        raise ValueError(f"{file.path}: {error}") from None
    return config, reader.with_names(config)


@dataclasses.dataclass(frozen=True)
class _ConfigReader:
    """The metadata of one file; ``options`` are the keys behind the architecture's name."""

    file: GGUFFile
    name: str
    architecture: Architecture
    options: Mapping[str, Any]

    def need(self, key: str, kind: type = int) -> Any:
        if key not in self.options:
            raise ValueError(f"{self.file.path}: {self.name}.{key} is missing")
        value = self.options[key]
        # A list (one value per layer) would be another architecture.
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{self.file.path}: {self.name}.{key} is {value!r:.80}; it must be one {kind.__name__}")
        return value

    def get(self, key: str, default: Any, kind: type = int) -> Any:
        return self.need(key, kind) if key in self.options else default

    def refuse(self, key: str, what: str):
        raise ValueError(f"{self.file.path}: {self.name}.{key} is {self.options[key]!r:.80}; {what}")

    def config(self) -> DecoderConfig:
        architecture, shapes = self.architecture, self.file.shapes()
        width, heads, layers = self.need("embedding_length"), self.need("attention.head_count"), self.need("block_count")
        head_dim = self.get("attention.key_length", width // max(heads, 1))
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.get(key, head_dim) != head_dim:
                self.refuse(key, f"it must be the head size, {head_dim}")
        if GGUF.embedding not in shapes:
            raise ValueError(f"{self.file.path}: tensor {GGUF.embedding!r} is missing")
        vocab_size = shapes[GGUF.embedding][0]
        if self.get("vocab_size", vocab_size) != vocab_size:
            self.refuse("vocab_size", f"tensor {GGUF.embedding!r} has {vocab_size} rows")
        caps = [
            self.get(key, default, float) or None
            for key, default in zip(("attn_logit_softcapping", "final_logit_softcapping"), architecture.soft_caps, strict=True)
        ]
        experts = self.experts()
        return DecoderConfig(
            vocab_size=vocab_size,
            num_layers=layers,
            width=width,
            num_query_heads=heads,
            num_kv_heads=self.get("attention.head_count_kv", heads),
            head_dim=head_dim,
            mlp_width=self.mlp_width(experts),
            max_positions=self.need("context_length"),
            norm_eps=_shortest(self.need("attention.layer_norm_rms_epsilon", float)),
            tied_embedding=GGUF.unembedding not in shapes,
            attention_scale=math.sqrt(heads / width) if layers == architecture.scaled_by_width else None,
            attention_soft_cap=caps[0],
            logit_soft_cap=caps[1],
            embedding_scale=math.sqrt(width) if architecture.scaled_embedding else 1.0,
            experts=experts,
            **self.windows_and_ropes(layers, head_dim),
            **architecture.options,
        )

    def experts(self) -> ExpertsConfig | None:
        if not self.get("expert_count", 0):
            return None
        # Files seldom say it: all supported mixtures scale the probabilities of the chosen experts to sum 1.
        renormalise = bool(self.options.get("expert_weights_norm", True))
        return ExpertsConfig(self.need("expert_count"), self.need("expert_used_count"), renormalise)

    def mlp_width(self, experts: ExpertsConfig | None) -> int:
        if experts is None:
            return self.need("feed_forward_length")
        return self.get("expert_feed_forward_length", None) or self.need("feed_forward_length")

    def windows_and_ropes(self, num_layers: int, head_dim: int) -> dict[str, Any]:
        """The fields of the decoder's configuration that tell local layers from global ones."""
        architecture = self.architecture
        rope = RopeConfig(theta=self.get("rope.freq_base", 10_000.0, float), scaling=self.scaling(head_dim))
        window = self.get("attention.sliding_window", architecture.window)
        if not window:
            return {"rope": rope}
        every = self.options.get("attention.sliding_window_pattern", architecture.local_every)
        if isinstance(every, list):
            if len(every) != num_layers:
                self.refuse("attention.sliding_window_pattern", f"it must have an entry for each of {num_layers} layers")
            local = tuple(index for index, is_local in enumerate(every) if is_local)
        else:
            local = tuple(index for index in range(num_layers) if every is None or (index + 1) % every)
        theta = self.get("rope.freq_base_swa", architecture.local_theta, float)
        # Scaling is for reaching further back, which local layers do not.
        local_rope = None if theta is None else RopeConfig(theta=theta)
        if not local or (local_rope in (None, rope) and window >= self.need("context_length")):
            return {"rope": rope}
        return {"rope": rope, "local_rope": local_rope, "window": window, "local_layers": local}

    def scaling(self, head_dim: int) -> RopeScaling | None:
        kind, shapes = self.options.get("rope.scaling.type", "none"), self.file.shapes()
        if kind == "longrope" or LONG_FACTORS in shapes:
            raise ValueError(
                f"{self.file.path}: {self.name}.rope.scaling.type is 'longrope' (tensor {LONG_FACTORS!r}); supported: "
                f"{', '.join(map(repr, ROPE_TYPES))}"
            )
        if kind not in ROPE_TYPES:
            self.refuse("rope.scaling.type", f"supported: {', '.join(map(repr, ROPE_TYPES))}")
        factor = self.get("rope.scaling.factor", 1.0, float) or 1.0
        if ROPE_FACTORS in shapes:
            if shapes[ROPE_FACTORS] != (head_dim // 2,):
                raise ValueError(
                    f"{self.file.path}: tensor {ROPE_FACTORS!r} has shape {shapes[ROPE_FACTORS]}; it must be ({head_dim // 2},)"
                )
            if factor != 1.0:
                self.refuse("rope.scaling.factor", f"beside tensor {ROPE_FACTORS!r} it must be 1.0")
            return FrequencyFactors(tuple(self.file.read(ROPE_FACTORS, np.float32).tolist()))
        if kind == "yarn":
            trained = self.get("rope.scaling.original_context_length", 0) or self.need("context_length")
            betas = {
                beta: self.need(f"rope.scaling.yarn_{beta}", float)
                for beta in ("beta_fast", "beta_slow")
                if f"rope.scaling.yarn_{beta}" in self.options
            }
            return YarnRopeScaling(factor, trained, **betas)
        if kind == "linear" and factor != 1.0:
            return LinearRopeScaling(factor)
        if factor != 1.0:
            self.refuse("rope.scaling.factor", "without rope.scaling.type it must be 1.0")
        return None

    def with_names(self, config: DecoderConfig) -> Architecture:
        if config.experts is None:
            return self.architecture
        return dataclasses.replace(self.architecture, names=GGUF_EXPERTS)


def load_gguf_params(file: GGUFFile, config: DecoderConfig, architecture: Architecture, dtype, shardings=None) -> dict:
    """The parameters of ``Decoder(config)``; see :func:`specjax.checkpoints.fuse.load_params`."""
    options = {"paired_rotary": architecture.paired_rotary, "unneeded": (ROPE_FACTORS,), "shardings": shardings}
    return fuse.load_params(config, file, architecture.names, dtype, **options)


def _shortest(value: float) -> float:
    """The decimal that a float32 in a file was made from: 1e-05, where widening gives 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _listed(values) -> str:
    return " or ".join(map(repr, values))
