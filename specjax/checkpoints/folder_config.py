"""Which decoder a folder's config.json describes.

A model family is a value here (:class:`Family`): what its tensors are called, what absent fields mean, and what all of its models
have in common. What a field does is the same for every family that knows it.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.checkpoints.tensor_names import (
    HUGGING_FACE,
    HUGGING_FACE_GEMMA,
    HUGGING_FACE_MIXTRAL,
    HUGGING_FACE_PHI3,
    HUGGING_FACE_QWEN3_MOE,
    TensorNames,
)
from specjax.checkpoints.tokenizer_files import read_json
from specjax.models.config import (
    DecoderConfig,
    ExpertsConfig,
    LinearRopeScaling,
    Llama3RopeScaling,
    RopeConfig,
    RopeScaling,
    YarnRopeScaling,
)


@dataclasses.dataclass(frozen=True)
class Family:
    """What ``model_type`` stands for.

    Attributes:
      architecture: the class in ``architectures``.
      names: of the tensors.
      norm_offset: what the scales of norms are more than the file says.
      options: fields of :class:`specjax.models.config.DecoderConfig` that all of its models share.
      defaults: fields that it has beside the common ones, or that mean something else when absent, with their values then.
      scaled_embedding: whether the embedding is multiplied with the root of the width.
      local_every: where the file does not list the local layers: all but every n-th; None: as ``use_sliding_window`` says.
      local_everywhere: where the file does not list them: all layers, unless ``use_sliding_window`` is false.
      local_theta: base of the local layers' rotary embedding where the file does not say; None: as in the others.
    """

    architecture: str
    names: TensorNames = HUGGING_FACE
    norm_offset: float = 0.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scaled_embedding: bool = False
    local_every: int | None = None
    local_everywhere: bool = False
    local_theta: float | None = None


_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "sliding_window": 4096,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": False,
    "cache_implementation": None,
}
_EXPERTS = {"num_experts": None, "num_local_experts": None, "num_experts_per_tok": None, "norm_topk_prob": None}

FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", defaults={"sliding_window": 4096}, local_everywhere=True),
    "mixtral": Family(
        "MixtralForCausalLM",
        names=HUGGING_FACE_MIXTRAL,
        defaults=_EXPERTS | {"rope_theta": 1e6, "norm_topk_prob": True},
        local_everywhere=True,
    ),
    "qwen2": Family("Qwen2ForCausalLM", options={"qkv_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", options={"query_key_norm": True}, defaults={"head_dim": 128}),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        names=HUGGING_FACE_QWEN3_MOE,
        options={"query_key_norm": True},
        defaults=_EXPERTS | {"moe_intermediate_size": None, "norm_topk_prob": False, "use_sliding_window": False},
        local_everywhere=True,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        names=HUGGING_FACE_GEMMA,
        norm_offset=1.0,
        options={"post_norms": True},
        defaults=_GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        scaled_embedding=True,
        local_every=2,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        names=HUGGING_FACE_GEMMA,
        norm_offset=1.0,
        options={"post_norms": True, "query_key_norm": True},
        defaults=_GEMMA
        | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": None, "_sliding_window_pattern": None},
        scaled_embedding=True,
        local_every=6,
        local_theta=1e4,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        names=HUGGING_FACE_PHI3,
        defaults={"original_max_position_embeddings": None, "sliding_window": None},
        local_everywhere=True,
    ),
}
"""``model_type`` to family: all that can be loaded from folders."""

# What fields that are read for every family are where they are absent; the rest must be there.
DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "layer_types": None,
    "use_sliding_window": None,
    "max_window_layers": 28,
}
NEEDED = {
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
}
# Fields that change the computation in ways that the decoder does not have, with the values that change nothing (null always
# does). pretraining_tp only asked for another order of summation.
NEUTRAL_VALUES = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "use_bidirectional_attention": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
}
# Fields that say nothing about the computation, or something that is read elsewhere.
_DESCRIPTIVE = """
    model_type architectures transformers_version torch_dtype dtype use_cache initializer_range _name_or_path name_or_path
    auto_map bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id
    attention_dropout hidden_dropout resid_pdrop embd_pdrop pretraining_tp router_aux_loss_coef router_jitter_noise
    output_router_logits output_attentions output_hidden_states return_dict return_dict_in_generate use_return_dict
    _attn_implementation attn_implementation _attn_implementation_autoset attn_implementation_internal
    _experts_implementation problem_type id2label label2id num_labels task_specific_params tokenizer_class prefix
    finetuning_task is_decoder chunk_size_feed_forward torchscript use_bfloat16 pruned_heads tie_encoder_decoder
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences
    output_scores forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens unsloth_version unsloth_fixed _commit_hash transformers.js_config
    cache_implementation
