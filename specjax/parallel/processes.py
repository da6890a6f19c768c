"""Several processes, one on each host, that run one engine together through JAX's distributed runtime.

Every process runs the same program, and what it decides must be decided alike everywhere: devices meet in collectives, and a
process that goes another way leaves the others waiting. So whatever only one process knows (a file, a clock, a random number, a
key that was pressed) goes through one of the few functions here before anything depends on it::

    process 0      reads, measures, draws    --broadcast, share, on_first-->    all processes know the same
    each process   asks its devices, its user      --least, agreed-->           all processes decide the same

With one process all of them cost nothing.
"""

import atexit
import contextlib
import dataclasses
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

HEARTBEAT_SECONDS = 60
"""A process that was not heard of for so long is dead, and ends the others. JAX's own limit is 100."""

LINGER_SECONDS = 5.0
"""Process 0 holds what the others are connected to; after an error it stays so long that they can tell theirs."""

CALLS_BETWEEN = 16
"""Calls of a question (once a step) between two that are put to all processes: each costs a small message."""

SMALLEST_MESSAGE = 1024
"""Bytes; larger ones are filled up to a power of two, so that few programs send them."""

_OTHERS_LOST = re.compile(r"gloo|coordination|heartbeat|UNAVAILABLE|DEADLINE_EXCEEDED|connection (?:closed|reset)", re.IGNORECASE)


class ProcessError(RuntimeError):
    """Processes that cannot go on together; the message says what to do."""


@contextlib.contextmanager
def joined(**arguments) -> Iterator[None]:
    """Within the ``with`` block this process is one of several; to be entered before anything is computed.

    All leave the block together. A process that leaves it with an exception does not wait for the others, and ends them: those
    that stand in a collective at once, others after ``HEARTBEAT_SECONDS``.

    Args:
      **arguments: of ``jax.distributed.initialize``: ``coordinator_address``, ``num_processes``, ``process_id``; none where JAX
        finds them itself (TPU, Slurm, Open MPI, Kubernetes).

    Raises:
      ProcessError: the others cannot be reached, or one of them has ended.
    """
    index, who = arguments.get("process_id"), "this process"
    # JAX would swallow SIGTERM to tell a program that it is to be preempted; whoever runs the job sees to that signal.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_SECONDS, **arguments)
        index = jax.process_index()
        who = f"process {index} of {jax.process_count()}"
        yield
        jax.distributed.shutdown()
    except BaseException as error:
        if arguments.get("num_processes") != 1:
            # Otherwise JAX would wait for the others at the end, and they for this process.
            atexit.register(_leave, index)
        if isinstance(error, Exception) and not isinstance(error, ProcessError) and _OTHERS_LOST.search(str(error)):
            reason = str(error).strip().splitlines()[0]
            raise ProcessError(
                f"{who} has lost another one, which has ended or cannot be reached ({reason:.300}). The same command on "
                "all hosts goes on"
            ) from error
        raise


