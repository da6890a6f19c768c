"""Arrays in a folder, written and read by Orbax, with a SHA-256 for every file. Nothing is ever unpickled."""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

import jax
import orbax.checkpoint as ocp


def save_arrays(folder: Path, tree) -> dict[str, str]:
    """Writes a tree of arrays into a new folder.

    Returns:
      The files' hashes, for :func:`load_arrays`.
    """
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)
    # It names the folder that it was written in, and nobody reads it on a file system.
    (folder / "commit_success.txt").unlink(missing_ok=True)
    return file_hashes(folder)


def load_arrays(folder: Path, wanted, files: Mapping[str, str], shardings=None):
    """The arrays of a folder, which must be exactly those that are wanted: Orbax itself would cast and cut them.

    Args:
      folder: where :func:`save_arrays` wrote them.
      wanted: tree with shape and dtype of each.
      files: the hashes.
      shardings: the same tree with where each goes; only the parts that this process needs are read. None: one local device.

    Raises:
      ValueError: a file is missing, too many or damaged, or the arrays are others; names it.
    """
    check_files(folder, files)
    if shardings is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda leaf: device, wanted)
    together = not all(to.is_fully_addressable for to in jax.tree.leaves(shardings))
    options = {} if together else {"multiprocessing_options": _alone()}
    with ocp.StandardCheckpointer(**options) as checkpointer:
        found = checkpointer.metadata(folder).item_metadata.tree
        check_arrays(folder, wanted, found)
        written = {_name(key): tuple(leaf.shape) for key, leaf in jax.tree.leaves_with_path(found)}

        def as_written(key, leaf, to):
            return jax.ShapeDtypeStruct(written[_name(key)], leaf.dtype, sharding=to)

        arrays = checkpointer.restore(folder, jax.tree.map_with_path(as_written, wanted, shardings))
    return jax.tree.map(lambda leaf, array, to: _joined(array, leaf.shape, to), wanted, arrays, shardings)


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in a folder, hexadecimal, by its path from there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): file_hash(path) for path in files}


def check_file(path: Path, wanted: str) -> None:
    """Raises ValueError unless a file is the one with this hash."""
    if not path.is_file():
        raise ValueError(f"{path}: the file is missing")
    found = file_hash(path)
    if found != wanted:
        raise ValueError(f"{path}: damaged or cut short: its SHA-256 is {found}; the card says {wanted}")


def check_files(folder: Path, wanted: Mapping[str, str]) -> None:
    """Raises ValueError unless the files of a folder are those that the card names.

    Orbax finds most damage too, but not all, and it leaves its other readers running when one of them fails.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: the parameters are missing")
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    for name in sorted(wanted.keys() | found):
        if name not in wanted:
            raise ValueError(f"{folder / name}: the card knows no such file")
        check_file(folder / name, wanted[name])


def check_arrays(path: Path, wanted, found) -> None:
    """Raises ValueError unless the metadata ``found`` has the names, shapes and dtypes of ``wanted``.

    A last axis may have been written as several: folders of earlier versions have the inputs of some matrices so.
    """
    wanted = {_name(key): leaf for key, leaf in jax.tree.leaves_with_path(wanted)}
    found = {_name(key): leaf for key, leaf in jax.tree.leaves_with_path(found)}
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            raise ValueError(f"{path}: the array {name} is missing")
        if name not in wanted:
            raise ValueError(f"{path}: the array {name} belongs to no part of what the card describes")
        want, have = wanted[name], found[name]
        if not _same_rows(tuple(want.shape), tuple(have.shape)) or want.dtype != have.dtype:
            raise ValueError(f"{path}: {name} is {have.dtype}{list(have.shape)}; the card says {want.dtype}{list(want.shape)}")


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _same_rows(want: tuple[int, ...], have: tuple[int, ...]) -> bool:
    """Whether shapes are the same, or would be if the last axes of ``have`` were one."""
    last = len(want) - 1
    return want == have or (0 <= last < len(have) - 1 and want == (*have[:last], math.prod(have[last:])))


def _joined(array: jax.Array, shape: tuple[int, ...], to) -> jax.Array:
    """``array`` in the ``shape``, on each device the part that it has."""
    return array if array.shape == shape else jax.jit(lambda array: array.reshape(shape), out_shardings=to)(array)


def _alone() -> ocp.options.MultiprocessingOptions:
    """Each of several processes reads its own files, and waits for no other."""
    index = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"process {index}"
    )