"""
DESCRIPTIVE = frozenset(_DESCRIPTIVE.split())
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}
LAYER_TYPES = ("full_attention", "sliding_attention")


def read_config(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[DecoderConfig, Family]:
    """The decoder that config.json describes, and its family.

    Args:
      folder: with config.json.
      shapes: tensors that there are; whether the output matrix is tied depends on them too.

    Raises:
      ValueError: a model type, a field or a value that is not supported, or a field that is missing; names file, field, value.
    """
    path = folder / "config.json"
    fields = read_json(path)
    kind = fields.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"{path}: model_type is {kind!r}; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    reader = _ConfigReader(path, kind, family, DEFAULTS | dict(family.defaults) | fields)
    reader.check(fields)
    try:
        config = reader.config(has_head=family.names.unembedding in shapes)
    except ValueError as error:
        if str(error).startswith(str(path)):
            raise
        raise ValueError(f"{path}: {error}") from None
    return config, family


@dataclasses.dataclass(frozen=True)
class _ConfigReader:
    """One config.json; ``fields`` has defaults for what is absent."""

    path: Path
    kind: str
    family: Family
    fields: Mapping[str, Any]

    def refuse(self, field: str, value, supported: str):
        raise ValueError(f"{self.path}: {field} is {value!r:.200}; supported: {supported}")

    def check(self, given: Mapping[str, Any]) -> None:
        """That every field is one that is understood here, with a value that can be honoured."""
        named = given.get("architectures")
        if named and named != [self.family.architecture]:
            raise ValueError(f"{self.path}: architectures is {named!r}; supported for {self.kind}: {self.family.architecture}")
        known = DESCRIPTIVE | NEEDED | DEFAULTS.keys() | self.family.defaults.keys()
        for field, value in given.items():
            if field in NEUTRAL_VALUES:
                values = NEUTRAL_VALUES[field]
                if value is not None and value not in values:
                    self.refuse(field, value, " or ".join(map(repr, values)) or "none")
            # A switch that is off and a list that is empty ask for nothing.
            elif field not in known and value is not None and value is not False and value != [] and value != {}:
                raise ValueError(
                    f"{self.path}: {field} is {value!r:.200}; this field is not known for {self.kind}, so it cannot be honoured"
                )

    def integer(self, field: str) -> int:
        value = self.fields.get(field)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{self.path}: {field} is {value!r}; it must be an integer")
        return value

    def number_or_none(self, field: str) -> float | None:
        return None if self.fields.get(field) is None else self.number(field)

    def number(self, field: str) -> float:
        value = self.fields.get(field)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{self.path}: {field} is {value!r}; it must be a number")
        return float(value)

    def config(self, has_head: bool) -> DecoderConfig:
        fields, family = self.fields, self.family
        width, heads, layers = self.integer("hidden_size"), self.integer("num_attention_heads"), self.integer("num_hidden_layers")
        tied = bool(fields["tie_word_embeddings"])
        if not tied and not has_head:
            raise ValueError(
                f"{self.path}: tie_word_embeddings is false, but the folder has no tensor {family.names.unembedding!r} "
                "for the output matrix"
            )
        head_dim = self.integer("head_dim") if fields["head_dim"] is not None else width // max(heads, 1)
        scalar = self.number_or_none("query_pre_attn_scalar")
        experts = self.experts()
        return DecoderConfig(
            vocab_size=self.integer("vocab_size"),
            num_layers=layers,
            width=width,
            num_query_heads=heads,
            num_kv_heads=self.integer("num_key_value_heads") if fields["num_key_value_heads"] is not None else heads,
            head_dim=head_dim,
            mlp_width=self.integer("moe_intermediate_size" if "moe_intermediate_size" in fields else "intermediate_size"),
            max_positions=self.integer("max_position_embeddings"),
            norm_eps=self.number("rms_norm_eps"),
            tied_embedding=tied,
            activation=self.activation(),
            attention_scale=None if scalar in (None, head_dim) else scalar**-0.5,
            attention_soft_cap=self.number_or_none("attn_logit_softcapping"),
            logit_soft_cap=self.number_or_none("final_logit_softcapping"),
            embedding_scale=math.sqrt(width) if family.scaled_embedding else 1.0,
            experts=experts,
            **self.windows_and_ropes(layers),
            **family.options,
        )

    def activation(self) -> str:
        field = "hidden_activation" if self.fields.get("hidden_activation") is not None else "hidden_act"
        value = self.fields[field]
        if value not in ACTIVATIONS:
            self.refuse(field, value, " or ".join(map(repr, ACTIVATIONS)))
        return ACTIVATIONS[value]

    def experts(self) -> ExpertsConfig | None:
        if "num_experts_per_tok" not in self.fields:
            return None
        count = "num_local_experts" if self.fields["num_local_experts"] is not None else "num_experts"
        return ExpertsConfig(self.integer(count), self.integer("num_experts_per_tok"), bool(self.fields["norm_topk_prob"]))

    def windows_and_ropes(self, num_layers: int) -> dict[str, Any]:
        """The fields of the decoder's configuration that tell local layers from global ones."""
        local = self.local_layers(num_layers)
        rope, local_rope = self.ropes()
        window = self.fields["sliding_window"]
        if local and window is None:
            raise ValueError(f"{self.path}: sliding_window is None; layer_types has layers that need a window")
        if local and local_rope in (None, rope) and self.integer("sliding_window") >= self.integer("max_position_embeddings"):
            local = ()
        if not local:
            return {"rope": rope}
        return {"rope": rope, "local_rope": local_rope, "window": self.integer("sliding_window"), "local_layers": local}

    def local_layers(self, num_layers: int) -> tuple[int, ...]:
        fields, family = self.fields, self.family
        types = fields["layer_types"]
        if types is not None:
            if len(types) != num_layers:
                raise ValueError(f"{self.path}: layer_types has {len(types)} entries; num_hidden_layers is {num_layers}")
            for kind in types:
                if kind not in LAYER_TYPES:
                    raise ValueError(f"{self.path}: layer_types has {kind!r}; supported: {', '.join(map(repr, LAYER_TYPES))}")
            return tuple(index for index, kind in enumerate(types) if kind == "sliding_attention")
        if family.local_every is not None:
            every = next(
                (fields[name] for name in ("sliding_window_pattern", "_sliding_window_pattern") if fields.get(name) is not None),
                family.local_every,
            )
            return tuple(index for index in range(num_layers) if (index + 1) % every)
        if family.local_everywhere:
            windowed = fields["sliding_window"] is not None and fields["use_sliding_window"] is not False
            return tuple(range(num_layers)) if windowed else ()
        return tuple(range(self.integer("max_window_layers"), num_layers)) if fields["use_sliding_window"] else ()

    def ropes(self) -> tuple[RopeConfig, RopeConfig | None]:
        """Rotary embedding of all layers but the local ones, and of these where they have their own."""
        fields, family = self.fields, self.family
        # transformers 5 writes rope_parameters, with the base inside; 4 wrote rope_theta and rope_scaling.
        name = "rope_parameters" if fields["rope_parameters"] is not None else "rope_scaling"
        options = fields[name] or {}
        if not isinstance(options, dict):
            raise ValueError(f"{self.path}: {name} is {options!r:.200}; it must be an object or null")
        if options.keys() & set(LAYER_TYPES):
            if unknown := sorted(options.keys() - set(LAYER_TYPES)):
                raise ValueError(f"{self.path}: {name} has {unknown[0]!r}; supported: {', '.join(map(repr, LAYER_TYPES))}")
            whole, local = (options.get(kind) or {} for kind in LAYER_TYPES)
            thetas = (fields["rope_theta"], family.local_theta or fields["rope_theta"])
            return (
                self.rope(f"{name}.full_attention", whole, thetas[0]),
                self.rope(f"{name}.sliding_attention", local, thetas[1]),
            )
        local_theta = fields.get("rope_local_base_freq", family.local_theta)
        return (
            self.rope(name, options, fields["rope_theta"]),
            None if local_theta is None else RopeConfig(theta=float(local_theta)),
        )

    def rope(self, name: str, options: Mapping[str, Any], theta: float) -> RopeConfig:
        if options.get("partial_rotary_factor", 1.0) != 1.0:
            self.refuse(f"{name}.partial_rotary_factor", options["partial_rotary_factor"], "1.0")
        kind = options.get("rope_type", options.get("type", "default"))
        if kind not in ROPE_FIELDS:
            supported = ", ".join(map(repr, ROPE_FIELDS))
            raise ValueError(f"{self.path}: {name} has rope_type {kind!r}; supported: {supported}")
        known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_FIELDS[kind]}
        for field, value in options.items():
            if field not in known and value is not None:
                self.refuse(f"{name}.{field}", value, f"for {kind!r}: {', '.join(ROPE_FIELDS[kind]) or 'no option'}")

        def need(field):
            if not isinstance(options.get(field), int | float):
                raise ValueError(f"{self.path}: {name}.{field} is {options.get(field)!r}; it must be a number")
            return options[field]

        scaling: RopeScaling | None = None
        if kind == "linear":
            scaling = LinearRopeScaling(float(need("factor")))
        elif kind == "llama3":
            scaling = Llama3RopeScaling(*map(need, ROPE_FIELDS["llama3"]))
        elif kind == "yarn":
            trained = options.get("original_max_position_embeddings") or self.integer("max_position_embeddings")
            given = {field: need(field) for field in ROPE_FIELDS["yarn"][2:] if options.get(field) is not None}
            scaling = YarnRopeScaling(float(need("factor")), trained, **given)
        return RopeConfig(theta=float(options.get("rope_theta", theta)), scaling=scaling)
