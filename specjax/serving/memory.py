"""How much memory an engine needs, told before anything is allocated."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.round import Round
from specjax.decoding.state import Parameters
from specjax.parallel import ALONE, Processes
from specjax.serving.device import empty_state
from specjax.serving.requests import Room

MEMINFO = Path("/proc/meminfo")

AUTO_SLOTS = {"cpu": 16}
"""The most slots that "auto" takes, by platform; ``MOST_SLOTS`` on others."""
MOST_SLOTS = 128

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
      devices: on a mesh, how many there are; all bytes are those of one, and the slots those of all.
    """

    slots: int
    capacity: int
    weights: int
    caches: int
    rows: int
    block: int
    scratch: int
    available: int | None
    devices: int = 1

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
        each = "" if self.devices == 1 else f" on each of {self.devices} devices"
        return f"{self.slots} slots of {self.capacity} tokens: {megabytes(self.total)}{there}{each} ({parts})"


def megabytes(number: int) -> str:
    """Bytes as people read them.

    Example:
      >>> megabytes(1_500_000), megabytes(20_000_000_000)
      ('1.5 MB', '20.0 GB')
    """
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def plan_memory(program: Round, params: Parameters, slots: int, room: Room, limit: int | None, free: int = 0) -> MemoryPlan:
    """The plan for so many slots. Nothing is computed on a device.

    Args:
      program: the round.
      params: of target and drafter.
      slots: B, on a mesh those of all its parts; the plan is that of one device.
      room: of a slot.
      limit: bytes that may be used, the weights included; None: what parameters that are in place take, and ``free``.
      free: bytes that a device has left.
    """
    share = program.layout.share(program, params)
    program, params, rows = share.program, share.params, slots // share.parts
    weights = size_of(list({id(leaf): leaf for leaf in jax.tree.leaves(params)}.values()))
    state = jax.eval_shape(lambda params: empty_state(program, params, rows, room.entries, room.stop_ids, room.biases), params)
    caches = size_of((state.cache, state.drafter))
    tree = program.drafter.tree

    def verify(params, cache):
        tokens = jnp.zeros((rows, tree.size), jnp.int32)
        return program.target.apply(params, tokens, tokens, cache, jnp.ones((tree.size, tree.size), bool))

    output = jax.eval_shape(verify, params.target, state.cache)
    judged = rows if rows % share.judges else rows // share.judges
    logits = judged * tree.size * program.logits_width * jnp.dtype(program.logits_dtype).itemsize
    return MemoryPlan(
        slots=slots,
        capacity=room.capacity,
        weights=weights,
        caches=caches,
        rows=size_of(state) - caches,
        block=size_of(output.block),
        # Attention copies one layer's keys and values on some backends.
        scratch=SCRATCH_COPIES * logits + 8 * size_of((output.hidden, output.features)) + 2 * _largest_leaf(state.cache),
        available=limit if limit is not None else (weights if share.held is None else share.held) + free,
        devices=1 if share.devices is None else len(share.devices),
    )


def _largest_leaf(tree) -> int:
    return max(map(size_of, jax.tree.leaves(tree)))


def fit_slots(
    program: Round,
    params: Parameters,
    slots: int | str,
    room: Room,
    limit: int | None,
    parts: int = 1,
    processes: Processes = ALONE,
) -> MemoryPlan:
    """The plan for ``slots``, or for as many as fit.

    Args:
      program: the round.
      params: of target and drafter.
      slots: a multiple of ``parts``, or "auto".
      room: of a slot.
      limit: bytes that may be used, the weights included; None: what the devices say.
      parts: parts that a mesh splits the rows into.
      processes: those of the mesh: the one with the least memory decides for all.

    Raises:
      ValueError: they do not fit, and what would.
    """

    free = 0 if limit is not None else processes.least(free_memory(program.layout.share(program, params).devices))

    def plan(slots, room=room):
        return plan_memory(program, params, slots=slots, room=room, limit=limit, free=free)

    if slots == "auto":
        most = AUTO_SLOTS.get(jax.default_backend(), MOST_SLOTS)
        sizes = [parts << power for power in range(most.bit_length() - 1, -1, -1)]
        slots = next((size for size in sizes if plan(size).fits), parts)
    slots = check_whole("slots", slots, 1, 'or "auto"')
    if slots % parts:
        raise ValueError(f"Engine: slots is {slots}, and mesh has data={parts}: the slots must be a multiple of it")
    made = plan(slots)
    if made.fits:
        return made
    fewer = parts * _largest(slots // parts, lambda size: plan(size * parts).fits)
    shorter = _largest(room.capacity, lambda size: plan(slots, dataclasses.replace(room, capacity=size)).fits)
    ways = [f"{fewer} slots of {made.capacity} tokens"] if fewer >= 1 else []
    ways += [f"{slots} slots of {shorter} tokens"] if shorter >= 2 else []
    would = f"{' or '.join(ways)} would"
    if not ways:
        would = f"the weights take {megabytes(made.weights)} already, and not even one slot fits beside them"
    raise ValueError(f"Engine: {made} do not fit; {would}")


def check_whole(name: str, value, least: int, otherwise: str = "") -> int:
    """An engine's argument, if it is a whole number of at least ``least``; raises ValueError else."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        right = f"a whole number of at least {least} {otherwise}".strip()
        raise ValueError(f"Engine: {name} is {value!r}; it must be {right}")
    return value


def _largest(most: int, fits) -> int:
    """The largest number below ``most`` that fits, 0 if none does; what fits, fits with less too."""
    low, high = 0, most
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def size_of(tree) -> int:
    """Bytes of a pytree of arrays or their shapes."""
    return sum(int(np.prod(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def free_memory(devices: Sequence[jax.Device] | None = None) -> int:
    """Bytes that each of ``devices`` has left at least, the default device if None; on a CPU its share of what the system has."""
    devices = jax.local_devices()[:1] if devices is None else [d for d in devices if d.process_index == jax.process_index()]
    told = (device.memory_stats() if device.platform != "cpu" else None for device in devices)
    known = [stats for stats in told if stats]
    if len(known) == len(devices):
        return min(stats["bytes_limit"] - stats["bytes_in_use"] for stats in known)
    return _free_in_system() // len(devices)


def _free_in_system() -> int:
    # What Linux could give includes files that it keeps in memory meanwhile.
    if MEMINFO.exists():
        kilobytes = next(line.split()[1] for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable"))
        return int(kilobytes) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
