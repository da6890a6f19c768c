"""Loads models by name, file or folder."""

import dataclasses
import functools
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh

from specjax.checkpoints import folder_config, gguf, safetensors, tokenizer_files, tokenizer_gguf
from specjax.checkpoints.cards import find_card, model_cards
from specjax.checkpoints.download import pull
from specjax.checkpoints.gguf_file import GGUFFile
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.loaded import Model
from specjax.parallel import as_mesh, param_shardings

DTYPES = ("float32", "bfloat16", "float16")
# What folders written by Orbax have at their top.
ORBAX_FILES = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")


def load_model(
    source: str | Path,
    dtype: str | None = None,
    feature_layers: Sequence[int] = (),
    mesh: Mesh | str | None = None,
    product_parts: int = 1,
) -> Model:
    """Loads a model.

    Args:
      source: a model card's name (downloaded into the user's cache folder when it is not there yet, said on standard error),
        a .gguf file, or a folder with config.json and safetensors. A card's name comes first: write ``./NAME`` for a folder
        that is called like one.
      dtype: "float32", "bfloat16" or "float16" for the parameters and the cache; None: what is fastest here, measured once.
      feature_layers: layers whose hidden states ``apply`` shows (see :class:`specjax.models.decoder.Decoder`).
      mesh: devices that the parameters are spread over as they are read, for an engine on this mesh (see
        :func:`specjax.parallel.make_mesh`; text like ``"data=4,model=2"`` will do): no device ever has more than its share. None:
        the default device.
      product_parts: 1, or more for smaller rounding errors (see :class:`specjax.models.config.DecoderConfig`): in float32 on a
        CPU 8 bring them down to those of other libraries.

    Raises:
      ValueError: an unknown source or dtype, or a checkpoint that is damaged or not supported; names file, field and values.
      DownloadError: the model could not be downloaded.

    Example:
      >>> load_model("no-such-model")
      Traceback (most recent call last):
      ValueError: no model is called 'no-such-model'...
    """
    if dtype is not None:
        dtype = _dtype_name(dtype)
    if isinstance(product_parts, bool) or not isinstance(product_parts, int) or product_parts < 1:
        raise ValueError(f"load_model: product_parts is {product_parts!r}; it must be a whole number of at least 1")
    mesh = as_mesh(mesh)
    shardings = None if mesh is None else functools.partial(param_shardings, mesh=mesh)
    card = None
    if isinstance(source, str) and source in model_cards():
        card = find_card(source)
        path = pull(source, progress=lambda line: print(line, file=sys.stderr))
    else:
        path = _existing_path(source)
    load = _load_folder if path.is_dir() else _load_gguf
    reason = "asked for"
    if dtype is None:
        from specjax.models.dtype import choose_dtype

        dtype, reason = choose_dtype()
    config, params, tokenizer, stop_token_ids = load(path, dtype, feature_layers, shardings)
    config = dataclasses.replace(config, product_parts=product_parts)
    return Model(
        functions=Decoder(config, tuple(feature_layers)),
        params=params,
        vocab_size=config.vocab_size if tokenizer is None else tokenizer.size,
        max_positions=config.max_positions,
        stop_token_ids=stop_token_ids,
        tokenizer=tokenizer,
        name=card.name if card else path.stem if path.is_file() else path.resolve().name,
        card=card,
        dtype_reason=reason,
    )


def _dtype_name(dtype) -> str:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in DTYPES:
        raise ValueError(f"load_model: dtype is {dtype!r}; it must be {', '.join(DTYPES)} or None")
    return name


def _existing_path(source: str | Path) -> Path:
    if not isinstance(source, str | os.PathLike) or not str(source):
        raise ValueError(f"load_model: source is {source!r}; it must be a model's name, a .gguf file or a folder")
    path = Path(source).expanduser()
    if path.exists():
        return path
    forms = "A source is a model's name, a .gguf file, or a folder with config.json and safetensors."
    named = isinstance(source, str) and path.suffix != ".gguf" and not source.startswith(".")
    if named and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise ValueError(f"{source!r} is no file or folder here, and loading from a model hub is not supported yet. {forms}")
    if named and os.sep not in source:
        try:
            find_card(source)
        except ValueError as error:
            raise ValueError(f"{error}. {forms}") from None
    raise ValueError(f"{source}: there is no such file or folder. {forms}")


def _load_gguf(path: Path, dtype: str, feature_layers: Sequence[int], shardings):
    file = GGUFFile(path)
    config, architecture = gguf.read_config(file)
    Decoder(config, tuple(feature_layers))  # refuses layers that there are not, before anything is read
    tokenizer = tokenizer_gguf.read_tokenizer(file)
    stops = () if tokenizer is None else tokenizer_gguf.stop_token_ids(file)
    _check_vocabulary(path, config, tokenizer, stops)
    return config, gguf.load_gguf_params(file, config, architecture, dtype, shardings), tokenizer, stops


def _load_folder(path: Path, dtype: str, feature_layers: Sequence[int], shardings):
    if not (path / "config.json").exists():
        if any((path / name).exists() for name in ORBAX_FILES):
            raise ValueError(f"{path}: looks like an Orbax checkpoint; loading these is not supported yet")
        raise ValueError(f"{path}: there is no config.json in this folder")
    reader = safetensors.SafetensorsFolder(path)
    config, family = folder_config.read_config(path, reader.shapes())
    Decoder(config, tuple(feature_layers))
    tokenizer = tokenizer_files.read_tokenizer(path)
    stops = safetensors.stop_token_ids(path, tokenizer)
    _check_vocabulary(path, config, tokenizer, stops)
    config, params = safetensors.load_safetensors_params(reader, config, family, dtype, shardings)
    return config, params, tokenizer, stops


def _check_vocabulary(path: Path, config: DecoderConfig, tokenizer, stops: Sequence[int]) -> None:
    size = config.vocab_size if tokenizer is None else tokenizer.size
    if size > config.vocab_size:
        raise ValueError(f"{path}: the tokenizer has {size} ids, the embedding {config.vocab_size} rows")
    for id in stops:
        if id >= size:
            raise ValueError(f"{path}: stop id {id} is outside the vocabulary, 0 to {size - 1}")
