"""Where a round's arrays are: all on one device, or spread over a mesh (``specjax.parallel``).

A round is written once, for the rows that a device has. At the few places where devices must work together it asks its layout,
a static part of the program::

    propose, pass through the target     the device's rows; the layout's ``target`` may hold a share of the heads
    unembed                              logits of whole vocabularies, of the rows that the device judges
    judged                               the rows of other arrays that go with them
    verdict                              of all the device's rows again
    anywhere, everywhere, in_total       decisions that all devices must take alike, since they meet behind them
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from specjax.models.base import ModelFunctions


class Place(enum.Enum):
    """What an argument or result of a compiled program is, which says where it is."""

    PARAMS = "params"
    """:class:`specjax.decoding.state.Parameters`."""
    STATE = "state"
    """:class:`specjax.decoding.state.DecodingState`."""
    INFO = "info"
    """:class:`specjax.decoding.state.DispatchInfo`."""
    ROWS = "rows"
    """Arrays whose first axis is the rows of the batch."""
    SAME = "same"
    """Arrays that every device has the whole of."""


@dataclasses.dataclass(frozen=True)
class Share:
    """What one of the devices has and does, for planning its memory.

    Attributes:
      program: the round as this device runs it, were it alone: for shapes, not to be run.
      params: shapes of its parameters.
      parts: parts that the rows of the batch are split into.
      judges: devices that share the judging of one part's rows.
      devices: all devices; None: the default one.
      held: bytes of the parameters that are where they are to be already; None: all.
    """

    program: Any
    params: Any
    parts: int = 1
    judges: int = 1
    devices: tuple[jax.Device, ...] | None = None
    held: int | None = None


class Layout(Protocol):
    """What a round asks where devices must work together. Hashable: a static part of the compiled round.

    B is the number of rows that a device has; J of them it judges, which is all of them unless devices share the work.
    """

    def spread(self, program, function: Callable, inputs: tuple[Place, ...], outputs: Place | tuple[Place, ...]) -> Callable:
        """``function`` of arrays of the whole batch, run by every device on its part; to be called while tracing."""
        ...

    def share(self, program, params) -> Share:
        """What one device has of ``program`` and ``params``."""
        ...

    def own_places(self, rows: jax.Array, num_rows: int) -> jax.Array:
        """Indices of the device's own rows for ``rows``, indices in the batch; those of others become B, ``num_rows``."""
        ...

    def unembed(self, target: ModelFunctions, params: Any, hidden: jax.Array) -> jax.Array:
        """Logits [J, T, V] of the judged rows of ``hidden`` [B, T, E]."""
        ...

    def judged(self, values: Any) -> Any:
        """The judged rows [J, ...] of arrays [B, ...]."""
        ...

    def verdict(self, values: Any, batch: int) -> Any:
        """Arrays [B, ...] of those of the judged rows [J, ...], ``batch`` being B."""
        ...

    def all_rows(self, values: Any) -> Any:
        """Arrays of the whole batch of those of a device's rows [B, ...], the same on every device."""
        ...

    def anywhere(self, flags: jax.Array) -> jax.Array:
        """Whether each of ``flags`` holds on some device."""
        ...

    def everywhere(self, flags: jax.Array) -> jax.Array:
        """Whether each of ``flags`` holds on all devices."""
        ...

    def in_total(self, number: jax.Array) -> jax.Array:
        """``number`` added up over the devices' rows."""
        ...


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """Everything is on one device: nothing to do."""

    def spread(self, program, function, inputs, outputs):
        """See :class:`Layout`."""
        del program, inputs, outputs
        return function

    def share(self, program, params):
        """See :class:`Layout`."""
        return Share(program, params)

    def own_places(self, rows, num_rows):
        """See :class:`Layout`."""
        del num_rows
        return rows

    def unembed(self, target, params, hidden):
        """See :class:`Layout`."""
        return target.unembed(params, hidden)

    def judged(self, values):
        """See :class:`Layout`."""
        return values

    def verdict(self, values, batch):
        """See :class:`Layout`."""
        del batch
        return values

    def all_rows(self, values):
        """See :class:`Layout`."""
        return values

    def anywhere(self, flags):
        """See :class:`Layout`."""
        return flags

    def everywhere(self, flags):
        """See :class:`Layout`."""
        return flags

    def in_total(self, number):
        """See :class:`Layout`."""
        return number


ONE_DEVICE = OneDevice()


def any_row(layout: Layout, flags: jax.Array) -> jax.Array:
    """Whether some row of the whole batch has its flag set."""
    return layout.anywhere(jnp.any(flags))