def _leave(index: int | None) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if index == 0:
        time.sleep(LINGER_SECONDS)
    os._exit(1)


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes whose devices a mesh has.

    All methods are to be called by all of them, in the same order.

    Attributes:
      index: which of them this one is.
      count: how many they are.

    Example:
      >>> ALONE.broadcast({"seed": 3}), ALONE.least(7), list(ALONE.share([1, 2, 3], block=2))
      ({'seed': 3}, 7, [1, 2, 3])
    """

    index: int = 0
    count: int = 1

    @classmethod
    def of(cls, mesh: Mesh | None) -> "Processes":
        """Those of a mesh: this one alone, or all that JAX has joined.

        Raises:
          ValueError: some processes have devices of the mesh, and some have none.
        """
        if mesh is None or _having(mesh) == {jax.process_index()}:
            return ALONE
        return cls.all_of(mesh)

    @classmethod
    def all_of(cls, mesh: Mesh) -> "Processes":
        """All processes that JAX has joined.

        Raises:
          ValueError: one of them has no device of the mesh.
        """
        count, having = jax.process_count(), _having(mesh)
        if len(having) < count:
            sizes = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
            raise ValueError(
                f"mesh {sizes} has {mesh.size} devices, which are those of {len(having)} of the {count} processes; each must "
                f"have some: all processes together have {jax.device_count()} devices"
            )
        return ALONE if count == 1 else cls(jax.process_index(), count)

    @property
    def first(self) -> bool:
        """Whether this is the process that reads and writes files for all."""
        return self.index == 0

    def broadcast(self, value: Any) -> Any:
        """Process 0's value (JSON) on all processes; theirs are not looked at."""
        if self.count == 1:
            return value
        data = json.dumps(value).encode() if self.first else b""
        (length,) = multihost_utils.broadcast_one_to_all(np.array([len(data)], np.int32)).tolist()
        padded = np.zeros(max(SMALLEST_MESSAGE, 1 << (length - 1).bit_length()), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        told = np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)
        return json.loads(told[:length].tobytes())

    def on_first(self, make: Callable[[], Any], describe: Callable[[Any], Any] = lambda made: made) -> tuple[Any, Any]:
        """What ``make`` gives on process 0 (None on the others) and, on all, ``describe`` (JSON) of it.

        Raises:
          ProcessError: ``make`` raised an OSError, ValueError or RuntimeError; process 0 raises that itself.
        """
        if self.count == 1:
            made = make()
            return made, describe(made)
        made, told = None, None
        if self.first:
            try:
                made = make()
                told = ["made", describe(made)]
            except (OSError, ValueError, RuntimeError) as error:
                self.broadcast(["failed", str(error)])
                raise
        outcome, told = self.broadcast(told)
        if outcome == "failed":
            raise ProcessError(f"process 0 failed: {told}")
        return made, told

    def share(self, items: Iterable[Any], block: int) -> Iterator[Any]:
        """Yields process 0's items (JSON) on all processes; it tells the others ``block`` of them at a time."""
        if self.count == 1:
            yield from items
            return
        items = iter(items)
        while True:
            told = self.broadcast(list(itertools.islice(items, block)))
            yield from told
            if len(told) < block:
                return

    def least(self, number: int) -> int:
        """The smallest of the processes' numbers, from 0 to 2**62."""
        if self.count == 1:
            return number
        # Arrays on devices have 32 bits.
        words = multihost_utils.process_allgather(np.array(divmod(number, 1 << 31), np.int32))
        high, low = min(map(tuple, words.tolist()))
        return (high << 31) + low

    def any(self, flag: bool) -> bool:
        """Whether it is so on any process."""
        return bool(flag) if self.count == 1 else self.least(int(not flag)) == 0

    def agreed(self, ask: Callable[[], bool]) -> Callable[[], bool]:
        """``ask``, answered alike everywhere: yes if any process says so. Only some calls ask; the others answer no."""
        if self.count == 1:
            return ask
        calls = itertools.count()
        return lambda: next(calls) % CALLS_BETWEEN == 0 and self.any(ask())

    def check_same(self, what: dict[str, Any]) -> None:
        """Raises ProcessError on all processes if one was started otherwise than process 0.

        Args:
          what: JSON values by name.
        """
        theirs = self.broadcast(what)
        here = json.loads(json.dumps(what))
        different = [name for name in sorted(theirs.keys() | here.keys()) if theirs.get(name) != here.get(name)]
        if not self.any(bool(different)):
            return
        if not different:
            raise ProcessError("another process was started with another command than this one; it says what differs")
        name = different[0]
        raise ProcessError(
            f"process {self.index} was started with another command than process 0: its {name} is {here.get(name)!r}, that of "
            f"process 0 is {theirs.get(name)!r}"
        )


ALONE = Processes()
"""One process."""


def _having(mesh: Mesh) -> set[int]:
    return {device.process_index for device in mesh.devices.flat}


def put(values: Any, sharding: NamedSharding) -> jax.Array:
    """An array (NumPy's or JAX's, the same on all processes) where ``sharding`` has it, of which each process gives its share."""
    if sharding.is_fully_addressable or (isinstance(values, jax.Array) and not values.is_fully_addressable):
        return jax.device_put(values, sharding)
    # To put it would have all processes compare the whole of it first.
    return jax.make_array_from_callback(np.shape(values), sharding, np.asarray(values).__getitem__)
