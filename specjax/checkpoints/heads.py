"""Trained heads and draft models on disk: a folder with a card (JSON) and the parameters (Orbax). Nothing is ever unpickled."""

import dataclasses
import hashlib
import json
import shutil
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from specjax.checkpoints.shipped import shipped_folder
from specjax.models.config import DecoderConfig, ExpertsConfig, RopeConfig, RopeScaling
from specjax.models.trained_head import KINDS, TargetMark, TrainedHead
from specjax.tree import DraftTree

CARD = "card.json"
PARAMS = "params"
FORMAT = 1
"""Of the card; another number is another version's."""

ROPES = ("rope", "local_rope")
_SCALINGS = {kind.__name__: kind for kind in typing.get_args(RopeScaling)}


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
    tree = {"head": head.params_in(dtype)}
    if head.ids is not None:
        tree["ids"] = jnp.asarray(head.ids, jnp.int32)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(unfinished / PARAMS, tree)
    # It names the folder that it was written in, and nobody reads it on a file system.
    (unfinished / PARAMS / "commit_success.txt").unlink(missing_ok=True)
    card = {
        "format": FORMAT,
        "kind": head.kind,
        "dtype": jnp.dtype(dtype).name,
        "config": _config_to_dict(head.functions.config),
        "target": dataclasses.asdict(head.target),
        "feature_layers": list(head.feature_layers),
        "tree": None if head.tree is None else list(head.tree.parents),
        "facts": head.facts,
        "files": file_hashes(unfinished / PARAMS),
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
        target = TargetMark(**(card["target"] | {"sample": tuple(card["target"]["sample"])}))
        tree = None if card["tree"] is None else DraftTree(tuple(card["tree"]))
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{folder / CARD}: {error}") from error
    wanted = {"head": functions.abstract_params(dtype)}
    size = functions.config.draft_vocab_size
    if size is not None:
        wanted["ids"] = jax.ShapeDtypeStruct((size,), jnp.int32)
    check_files(folder / PARAMS, card["files"])
    params = _restore(folder / PARAMS, wanted)
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


def heads_of(target: str) -> list[TrainedHead]:
    """All heads that come with the library for the model called ``target``."""
    return [load_head(folder) for folder in shipped_heads().values() if read_card(folder)["target"]["name"] == target]


def find_head(kind: str, target: str) -> TrainedHead:
    """The head of a kind ("medusa", "eagle" or "draft") that comes with the library for the model called ``target``.

    Raises:
      ValueError: there is none.

    Example:
      >>> find_head("medusa", "no-such-model")
      Traceback (most recent call last):
      ValueError: no medusa head for 'no-such-model' comes with specjax...
    """
    for folder in shipped_heads().values():
        card = read_card(folder)
        if card["kind"] == kind and card["target"]["name"] == target:
            return load_head(folder)
    raise ValueError(f"no {kind} head for {target!r} comes with specjax; train one (scripts/train_{kind}.py) and name its folder")


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


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in a folder, hexadecimal, by its path from there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def check_files(folder: Path, wanted: dict[str, str]) -> None:
    """Raises ValueError unless the files of a folder are those that the card names.

    Orbax finds most damage too, but not all, and it leaves its other readers running when one of them fails.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: the parameters are missing")
    found = file_hashes(folder)
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            raise ValueError(f"{folder / name}: the file is missing")
        if name not in wanted:
            raise ValueError(f"{folder / name}: the card knows no such file")
        if found[name] != wanted[name]:
            raise ValueError(f"{folder / name}: damaged or cut short: its SHA-256 is {found[name]}; the card says {wanted[name]}")


def _restore(path: Path, wanted):
    """The arrays of a checkpoint, which must be exactly those that are wanted: Orbax itself would cast and cut them."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    sharded = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), wanted)
    with ocp.StandardCheckpointer(multiprocessing_options=_alone()) as checkpointer:
        check_arrays(path, wanted, checkpointer.metadata(path).item_metadata.tree)
        return checkpointer.restore(path, sharded)


def _alone() -> ocp.options.MultiprocessingOptions:
    """Each of several processes reads its own files, and waits for no other."""
    index = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"process {index}"
    )


def check_arrays(path: Path, wanted, found) -> None:
    """Raises ValueError unless the metadata ``found`` has the names, shapes and dtypes of ``wanted``."""
    wanted = {jax.tree_util.keystr(key, simple=True, separator="."): leaf for key, leaf in jax.tree.leaves_with_path(wanted)}
    found = {jax.tree_util.keystr(key, simple=True, separator="."): leaf for key, leaf in jax.tree.leaves_with_path(found)}
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            raise ValueError(f"{path}: the array {name} is missing")
        if name not in wanted:
            raise ValueError(f"{path}: the array {name} belongs to no part of the head")
        want, have = wanted[name], found[name]
        if tuple(want.shape) != tuple(have.shape) or want.dtype != have.dtype:
            raise ValueError(f"{path}: {name} is {have.dtype}{list(have.shape)}; the card says {want.dtype}{list(want.shape)}")


def _config_to_dict(config) -> dict:
    fields = dataclasses.asdict(config)
    for name in _decoder_fields(type(config)):
        for rope in ROPES:
            scaling = getattr(getattr(getattr(config, name), rope), "scaling", None)
            if scaling is not None:
                fields[name][rope]["scaling"] = {"kind": type(scaling).__name__, **dataclasses.asdict(scaling)}
    return fields


def _config_from_dict(config_type, fields: dict):
    return config_type(**fields | {name: _decoder_config(fields[name]) for name in _decoder_fields(config_type)})


def _decoder_fields(config_type) -> list[str]:
    return [field.name for field in dataclasses.fields(config_type) if field.type is DecoderConfig]


def _decoder_config(fields: dict) -> DecoderConfig:
    """A card may be older than some options, which then have their defaults."""
    ropes = {name: _rope_config(fields[name]) for name in ROPES if fields.get(name) is not None}
    experts = {"experts": ExpertsConfig(**fields["experts"])} if fields.get("experts") is not None else {}
    return DecoderConfig(**fields | ropes | experts)


def _rope_config(fields: dict) -> RopeConfig:
    scaling = fields["scaling"]
    if scaling is not None:
        scaling = {name: tuple(value) if isinstance(value, list) else value for name, value in scaling.items()}
        scaling = _SCALINGS[scaling.pop("kind")](**scaling)
    return RopeConfig(**fields | {"scaling": scaling})
