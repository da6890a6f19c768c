"""Models in folders with config.json and safetensors, as transformers saves them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from specjax.checkpoints import fuse
from specjax.checkpoints.tokenizer import Tokenizer
from specjax.checkpoints.tokenizer_files import read_json
from specjax.models.config import DecoderConfig, Llama3RopeScaling, RopeConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F32", "F16", "BF16", "F64")
# model_type: architecture, whether query, key and value have biases.
MODEL_TYPES = {"llama": ("LlamaForCausalLM", False), "qwen2": ("Qwen2ForCausalLM", True)}
# Fields that change the computation in ways that the decoder does not have, with the values that change nothing (null always
# does). pretraining_tp only asked for another order of summation.
NEUTRAL_VALUES = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}
ROPE_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class SafetensorsFolder:
    """The tensors of a folder, in one file or several; a tensor reader (see :class:`specjax.checkpoints.fuse.TensorReader`).

    Args:
      folder: where they are.
      weights: name of the file, where there is one only.

    Raises:
      ValueError: no weights, a missing file, a file that is no safetensors file, or a tensor that the index places wrongly.
    """

    def __init__(self, folder: str | Path, weights: str = WEIGHTS):
        self.folder = Path(folder)
        if (self.folder / weights).exists():
            placed = None
            files = [weights]
        elif (self.folder / INDEX).exists():
            placed = read_json(self.folder / INDEX).get("weight_map")
            if not isinstance(placed, dict) or not placed:
                raise ValueError(f"{self.folder / INDEX}: weight_map is missing or empty")
            files = sorted(set(map(str, placed.values())))
            for name in files:
                if Path(name).name != name or not (self.folder / name).is_file():
                    raise ValueError(f"{self.folder / INDEX}: weight_map names {name!r}, which is not a file in this folder")
        else:
            raise ValueError(f"{self.folder}: there is neither {weights} nor {INDEX}")
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._kinds: dict[str, str] = {}
        for name in files:
            path = self.folder / name
            try:
                opened = safetensors.safe_open(path, framework="numpy")
            except safetensors.SafetensorError as error:
                raise ValueError(f"{path}: truncated or damaged safetensors file: {error}") from None
            for tensor in opened.keys():  # noqa: SIM118 - not a mapping
                if placed is not None and placed.get(tensor) != name:
                    raise ValueError(f"{path}: has tensor {tensor!r}, which {INDEX} places in {placed.get(tensor)!r}")
                part = opened.get_slice(tensor)
                self._files[tensor] = opened
                self._shapes[tensor] = tuple(part.get_shape())
                self._kinds[tensor] = part.get_dtype()

    @property
    def where(self) -> str:
        """What messages call this source."""
        return str(self.folder)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor name to shape."""
        return self._shapes

    def check_readable(self, name: str) -> None:
        """Raises a ValueError if a tensor is not of a floating-point type."""
        if self._kinds[name] not in FLOATS:
            raise ValueError(f"{self.where}: tensor {name!r} has type {self._kinds[name]}; supported: {', '.join(FLOATS)}")

    def read(self, name: str, dtype) -> np.ndarray:
        """A tensor in ``dtype``, rounded once."""
        # Overflow to infinity in a narrow dtype is reported by the caller, by name.
        with np.errstate(over="ignore"):
            return np.asarray(self._files[name].get_tensor(name)).astype(dtype, copy=False)


def read_config(folder: Path, shapes: dict[str, tuple[int, ...]]) -> DecoderConfig:
    """The decoder that config.json describes.

    Args:
      folder: with config.json.
      shapes: tensors that there are; whether the output matrix is tied depends on them too.

    Raises:
      ValueError: a model type or an option that is not supported, or a field that is missing; names file, field, value.
    """
    path = folder / "config.json"
    fields = read_json(path)
    kind = fields.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(f"{path}: model_type is {kind!r}; supported: {', '.join(MODEL_TYPES)}")
    architecture, qkv_bias = MODEL_TYPES[kind]
    named = fields.get("architectures")
    if named and named != [architecture]:
        raise ValueError(f"{path}: architectures is {named!r}; supported for {kind}: {architecture}")
    for field, values in NEUTRAL_VALUES.items():
        value = fields.get(field)
        if value is not None and value not in values:
            wanted = " or ".join(map(repr, values)) or "none"
            raise ValueError(f"{path}: {field} is {value!r:.200}; supported: {wanted}")

    def need(field: str) -> int:
        if not isinstance(fields.get(field), int):
            raise ValueError(f"{path}: {field} is {fields.get(field)!r}; it must be an integer")
        return fields[field]

    width, heads, max_positions = need("hidden_size"), need("num_attention_heads"), need("max_position_embeddings")
    _check_windows(path, fields, max_positions)
    tied = bool(fields.get("tie_word_embeddings", False))
    has_head = fuse.HUGGING_FACE.unembedding in shapes
    if not tied and not has_head:
        raise ValueError(
            f"{path}: tie_word_embeddings is false, but the folder has no tensor {fuse.HUGGING_FACE.unembedding!r} "
            "for the output matrix"
        )
    eps = fields.get("rms_norm_eps")
    if not isinstance(eps, int | float):
        raise ValueError(f"{path}: rms_norm_eps is {eps!r}; it must be a number")
    try:
        return DecoderConfig(
            vocab_size=need("vocab_size"),
            num_layers=need("num_hidden_layers"),
            width=width,
            num_query_heads=heads,
            num_kv_heads=need("num_key_value_heads") if fields.get("num_key_value_heads") is not None else heads,
            head_dim=need("head_dim") if fields.get("head_dim") is not None else width // max(heads, 1),
            mlp_width=need("intermediate_size"),
            max_positions=max_positions,
            norm_eps=float(eps),
            rope=_rope(path, fields),
            qkv_bias=qkv_bias,
            tied_embedding=tied,
        )
    except ValueError as error:
        if str(error).startswith(str(path)):
            raise
        raise ValueError(f"{path}: {error}") from None


