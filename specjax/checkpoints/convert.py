"""From any source to a folder of this library's own."""

import dataclasses
from pathlib import Path

import jax

from specjax.checkpoints import model_folder
from specjax.checkpoints.load import dtype_name, find_source, load_model
from specjax.checkpoints.safetensors import INDEX, WEIGHTS, SafetensorsFolder

HALVES = {"BF16": "bfloat16", "F16": "float16"}


def convert(
    source: str | Path,
    folder: str | Path,
    dtype: str | None = None,
    revision: str | None = None,
    subfolder: str = "",
    scan_layers: bool | None = None,
) -> Path:
    """Writes a model as a folder that :func:`specjax.load_model` reads: as it runs, its parameters in Orbax.

    Args:
      source: as of :func:`specjax.load_model`.
      folder: must not exist; it is complete or not there.
      dtype: of the parameters in it; None: the narrowest that keeps what the source has, float32 for GGUF files.
      revision: as of :func:`specjax.load_model`.
      subfolder: as of :func:`specjax.load_model`.
      scan_layers: as of :func:`specjax.load_model`.

    Returns:
      The folder's path.

    Raises:
      ValueError: the folder exists, or as of :func:`specjax.load_model`.
      DownloadError: as of :func:`specjax.load_model`.

    Example:
      >>> convert("no-such-model", "no-such-folder")
      Traceback (most recent call last):
      ValueError: no model is called 'no-such-model'...
    """
    model_folder.check_new(folder)
    if dtype is not None:
        dtype = dtype_name(dtype)
    path, name, _ = find_source(source, revision, subfolder)
    # Nothing runs: the host's memory is the larger one.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        model = load_model(path, dtype=dtype or _own_dtype(path), scan_layers=scan_layers)
        return model_folder.save_model(dataclasses.replace(model, name=name), folder)


def _own_dtype(path: Path) -> str:
    """The narrowest dtype that keeps what a source has."""
    if (path / model_folder.CARD).exists():
        return model_folder.read_card(path)["dtype"]
    if (path / WEIGHTS).exists() or (path / INDEX).exists():
        kinds = SafetensorsFolder(path).kinds()
        if len(kinds) == 1:
            return HALVES.get(kinds.pop(), "float32")
    return "float32"
