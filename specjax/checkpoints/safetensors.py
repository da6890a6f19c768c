"""Models in folders with config.json and safetensors, as transformers saves them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from specjax.checkpoints import fuse
from specjax.checkpoints.folder_config import Family
from specjax.checkpoints.tokenizer import Tokenizer
from specjax.checkpoints.tokenizer_files import read_json
from specjax.models.config import DecoderConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F32", "F16", "BF16", "F64")


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
            placed = _placed(self.folder / INDEX)
            files = indexed_files(self.folder / INDEX)
            for name in files:
                if not (self.folder / name).is_file():
                    raise ValueError(f"{self.folder / INDEX}: weight_map names {name!r}, which is not a file in this folder")
        else:
            raise ValueError(f"{self.folder}: there is neither {weights} nor {INDEX}")
        self._files: dict[str, Path] = {}
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
                self._files[tensor] = path
                self._shapes[tensor] = tuple(part.get_shape())
                self._kinds[tensor] = part.get_dtype()

    @property
    def where(self) -> str:
        """What messages call this source."""
        return str(self.folder)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor name to shape."""
        return self._shapes

    def kinds(self) -> set[str]:
        """The types of the tensors, as the format calls them."""
        return set(self._kinds.values())

    def check_readable(self, name: str) -> None:
        """Raises a ValueError if a tensor is not of a floating-point type."""
        if self._kinds[name] not in FLOATS:
            raise ValueError(f"{self.where}: tensor {name!r} has type {self._kinds[name]}; supported: {', '.join(FLOATS)}")

    def read(self, name: str, dtype) -> np.ndarray:
        """A tensor in ``dtype``, rounded once."""
        # A file is opened for each tensor: what was read of it is mapped until it is closed, in the end all of it.
        with safetensors.safe_open(self._files[name], framework="numpy") as opened:
            values = np.asarray(opened.get_tensor(name))
        # Overflow to infinity in a narrow dtype is reported by the caller, by name.
        with np.errstate(over="ignore"):
            return values.astype(dtype, copy=False)


def indexed_files(path: Path) -> list[str]:
    """The files that an index names, whether they are there or not.

    Raises:
      ValueError: the index is damaged, or names something that is not a file name.
    """
    files = sorted(set(map(str, _placed(path).values())))
    for name in files:
        if Path(name).name != name:
            raise ValueError(f"{path}: weight_map names {name!r}, which is not a file in this folder")
    return files


def _placed(path: Path) -> dict[str, Any]:
    """Tensor to file."""
    placed = read_json(path).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{path}: weight_map is missing or empty")
    return placed


def load_safetensors_params(
    reader: SafetensorsFolder, config: DecoderConfig, family: Family, dtype, shardings=None
) -> tuple[DecoderConfig, dict]:
    """The parameters of a folder, and the configuration they are for; see :func:`specjax.checkpoints.fuse.load_params`.

    A folder that calls its output matrix tied and has one all the same is loaded with the matrix that it has: tied where it
    is the embedding, untied where it differs.
    """
    names, shapes = family.names, reader.shapes()
    # Old checkpoints carry the rotary frequencies, which follow from the configuration.
    unneeded = [name for name in shapes if name.endswith("self_attn.rotary_emb.inv_freq")]
    if config.tied_embedding and names.unembedding in shapes:
        if _equal(reader, names.embedding, names.unembedding):
            unneeded.append(names.unembedding)
        else:
            config = dataclasses.replace(config, tied_embedding=False)
    options = {"norm_offset": family.norm_offset, "unneeded": unneeded, "shardings": shardings}
    return config, fuse.load_params(config, reader, names, dtype, **options)


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