def _check_windows(path: Path, fields: dict, max_positions: int) -> None:
    """Refuses attention windows that some layer uses and that are shorter than the longest sequence."""
    window = fields.get("sliding_window")
    layers = fields.get("layer_types")
    if layers is not None:
        unknown = set(layers) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ValueError(f"{path}: layer_types has {sorted(unknown)[0]!r}; supported: 'full_attention'")
        windowed = "sliding_attention" in layers
    else:
        windowed = bool(fields.get("use_sliding_window")) and fields.get("max_window_layers", 0) < fields["num_hidden_layers"]
    if windowed and window is not None and window < max_positions:
        raise ValueError(
            f"{path}: sliding_window is {window} in some layers, shorter than max_position_embeddings ({max_positions}); "
            "supported: none"
        )


def _rope(path: Path, fields: dict) -> RopeConfig:
    # transformers 5 writes rope_parameters, with the base inside; 4 wrote rope_theta and rope_scaling.
    name = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    options = fields.get(name) or {}
    theta = options.get("rope_theta", fields.get("rope_theta", 10_000.0))
    if options.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{path}: {name}.partial_rotary_factor is {options['partial_rotary_factor']}; supported: 1.0")
    kind = options.get("rope_type", options.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=float(theta))
    if kind != "llama3":
        raise ValueError(f"{path}: {name} has rope_type {kind!r}; supported: 'default', 'llama3'")
    for field in ROPE_FIELDS:
        if not isinstance(options.get(field), int | float):
            raise ValueError(f"{path}: {name}.{field} is {options.get(field)!r}; it must be a number")
    return RopeConfig(theta=float(theta), scaling=Llama3RopeScaling(*(options[field] for field in ROPE_FIELDS)))


def load_safetensors_params(
    reader: SafetensorsFolder, config: DecoderConfig, dtype, shardings=None
) -> tuple[DecoderConfig, dict]:
    """The parameters of a folder, and the configuration they are for; see :func:`specjax.checkpoints.fuse.load_params`.

    A folder that calls its output matrix tied and has one all the same is loaded with the matrix that it has: tied where it
    is the embedding, untied where it differs.
    """
    names, shapes = fuse.HUGGING_FACE, reader.shapes()
    # Old checkpoints carry the rotary frequencies, which follow from the configuration.
    unneeded = [name for name in shapes if name.endswith("self_attn.rotary_emb.inv_freq")]
    if config.tied_embedding and names.unembedding in shapes:
        if _equal(reader, names.embedding, names.unembedding):
            unneeded.append(names.unembedding)
        else:
            config = dataclasses.replace(config, tied_embedding=False)
    return config, fuse.load_params(config, reader, names, dtype, unneeded=unneeded, shardings=shardings)


def _equal(reader: SafetensorsFolder, first: str, second: str) -> bool:
    shapes = reader.shapes()
    return shapes.get(first) == shapes[second] and np.array_equal(reader.read(first, np.float32), reader.read(second, np.float32))


def stop_token_ids(folder: Path, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids that end a generation: of generation_config.json (config.json where there is none) and of the tokenizer.

    Raises:
      ValueError: ``eos_token_id`` is neither an id nor a list of ids.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        path = folder / "config.json"
    named = read_json(path).get("eos_token_id")
    ids = [] if named is None else named if isinstance(named, list) else [named]
    for id in ids:
        if not isinstance(id, int) or id < 0:
            raise ValueError(f"{path}: eos_token_id is {json.dumps(named)}; it must be an id or a list of ids")
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
    return tuple(dict.fromkeys(ids))
