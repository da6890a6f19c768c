"""How much memory an engine needs, told before anything is allocated."""

import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.round import Round
from specjax.decoding.state import Parameters
from specjax.serving.device import empty_state
from specjax.serving.requests import Room

MEMINFO = Path("/proc/meminfo")

SCRATCH_COPIES = 4
"""Arrays of the size of a verify pass's logits that a round holds at once: logits, log-probabilities, and what rules make."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes that an engine needs.

    Attributes:
      slots: rows.
      capacity: tokens of a row.
      weights: of target and drafter; there before the engine is.
      caches: the target's key/value cache, and the drafter's state with its own.
      rows: tokens, settings and statistics of the rows.
      block: keys and values of one verify pass before they are committed.
      scratch: logits of a verify pass and what is made of them, attention scores, activations; an estimate.
      available: bytes for all of this, the weights included; None: not known.
    """

    slots: int
    capacity: int
    weights: int
    caches: int
    rows: int
    block: int
    scratch: int
    available: int | None

    @property
    def total(self) -> int:
        """All together."""
        return self.weights + self.caches + self.rows + self.block + self.scratch

    @property
    def fits(self) -> bool:
        """Whether there is so much; True where it is not known."""
        return self.available is None or self.total <= self.available

    def __str__(self) -> str:
        """One line for people."""
        parts = ", ".join(f"{name} {megabytes(getattr(self, name))}" for name in ("weights", "caches", "block", "scratch"))
        there = "" if self.available is None else f" of {megabytes(self.available)} available"
        return f"{self.slots} slots of {self.capacity} tokens: {megabytes(self.total)}{there} ({parts})"


def megabytes(number: int) -> str:
    """Bytes as people read them.

    Example:
      >>> megabytes(1_500_000), megabytes(20_000_000_000)
      ('1.5 MB', '20.0 GB')
    """
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def plan_memory(program: Round, params: Parameters, slots: int, room: Room, limit: int | None) -> MemoryPlan:
    """The plan for so many slots. Nothing is computed on a device.

    Args:
      program: the round.
      params: of target and drafter.
      slots: B.
      room: of a slot.
      limit: bytes that may be used, the weights included; None: what the device says.
    """
    weights = sum(leaf.nbytes for leaf in {id(leaf): leaf for leaf in jax.tree.leaves(params)}.values())
    state = jax.eval_shape(
        lambda params: empty_state(program, params, slots, room.capacity - 1, room.stop_ids, room.biases), params
    )
    caches = size_of((state.cache, state.drafter))
    tree = program.drafter.tree

    def verify(params, cache):
        tokens = jnp.zeros((slots, tree.size), jnp.int32)
        return program.target.apply(params, tokens, tokens, cache, jnp.ones((tree.size, tree.size), bool))

    output = jax.eval_shape(verify, params.target, state.cache)
    logits = slots * tree.size * program.logits_width * jnp.dtype(program.logits_dtype).itemsize
    return MemoryPlan(
        slots=slots,
        capacity=room.capacity,
        weights=weights,
        caches=caches,
        rows=size_of(state) - caches,
        block=size_of(output.block),
        # Attention copies one layer's keys and values on some backends.
        scratch=SCRATCH_COPIES * logits + 8 * size_of((output.hidden, output.features)) + 2 * _largest(state.cache),
        available=limit if limit is not None else weights + free_memory(),
    )


def _largest(tree) -> int:
    return max(map(size_of, jax.tree.leaves(tree)))


def size_of(tree) -> int:
    """Bytes of a pytree of arrays or their shapes."""
    return sum(int(np.prod(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def free_memory() -> int:
    """Bytes that the default device has left; on a CPU those that the system has."""
    device = jax.local_devices()[0]
    known = device.memory_stats() if device.platform != "cpu" else None
    if known:
        return known["bytes_limit"] - known["bytes_in_use"]
    # What Linux could give includes files that it keeps in memory meanwhile.
    if MEMINFO.exists():
        kilobytes = next(line.split()[1] for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable"))
        return int(kilobytes) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
