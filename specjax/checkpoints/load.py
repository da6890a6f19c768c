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

from specjax.checkpoints import folder_config, gguf, hub, model_folder, safetensors, tokenizer_files, tokenizer_gguf
from specjax.checkpoints.cards import Card, find_card, model_cards
from specjax.checkpoints.download import pull
from specjax.checkpoints.gguf_file import GGUFFile
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.int8_model import INT8, in_dtype
from specjax.models.loaded import Model
from specjax.parallel import as_mesh, param_shardings

DTYPES = ("float32", "bfloat16", "float16", INT8)
# Part of the path of a folder in a repository.
SUBFOLDER = re.compile(r"[\w-][\w. -]*")
# What folders written by Orbax have at their top.
ORBAX_FILES = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")


def load_model(
    source: str | Path,
    dtype: str | None = None,
    feature_layers: Sequence[int] = (),
    mesh: Mesh | str | None = None,
    product_parts: int = 1,
    revision: str | None = None,
    subfolder: str = "",
    scan_layers: bool | None = None,
) -> Model:
    """Loads a model.

    Args:
      source: a model card's name (downloaded into the user's cache folder when it is not there yet, said on standard error),
        a .gguf file, a folder with config.json and safetensors, a folder that ``specjax convert`` wrote, or a hub id like
        "org/name" (downloaded by huggingface-hub into its own cache; safetensors only, never a pickle). A card's name comes
        first, then what is here: write ``./NAME`` for a folder that is called like a card.
      dtype: "float32", "bfloat16" or "float16" for the parameters and the cache; "int8" for quantised matrices (see
        :mod:`specjax.models.quantised`), with everything else in float32 on a CPU and in bfloat16 elsewhere; None: the fastest
        here of float32 and bfloat16, measured once; of a folder that ``specjax convert`` wrote: what it is written in.
      feature_layers: layers whose hidden states ``apply`` shows (see :class:`specjax.models.decoder.Decoder`).
      mesh: devices that the parameters are spread over as they are read, for an engine on this mesh (see
        :func:`specjax.parallel.make_mesh`; text like ``"data=4,model=2"`` will do): no device ever has more than its share. None:
        the default device.
      product_parts: 1, or more for smaller rounding errors (see :class:`specjax.models.config.DecoderConfig`): in float32 on a
        CPU 8 bring them down to those of other libraries.
      revision: of a hub id: a branch, a tag or a commit; None: the main branch.
      subfolder: of a hub id: the folder in the repository that has the model.
      scan_layers: True keeps parameters of layers that are alike in one array each, and runs them in a loop: programs compile in
        half the time on a TPU, and run slower on a CPU (see docs/tpu_compiler.md). None: as the folder has it that this library
        wrote, else False.

    Raises:
      ValueError: an unknown source or dtype, or a checkpoint that is damaged or not supported; names file, field and values.
      DownloadError: the model could not be downloaded.

    Example:
      >>> load_model("no-such-model")
      Traceback (most recent call last):
      ValueError: no model is called 'no-such-model'...
    """
    if dtype is not None:
        dtype = dtype_name(dtype)
    if isinstance(product_parts, bool) or not isinstance(product_parts, int) or product_parts < 1:
        raise ValueError(f"load_model: product_parts is {product_parts!r}; it must be a whole number of at least 1")
    if scan_layers is not None and not isinstance(scan_layers, bool):
        raise ValueError(f"load_model: scan_layers is {scan_layers!r}; it must be True, False or None")
    mesh = as_mesh(mesh)
    shardings = None if mesh is None else functools.partial(param_shardings, mesh=mesh)
    path, name, card = find_source(source, revision, subfolder)
    written = (path / model_folder.CARD).exists()
    load = _load_written if written else _load_folder if path.is_dir() else _load_gguf
    reason = "asked for"
    if dtype is None and written:
        dtype, reason = dtype_name(model_folder.read_card(path)["dtype"]), "as the folder has it"
    elif dtype is None:
        from specjax.models.dtype import choose_dtype

        dtype, reason = choose_dtype()
    if dtype == INT8 and product_parts > 1:
        raise ValueError(f"load_model: product_parts is {product_parts}; with dtype 'int8', whose sums are exact, it must be 1")
    config, params, tokenizer, stop_token_ids = load(path, dtype, feature_layers, shardings, scan_layers)
    config = dataclasses.replace(config, product_parts=product_parts)
    return Model(
        functions=Decoder(config, tuple(feature_layers)),
        params=params,
        vocab_size=config.vocab_size if tokenizer is None else tokenizer.size,
        max_positions=config.max_positions,
        stop_token_ids=stop_token_ids,
        tokenizer=tokenizer,
        name=name,
        card=card,
        dtype_reason=reason,
    )


