"""What an optimised TPU program does, read from the text of its HLO: bytes that go to and from memory, collectives, copies.

The compiler's own count of "bytes accessed" takes an update in place for a rewrite of the whole array, a prefetch for a second
read, and one turn of a loop for all. Here an instruction counts what it must read from and write to the chip's main memory (HBM):

* arrays in the on-chip memory (``S(1)`` in their layout) cost nothing, prefetches into it are reads;
* of an operand that is only sliced or gathered from the slices count, of an array that is updated in place the update;
* a prefetch that a program makes at its end for its next run is counted there alone;
* loops count as often as they run, conditions by the branch that the caller's ``Scenario`` takes.

Sizes are those in memory, tiles filled up.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator

ITEM_SIZES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4}
ITEM_SIZES |= {"f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8}

ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)(?::([^{}]*))?\})?")
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "ragged-all-to-all")
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "iota"}
FREE |= {"opt-barrier", "domain", "add-dependency", "copy-done", "slice-done", "async-done", "async-update"}
FREE |= {f"{name}-done" for name in COLLECTIVES}
MOVES = {"parameter", "constant", "bitcast", "copy", "transpose", "reshape", "convert", "slice", "dynamic-slice", "tuple", "pad"}
MOVES |= {"fusion", "broadcast", "concatenate", "get-tuple-element"}
PARTS = {"dynamic-slice", "gather", "slice"}
"""Instructions that read of their first operand no more than what they give."""


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction.

    Attributes:
      dtype: as HLO spells it.
      shape: sizes.
      order: numbers of the axes, the fastest running last.
      bytes: in memory.
      on_chip: whether it is in the on-chip memory.
    """

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]
    bytes: float
    on_chip: bool

    @property
    def hbm(self) -> float:
        """Bytes of it in the main memory."""
        return 0 if self.on_chip else self.bytes

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        """As HLO has it, without tiles."""
        layout = ",".join(map(str, reversed(self.order)))
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{{{layout}}}"


