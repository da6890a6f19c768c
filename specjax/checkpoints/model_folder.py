"""Whole models in folders of this library's own: a card (JSON), the tokenizer and the parameters as they run (Orbax).

They load without a conversion, and each device reads its own share. Nothing is ever unpickled.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import tokenizers

from specjax.checkpoints.array_files import check_file, file_hash, load_arrays, save_arrays
from specjax.checkpoints.config_json import decoder_from_dict, decoder_to_dict
from specjax.checkpoints.tokenizer import Tokenizer
from specjax.checkpoints.tokenizer_files import read_json
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.int8_model import in_dtype
from specjax.models.loaded import Model
from specjax.models.quantised import in_the_form_of, is_quantised

CARD = "specjax_model.json"
PARAMS = "params"
TOKENIZER = "tokenizer.json"
FORMAT = 1
"""Of the card; another number is another version's."""


def save_model(model: Model, folder: str | Path) -> Path:
    """Writes a model; the folder is complete or not there.

    Args:
      model: of the decoder that comes with this library; its parameters are written as they are, bit by bit.
      folder: must not exist.

    Raises:
      ValueError: the folder exists, or the model is another one.
    """
    folder = check_new(folder)
    if not isinstance(model.functions, Decoder):
        kind = type(model.functions).__name__
        raise ValueError(f"save_model: the model's functions are a {kind}; only models that load_model loaded are written")
    unfinished = folder.with_name(folder.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    files = save_arrays(unfinished / PARAMS, model.params)
    words = None
    if model.tokenizer is not None:
        model.tokenizer.backend.save(str(unfinished / TOKENIZER))
        words = {
            "bos_token": model.tokenizer.bos_token,
            "eos_token": model.tokenizer.eos_token,
            "chat_template": model.tokenizer.chat_template,
            "special_tokens": dict(model.tokenizer.special_tokens),
            "sha256": file_hash(unfinished / TOKENIZER),
        }
    card = {
        "format": FORMAT,
        "name": model.name,
        "dtype": model.dtype.name,
        "config": decoder_to_dict(model.config),
        "stop_token_ids": list(model.stop_token_ids),
        "tokenizer": words,
        "files": files,
    }
    (unfinished / CARD).write_text(json.dumps(card, indent=2) + "\n")
    unfinished.replace(folder)
    return folder


def check_new(folder: str | Path) -> Path:
    """The folder's whole path. Raises ValueError if there is something."""
    folder = Path(folder).expanduser().resolve()
    if folder.exists():
        raise ValueError(f"{folder} exists already; name a new folder")
    return folder


def read_card(folder: Path) -> dict:
    """The card of a folder, its fields there but not looked into.

    Raises:
      ValueError: it is damaged or of another version.
    """
    path = folder / CARD
    card = read_json(path)
    if card.get("format") != FORMAT:
        raise ValueError(f"{path}: format is {card.get('format')!r}; this version reads {FORMAT}")
    for name in ("name", "dtype", "config", "stop_token_ids", "tokenizer", "files"):
        if name not in card:
            raise ValueError(f"{path}: {name} is missing")
    return card


def load_folder(
    folder: Path,
    card: dict,
    dtype: str,
    feature_layers: Sequence[int],
    shardings: Callable[[DecoderConfig], dict] | None,
    scan_layers: bool | None = None,
) -> tuple[DecoderConfig, dict, Tokenizer | None, tuple[int, ...]]:
    """Configuration, parameters, tokenizer and stop ids of a folder that :func:`save_model` wrote.

    Args:
      folder: the folder.
      card: see :func:`read_card`.
      dtype: of the parameters; where it is not that of the folder, each is rounded as it comes, or quantised.
      feature_layers: are checked before anything is read.
      shardings: see :func:`specjax.checkpoints.fuse.load_params`.
      scan_layers: what the configuration must say of it; None: either.

    Raises:
      ValueError: something is missing, damaged or contradicts the card; names the file.
    """
    path = folder / CARD
    try:
        config = decoder_from_dict(card["config"])
        wanted = Decoder(config).abstract_params(card["dtype"])
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: config or dtype is damaged: {error}") from error
    if scan_layers not in (None, config.scan_layers):
        raise ValueError(
            f"{folder}: scan_layers is {scan_layers}, and the folder was written with {config.scan_layers}, which says how "
            f"parameters are laid out; convert its source with scan_layers={scan_layers}"
        )
    Decoder(config, tuple(feature_layers))
    stops = card["stop_token_ids"]
    if not isinstance(stops, list) or not all(isinstance(id, int) and id >= 0 for id in stops):
        raise ValueError(f"{path}: stop_token_ids is {stops!r}; it must be a list of ids")
    if not isinstance(card["files"], dict):
        raise ValueError(f"{path}: files is {card['files']!r:.80}; it must be an object")
    tokenizer = None if card["tokenizer"] is None else _tokenizer(folder, card["tokenizer"])
    final = in_dtype(config, dtype)
    if config.int8_stream is not None and final.int8_stream is None:
        raise ValueError(f"{path}: dtype is int8, and {dtype} is asked for; what was rounded away is only in the folder's source")
    placed = None if shardings is None else (shardings(config), shardings(final))
    params = load_arrays(folder / PARAMS, wanted, card["files"], None if placed is None else placed[0])
    forms = Decoder(final).abstract_params(dtype)
    return final, _cast(params, forms, None if placed is None else placed[1], folder), tokenizer, tuple(stops)


def _tokenizer(folder: Path, words: dict) -> Tokenizer:
    try:
        check_file(folder / TOKENIZER, words["sha256"])
        backend = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
        return Tokenizer(backend, words["bos_token"], words["eos_token"], words["chat_template"], words["special_tokens"])
    except (TypeError, KeyError) as error:
        raise ValueError(f"{folder / CARD}: tokenizer is damaged: {error}") from error


def _cast(params, wanted, placed, folder: Path):
    """The parameters in the forms that are wanted; what is no longer needed is given back at once."""

    def cast(key, want, leaf, there=None):
        if is_quantised(leaf):
            return leaf.astype(want.dtype)
        if leaf.dtype == want.dtype and not is_quantised(want):
            return leaf
        if is_quantised(want):
            result = jax.jit(lambda leaf: in_the_form_of(want, leaf), out_shardings=there)(leaf)
        else:
            result = leaf.astype(want.dtype)
        jax.block_until_ready(result)
        leaf.delete()
        # Only float16 has a smaller range than the formats that are written.
        if want.dtype == jnp.float16 and not bool(jnp.isfinite(result).all()):
            name = jax.tree_util.keystr(key, simple=True, separator=".")
            raise ValueError(f"{folder}: {name} has values beyond float16's largest, 65504; use bfloat16 or float32")
        return result

    return jax.tree.map_with_path(cast, wanted, params, *([] if placed is None else [placed]), is_leaf=is_quantised)