def dtype_name(dtype) -> str:
    """The name of a dtype; raises ValueError unless parameters can be in it."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in DTYPES:
        raise ValueError(f"load_model: dtype is {dtype!r}; it must be {', '.join(DTYPES)} or None")
    return name


def find_source(source: str | Path, revision: str | None, subfolder: str) -> tuple[Path, str, Card | None]:
    """File or folder of a model, its name, and its card if it has one."""
    if not isinstance(source, str | os.PathLike) or not str(source):
        raise ValueError(f"load_model: source is {source!r}; it must be a model's name, a .gguf file, a folder or a hub id")
    if revision is not None and (not isinstance(revision, str) or not revision):
        raise ValueError(f"load_model: revision is {revision!r}; it must be a branch, a tag or a commit, or None")
    if not isinstance(subfolder, str) or not all(SUBFOLDER.fullmatch(part) for part in subfolder.split("/") if subfolder):
        raise ValueError(f"load_model: subfolder is {subfolder!r}; it must be a folder in a repository, such as 'a/b'")
    card = find_card(source) if isinstance(source, str) and source in model_cards() else None
    path = Path(source).expanduser()
    here = card is not None or path.exists()
    if not here and hub.is_hub_id(source):
        # Nothing is known of it before the network is asked.
        return hub.fetch(str(source), revision, subfolder), str(source), None
    for name, value in (("revision", revision), ("subfolder", subfolder or None)):
        if value is not None:
            what = "the name of a model card" if card else "here" if here else "no hub id"
            raise ValueError(f"load_model: {name} is {value!r}, but {str(source)!r} is {what}; only hub ids have a {name}")
    if card is not None:
        return pull(card.name, progress=lambda line: print(line, file=sys.stderr)), card.name, card
    if here:
        return path, path.stem if path.is_file() else path.resolve().name, None
    forms = "A source is a model's name, a .gguf file, a folder with config.json and safetensors, or a hub id like org/name."
    if isinstance(source, str) and path.suffix != ".gguf" and not source.startswith(".") and os.sep not in source:
        try:
            find_card(source)
        except ValueError as error:
            raise ValueError(f"{error}. {forms}") from None
    raise ValueError(f"{source}: there is no such file or folder. {forms}")


def _load_gguf(path: Path, dtype: str, feature_layers: Sequence[int], shardings, scan_layers: bool | None):
    file = GGUFFile(path)
    config, architecture = gguf.read_config(file)
    config = dataclasses.replace(in_dtype(config, dtype), scan_layers=bool(scan_layers))
    Decoder(config, tuple(feature_layers))  # refuses layers that there are not, before anything is read
    tokenizer = tokenizer_gguf.read_tokenizer(file)
    stops = () if tokenizer is None else tokenizer_gguf.stop_token_ids(file)
    _check_vocabulary(path, config, tokenizer, stops)
    return config, gguf.load_gguf_params(file, config, architecture, dtype, shardings), tokenizer, stops


def _load_folder(path: Path, dtype: str, feature_layers: Sequence[int], shardings, scan_layers: bool | None):
    if not (path / "config.json").exists():
        if any((path / name).exists() for name in ORBAX_FILES):
            raise ValueError(
                f"{path}: looks like an Orbax checkpoint, but not like a folder that `specjax convert` wrote: there is no "
                f"{model_folder.CARD}"
            )
        raise ValueError(f"{path}: there is no config.json in this folder")
    reader = safetensors.SafetensorsFolder(path)
    config, family = folder_config.read_config(path, reader.shapes())
    config = dataclasses.replace(in_dtype(config, dtype), scan_layers=bool(scan_layers))
    Decoder(config, tuple(feature_layers))
    tokenizer = tokenizer_files.read_tokenizer(path)
    stops = safetensors.stop_token_ids(path, tokenizer)
    _check_vocabulary(path, config, tokenizer, stops)
    config, params = safetensors.load_safetensors_params(reader, config, family, dtype, shardings)
    return config, params, tokenizer, stops


def _load_written(path: Path, dtype: str, feature_layers: Sequence[int], shardings, scan_layers: bool | None):
    card = model_folder.read_card(path)
    loaded = model_folder.load_folder(path, card, dtype, feature_layers, shardings, scan_layers)
    config, _, tokenizer, stops = loaded
    _check_vocabulary(path, config, tokenizer, stops)
    return loaded


def _check_vocabulary(path: Path, config: DecoderConfig, tokenizer, stops: Sequence[int]) -> None:
    size = config.vocab_size if tokenizer is None else tokenizer.size
    if size > config.vocab_size:
        raise ValueError(f"{path}: the tokenizer has {size} ids, the embedding {config.vocab_size} rows")
    for id in stops:
        if id >= size:
            raise ValueError(f"{path}: stop id {id} is outside the vocabulary, 0 to {size - 1}")
