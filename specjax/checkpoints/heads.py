"""Trained heads and draft models on disk: a folder with a card (JSON) and the parameters (Orbax). Nothing is ever unpickled."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.array_files import load_arrays, save_arrays
from specjax.checkpoints.config_json import decoder_from_dict, decoder_to_dict
from specjax.checkpoints.shipped import shipped_folder
from specjax.models.config import DecoderConfig
from specjax.models.loaded import Model
from specjax.models.trained_head import KINDS, TargetMark, TrainedHead
from specjax.tree import DraftTree

CARD = "card.json"
PARAMS = "params"
FORMAT = 1
"""Of the card; another number is another version's."""


def save_head(head: TrainedHead, folder: str | Path, dtype=jnp.bfloat16) -> Path:
    """Writes a head; the folder is complete or not there.

    Args:
      head: what is written.
      folder: must not exist.
      dtype: of the parameters in the file.

    Raises:
      ValueError: the folder exists.
    """
    folder = Path(folder).resolve()
    if folder.exists():
        raise ValueError(f"save_head: {folder} exists already; name a new folder")
    unfinished = folder.with_name(folder.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    tree: dict[str, Any] = {"head": head.params_in(dtype)}
    if head.ids is not None:
        tree["ids"] = jnp.asarray(head.ids, jnp.int32)
    files = save_arrays(unfinished / PARAMS, tree)
    card = {
        "format": FORMAT,
        "kind": head.kind,
        "dtype": jnp.dtype(dtype).name,
        "config": _config_to_dict(head.functions.config),
        "target": dataclasses.asdict(head.target),
        "feature_layers": list(head.feature_layers),
        "tree": None if head.tree is None else list(head.tree.parents),
        "facts": head.facts,
        "files": files,
    }
    (unfinished / CARD).write_text(json.dumps(card, indent=2) + "\n")
    unfinished.replace(folder)
    return folder


def load_head(source: str | Path) -> TrainedHead:
    """Loads a head: a folder that :func:`save_head` wrote, or the name of one that comes with the library.

    Raises:
      ValueError: there is none, or it is damaged; names the file and what is wrong.

    Example:
      >>> load_head("no-such-head")
      Traceback (most recent call last):
      ValueError: no trained head is called 'no-such-head'...
    """
    folder, card = _folder(source), read_card(source)
    dtype = jnp.dtype(card["dtype"])
    functions_type, config_type = KINDS[card["kind"]]
    try:
        functions = functions_type(_config_from_dict(config_type, card["config"]))
        target = _target(card)
        tree = None if card["tree"] is None else DraftTree(tuple(card["tree"]))
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{folder / CARD}: {error}") from error
    wanted = {"head": functions.abstract_params(dtype)}
    size = functions.config.draft_vocab_size
    if size is not None:
        wanted["ids"] = jax.ShapeDtypeStruct((size,), jnp.int32)
    params = load_arrays(folder / PARAMS, wanted, card["files"])
    return TrainedHead(
        functions=functions,
        params=params["head"],
        target=target,
        feature_layers=tuple(card["feature_layers"]),
        ids=None if size is None else np.asarray(params["ids"]),
        tree=tree,
        facts=card["facts"],
    )


def shipped_heads() -> dict[str, Path]:
    """Heads that come with the library, by name."""
    return {path.parent.name: path.parent for path in sorted(shipped_folder("checkpoints").glob(f"*/{CARD}"))}


def heads_of(target: Model) -> list[TrainedHead]:
    """All heads that come with the library for a model, told by its weights and not by its name."""
    return [load_head(folder) for folder in shipped_heads().values() if _target(read_card(folder)).fits(target)]


def find_head(kind: str, target: Model) -> TrainedHead:
    """The head of a kind ("medusa", "eagle" or "draft") that comes with the library for a model.

    Raises:
      ValueError: there is none.
    """
    for folder in shipped_heads().values():
        card = read_card(folder)
        if card["kind"] == kind and _target(card).fits(target):
            return load_head(folder)
    raise ValueError(
        f"no {kind} head for {target.name!r} comes with specjax; train one (scripts/train_{kind}.py) and name its folder"
    )


def _target(card: dict) -> TargetMark:
    return TargetMark(**(card["target"] | {"sample": tuple(card["target"]["sample"])}))


def _folder(source) -> Path:
    shipped = shipped_heads()
    if isinstance(source, str) and source in shipped:
        return shipped[source]
    path = Path(source).expanduser()
    if path.is_dir():
        return path.resolve()
    known = ", ".join(shipped) or "none"
    raise ValueError(f"no trained head is called {str(source)!r}, and no folder either; with specjax come: {known}")


def read_card(source: str | Path) -> dict:
    """The card of a head, without its parameters; see :func:`load_head`."""
    path = _folder(source) / CARD
    try:
        card = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path.parent}: no trained head; there is no {path.name} in this folder") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(card, dict):
        raise ValueError(f"{path}: holds {type(card).__name__}; it must be an object")
    if card.get("format") != FORMAT:
        raise ValueError(f"{path}: format is {card.get('format')!r}; this version reads {FORMAT}")
    for name in ("kind", "dtype", "config", "target", "feature_layers", "tree", "facts", "files"):
        if name not in card:
            raise ValueError(f"{path}: {name} is missing")
    if card["kind"] not in KINDS:
        raise ValueError(f"{path}: kind is {card['kind']!r}; it must be one of {', '.join(KINDS)}")
    return card


def _config_to_dict(config) -> dict:
    decoders = {name: decoder_to_dict(getattr(config, name)) for name in _decoder_fields(type(config))}
    return dataclasses.asdict(config) | decoders


def _config_from_dict(config_type, fields: dict):
    return config_type(**fields | {name: decoder_from_dict(fields[name]) for name in _decoder_fields(config_type)})


def _decoder_fields(config_type) -> list[str]:
    return [field.name for field in dataclasses.fields(config_type) if field.type is DecoderConfig]