@functools.lru_cache(maxsize=100_000)
def arrays_of(text: str) -> tuple[Array, ...]:
    """The arrays of a type, one or a tuple of them.

    Example:
      >>> [(str(array), array.bytes, array.on_chip) for array in arrays_of("(bf16[3,128]{1,0:T(8,128)(2,1)S(1)}, s32[])")]
      [('bf16[3,128]{1,0}', 2048, True), ('s32[]{}', 4, False)]
    """
    found = []
    for dtype, shape, order, rest in ARRAY.findall(text):
        if dtype not in ITEM_SIZES and not dtype.startswith("f8"):
            continue
        sizes = tuple(map(int, filter(None, shape.split(","))))
        axes = tuple(map(int, filter(None, order.split(","))))[::-1] or tuple(range(len(sizes)))
        filled = [sizes[axis] for axis in axes]
        tile = re.match(r"T\(([\d,]+)\)", rest or "")
        sides = tuple(map(int, tile[1].split(","))) if tile else ()
        for place, side in zip(range(-len(sides), 0), sides, strict=True):
            if -place <= len(filled):
                filled[place] = -(-filled[place] // side) * side
        bytes = math.prod(filled) * ITEM_SIZES.get(dtype, 1)
        found.append(Array(dtype, sizes, axes, bytes, "S(1)" in (rest or "")))
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: its own.
      opcode: what it does.
      type: type of what it gives, as text.
      operands: names.
      called: names of computations: of a fusion its inside, of a loop body and condition, of a condition the branches.
      scope: where in our program it comes from.
      trips: turns of a loop that are known to the compiler.
      root: whether it is what the computation gives.
      before: whether it is a prefetch that the run before has made already, at its end, for this one.
    """

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    called: tuple[str, ...]
    scope: str
    trips: int | None
    root: bool
    before: bool

    @property
    def arrays(self) -> tuple[Array, ...]:
        """What it gives."""
        return arrays_of(self.type)


LINE = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$")
START = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$")
NAMES = re.compile(r"%([\w.\-]+)")


def _instruction(text: str) -> Instruction | None:
    line = LINE.match(text)
    if line is None:
        return None
    root, name, rest = bool(line[1]), line[2], line[3]
    # The type: a tuple in brackets that match, or everything up to the next blank.
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    type, rest = rest[:end], rest[end:].lstrip()
    start = rest.index("(")
    end = _closing(rest, start)
    opcode, inside, after = rest[:start], rest[start + 1 : end], rest[end + 1 :]
    called = []
    for attribute in ("calls", "body", "condition", "to_apply"):
        found = re.search(rf"\b{attribute}=%([\w.\-]+)", after)
        if found and (attribute != "to_apply" or opcode == "call"):
            called.append(found[1])
    branches = re.search(r"branch_computations=\{([^}]*)\}", after)
    if branches:
        called = NAMES.findall(branches[1])
    else:
        called += re.findall(r"(?:false|true)_computation=%([\w.\-]+)", after)[::-1]
    scope = re.search(r'op_name="([^"]*)"', after)
    trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', after)
    before = "cross_program_prefetch_index" in after
    operands = () if opcode in ("constant", "parameter") else tuple(NAMES.findall(inside))
    operands = (inside,) if opcode == "parameter" else operands
    return Instruction(
        name, opcode, type, operands, tuple(called), scope[1] if scope else "", int(trips[1]) if trips else None, root, before
    )


def _target_and_source(start: Instruction) -> tuple[Array, Array]:
    first, second = start.arrays[:2]
    return (first, second) if start.opcode == "copy-start" else (second, first)


def _closing(text: str, start: int) -> int:
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    raise ValueError(f"no closing bracket in {text[:80]!r}")


Branch = Callable[[Instruction], int | None]
Trips = Callable[[Instruction], float | None]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What of a program runs.

    Attributes:
      trips: from a loop to its turns; None: what the compiler knows, else one.
      branch: from a condition to the number of the branch that is taken; None: the one that costs most.
    """

    trips: Trips = lambda loop: None
    branch: Branch = lambda condition: None


@dataclasses.dataclass(frozen=True)
class Step:
    """An instruction as often as it runs.

    Attributes:
      instruction: it.
      times: turns of the loops around it.
      bytes: to and from memory, all times together.
    """

    instruction: Instruction
    times: float
    bytes: float


class Program:
    """The text of a compiled module, taken apart."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        inside: dict[str, Instruction] = {}
        for line in text.splitlines():
            start = START.match(line)
            if start:
                inside = self.computations.setdefault(start[2], {})
                self.entry = start[2] if start[1] else self.entry
            elif (instruction := _instruction(line)) is not None:
                inside[instruction.name] = instruction
        if not self.entry:
            raise ValueError(f"the text begins with {text[:60]!r}; it must be that of a compiled HLO module")
        self._costs: dict[tuple[str, Scenario], float] = {}

    # ---------------------------------------------------------------- bytes

    def bytes(self, scenario: Scenario = Scenario(), computation: str | None = None) -> float:
        """Bytes to and from memory."""
        key = (computation or self.entry, scenario)
        if key not in self._costs:
            self._costs[key] = sum(step.bytes for step in self.steps(scenario, computation))
        return self._costs[key]

    def steps(self, scenario: Scenario = Scenario(), computation: str | None = None, times: float = 1) -> Iterator[Step]:
        """Yields what runs, loops and branches taken apart."""
        name = computation or self.entry
        for instruction in self.computations[name].values():
            if instruction.opcode == "while":
                turns = scenario.trips(instruction)
                turns = (instruction.trips or 1) if turns is None else turns
                for called in instruction.called:
                    yield from self.steps(scenario, called, times * turns)
            elif instruction.opcode == "conditional":
                branch = scenario.branch(instruction)
                if branch is None:
                    branch = max(range(len(instruction.called)), key=lambda i: self.bytes(scenario, instruction.called[i]))
                yield from self.steps(scenario, instruction.called[branch], times)
            elif instruction.opcode == "call":
                yield from self.steps(scenario, instruction.called[0], times)
            else:
                yield Step(instruction, times, times * self.cost(name, instruction))

    def cost(self, computation: str, instruction: Instruction) -> float:
        """Bytes to and from memory of one instruction that is no loop, condition or call."""
        opcode, inside = instruction.opcode, self.computations[computation]
        if opcode in FREE:
            return 0
        if opcode in ("copy-start", "slice-start"):
            if instruction.before:
                return 0
            target, source = _target_and_source(instruction)
            return target.hbm + (0 if source.on_chip else target.bytes)
        if opcode == "async-start" and instruction.called:
            return self.bytes(computation=instruction.called[0])
        operands = [inside[name] for name in instruction.operands if name in inside]
        if opcode == "fusion":
            return self._fusion(instruction, operands)
        read = [sum(array.hbm for array in operand.arrays) for operand in operands]
        written = sum(array.hbm for array in instruction.arrays)
        if opcode in PARTS and read:
            read[0] = min(read[0], instruction.arrays[0].bytes if read[0] else 0)
        if opcode in ("dynamic-update-slice", "scatter"):
            update = sum(array.bytes for array in operands[1 if opcode == "dynamic-update-slice" else -1].arrays)
            read[0], written = 0, update if written else 0
        if opcode.endswith("-start"):
            written = sum(array.hbm for array in instruction.arrays[len(instruction.arrays) // 2 :])
        return sum(read) + written

    def _fusion(self, fusion: Instruction, operands: list[Instruction]) -> float:
        inside = self.computations[fusion.called[0]]
        parameters = {int(i.operands[0]): i for i in inside.values() if i.opcode == "parameter"}
        users = collections.defaultdict(list)
        for instruction in inside.values():
            for place, name in enumerate(instruction.operands):
                users[name].append((instruction, place))
        total, in_place = 0.0, set()
        for number, operand in enumerate(operands):
            whole = sum(array.hbm for array in operand.arrays)
            if number in parameters and whole:
                read, updated = self._read(parameters[number].name, users, inside)
                in_place |= updated
                total += min(whole, read)
        root = next(instruction for instruction in inside.values() if instruction.root)
        parts = [inside[name] for name in root.operands] if root.opcode == "tuple" else [root]
        for part, array in zip(parts, fusion.arrays, strict=False):
            update = self._update(part, inside)
            total += min(array.hbm, update) if update is not None else array.hbm
        return total

    def _read(self, name: str, users, inside) -> tuple[float, set[str]]:
        """Bytes that a fusion reads of its parameter ``name``, and the updates in place of it."""
        read, updated = 0.0, set()
        for user, place in users[name]:
            if user.opcode in PARTS and place == 0:
                read += user.arrays[0].bytes
            elif user.opcode in ("dynamic-update-slice", "scatter") and place == 0:
                updated.add(user.name)
            elif user.opcode == "bitcast" or (
                user.opcode == "fusion" and self._opcodes(user.called[0]) <= {"parameter", "bitcast"}
            ):
                more, below = self._read(user.name, users, inside)
                read, updated = read + more, updated | below
            elif user.opcode == "fusion":
                called = self.computations[user.called[0]]
                nested = collections.defaultdict(list)
                for instruction in called.values():
                    for spot, operand in enumerate(instruction.operands):
                        nested[operand].append((instruction, spot))
                parameter = next(i for i in called.values() if i.opcode == "parameter" and int(i.operands[0]) == place)
                more, below = self._read(parameter.name, nested, called)
                read, updated = read + more, updated | below
            elif user.opcode != "tuple":
                return math.inf, updated
        root = inside[name].root
        return math.inf if root else read, updated

    def _update(self, instruction: Instruction, inside) -> float | None:
        """Bytes that a result in place writes; None for one that is written whole."""
        while instruction.opcode == "bitcast" and instruction.operands[0] in inside:
            instruction = inside[instruction.operands[0]]
        if instruction.opcode == "fusion":
            called = self.computations[instruction.called[0]]
            return self._update(next(i for i in called.values() if i.root), called)
        if instruction.opcode in ("dynamic-update-slice", "scatter"):
            update = inside.get(instruction.operands[1 if instruction.opcode == "dynamic-update-slice" else -1])
            source = inside.get(instruction.operands[0])
            while source is not None and source.opcode == "bitcast":
                source = inside.get(source.operands[0])
            if update is not None and source is not None and source.opcode == "parameter":
                return sum(array.bytes for array in update.arrays)
        return None

    # ---------------------------------------------------------------- what to look at

    def collectives(self, scenario: Scenario = Scenario()) -> dict[str, dict]:
        """By kind: how many run, the bytes that they give, and the largest array of them."""
        found: dict[str, dict] = {}
        for step in self.steps(scenario):
            kind = step.instruction.opcode.removesuffix("-start")
            if kind in COLLECTIVES and not step.instruction.opcode.endswith("-done"):
                arrays = step.instruction.arrays
                if step.instruction.opcode.endswith("-start") and len(arrays) > 1:
                    arrays = arrays[len(arrays) // 2 :]
                entry = found.setdefault(kind, {"count": 0, "bytes": 0, "largest": "", "largest_bytes": 0})
                entry["count"] += step.times
                entry["bytes"] += step.times * sum(array.bytes for array in arrays)
                for array in arrays:
                    if array.bytes > entry["largest_bytes"]:
                        entry["largest"], entry["largest_bytes"] = str(array), array.bytes
        return found

    def moves(self, least: float, scenario: Scenario = Scenario()) -> list[dict]:
        """What computes nothing (copy, transpose, reshape, convert), of at least so many bytes; that of several layers once."""
        found: dict[tuple, dict] = {}
        for step in self.steps(scenario):
            instruction = step.instruction
            kind = self._kind(instruction)
            arrays = instruction.arrays[:1] if instruction.opcode == "copy-start" else instruction.arrays
            for array in arrays:
                if kind is None or array.bytes < least or not step.times:
                    continue
                scope = re.sub(r"\.\d+", "", instruction.scope)
                place = "on chip" if array.on_chip else "in HBM"
                entry = found.setdefault(
                    (kind, str(array), place, scope),
                    {"kind": kind, "array": str(array), "place": place, "count": 0, "bytes": 0, "scope": scope},
                )
                entry["count"] += step.times
                entry["bytes"] += step.times * array.bytes
        return sorted(found.values(), key=lambda entry: -entry["bytes"])

    def _kind(self, instruction: Instruction) -> str | None:
        opcode = instruction.opcode
        # A reshape that changes nothing in memory is a bitcast by now.
        if opcode in ("copy", "transpose", "convert", "reshape"):
            return opcode
        if opcode == "copy-start":
            # Into the on-chip memory or out of it: a prefetch, not a copy.
            target, source = _target_and_source(instruction)
            return None if target.on_chip or source.on_chip else "copy"
        if opcode != "fusion":
            return None
        opcodes = self._opcodes(instruction.called[0])
        if not opcodes <= MOVES:
            return None
        return next((kind for kind in ("convert", "transpose", "copy") if kind in opcodes), None)

    @functools.cache  # noqa: B019 - as long as the program
    def _opcodes(self, computation: str) -> frozenset[str]:
        opcodes = set()
        for instruction in self.computations[computation].values():
            opcodes.add(instruction.opcode)
            if instruction.opcode == "fusion":
                opcodes |= self._opcodes(instruction.called[0])
        return frozenset(opcodes)

    def largest(self, count: int, scenario: Scenario = Scenario()) -> list[Step]:
        """The instructions with the most bytes."""
        return sorted(self.steps(scenario), key=lambda step: -step.bytes)[:count]
