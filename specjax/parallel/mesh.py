"""A mesh of devices with two axes: rows of the batch go over ``data``, heads, MLPs and vocabulary over ``model``."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

DATA = "data"
"""Axis of the rows."""
MODEL = "model"
"""Axis of what is split within a model."""
AXES = (DATA, MODEL)
"""Both, in the order of the mesh: devices that share a model are next to one another."""
# Any, since they stand where a pytree of the values has arrays, and its hints say so.
ROWS: Any = PartitionSpec(DATA)
"""Of arrays whose first axis is the rows of the batch."""
EVERYWHERE: Any = PartitionSpec()
"""Of arrays that every device has the whole of."""


class MeshSizes(NamedTuple):
    """How many devices each axis has.

    Attributes:
      data: parts of the batch.
      model: devices that share one copy of the weights.
    """

    data: int = 1
    model: int = 1

    def __str__(self) -> str:
        """As :func:`parse_mesh` reads it."""
        return f"{DATA}={self.data},{MODEL}={self.model}"


def parse_mesh(text: str) -> MeshSizes:
    """Sizes of a mesh as people write them; an axis that is not named has one device.

    Raises:
      ValueError: says what is wrong, and what would be right.

    Example:
      >>> parse_mesh("data=4,model=2")
      MeshSizes(data=4, model=2)
      >>> parse_mesh("model=8").data
      1
    """
    right = "it must be like data=4,model=2, with whole numbers of at least 1"
    if not isinstance(text, str):
        raise ValueError(f"mesh is {text!r}; {right}")
    sizes = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ValueError(f"mesh is {text!r}; {right}")
        if name not in AXES:
            raise ValueError(f"mesh is {text!r}: there is no axis {name!r}, the axes are {DATA} and {MODEL}")
        if name in sizes:
            raise ValueError(f"mesh is {text!r}: {name} is there twice")
        if not size.isascii() or not size.isdigit() or int(size) < 1:
            raise ValueError(f"mesh is {text!r}: {name} is {size!r}; {right}")
        sizes[name] = int(size)
    return MeshSizes(**sizes)


def make_mesh(data: int = 1, model: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of ``data`` times ``model`` devices, laid out so that those which share a model are close to one another.

    Args:
      data: parts of the batch.
      model: devices that share one copy of the weights.
      devices: those to take, the first so many; None: those that JAX has.

    Raises:
      ValueError: a size below 1, or fewer devices than that.

    Example:
      >>> dict(make_mesh(data=1, model=1).shape)
      {'data': 1, 'model': 1}
    """
    for name, size in ((DATA, data), (MODEL, model)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"make_mesh: {name} is {size!r}; it must be a whole number of at least 1")
    devices = list(jax.devices() if devices is None else devices)
    needed = data * model
    if needed > len(devices):
        there = f"there {'is' if len(devices) == 1 else 'are'} {len(devices)}"
        raise ValueError(f"make_mesh: a mesh of data={data},model={model} takes {needed} devices; {there}")
    # The rounds say themselves what happens between devices: nothing is left for the compiler to infer.
    return jax.make_mesh((data, model), AXES, axis_types=(AxisType.Auto, AxisType.Auto), devices=devices[:needed])


def as_mesh(mesh: Mesh | str | None) -> Mesh | None:
    """A mesh of what a user passed: a mesh of our axes, or its sizes as text.

    Raises:
      ValueError: it is neither.
    """
    if mesh is None:
        return None
    if isinstance(mesh, str):
        return make_mesh(*parse_mesh(mesh))
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh is {mesh!r:.200}; it must be made by specjax.parallel.make_mesh, or be text like data=4,model=2")
    if mesh.axis_names != AXES:
        raise ValueError(f"mesh has the axes {mesh.axis_names}; they must be {AXES} (see specjax.parallel.make_mesh)")
    return mesh


def sizes_of(mesh: Mesh) -> MeshSizes:
    """The sizes of a mesh.

    Example:
      >>> str(sizes_of(make_mesh()))
      'data=1,model=1'
    """
    return MeshSizes(mesh.shape[DATA], mesh.shape[MODEL])
