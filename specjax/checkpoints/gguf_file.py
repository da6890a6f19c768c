"""The GGUF container: metadata and tensors by name.

The ``gguf`` library's own reader builds several array views for every string of the vocabulary, which takes 5 to 16 seconds
for the models that people run here. So the header is read here; value types, block sizes and dequantisation are the
library's.
"""

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NUMBER_FORMATS: dict[int, str] = {
    gguf.GGUFValueType.UINT8: "B",
    gguf.GGUFValueType.INT8: "b",
    gguf.GGUFValueType.UINT16: "H",
    gguf.GGUFValueType.INT16: "h",
    gguf.GGUFValueType.UINT32: "I",
    gguf.GGUFValueType.INT32: "i",
    gguf.GGUFValueType.FLOAT32: "f",
    gguf.GGUFValueType.BOOL: "?",
    gguf.GGUFValueType.UINT64: "Q",
    gguf.GGUFValueType.INT64: "q",
    gguf.GGUFValueType.FLOAT64: "d",
}
DEFAULT_ALIGNMENT = 32
VERSIONS = (2, 3)
# Values dequantised at once: large enough for NumPy, small enough for the processor's cache.
CHUNK_VALUES = 1 << 17


class _Header:
    """A cursor over the bytes of a GGUF file that never reads behind the end."""

    def __init__(self, path: Path, data):
        self.path, self.data, self.position = path, data, 0

    def skip(self, num_bytes: int) -> int:
        """Moves on; returns the position before."""
        start, end = self.position, self.position + num_bytes
        if end > len(self.data):
            raise ValueError(
                f"{self.path}: truncated or damaged GGUF file: the header asks for bytes up to {end}, "
                f"the file has {len(self.data)}"
            )
        self.position = end
        return start

    def numbers(self, code: str, count: int = 1) -> tuple:
        """``count`` little-endian numbers of one struct format."""
        start = self.skip(struct.calcsize(code) * count)
        return struct.unpack_from(f"<{count}{code}", self.data, start)

    def text(self) -> str:
        """A length and as many bytes of UTF-8."""
        (length,) = self.numbers("Q")
        start = self.skip(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: damaged GGUF file: a string at byte {start} is not UTF-8 ({error.reason})") from None

    def value(self, kind: int | None = None) -> Any:
        """A typed value; ``kind`` if the type was read already."""
        kind = self.numbers("I")[0] if kind is None else kind
        if kind == gguf.GGUFValueType.STRING:
            return self.text()
        if kind == gguf.GGUFValueType.ARRAY:
            (item_kind,) = self.numbers("I")
            (count,) = self.numbers("Q")
            if item_kind in NUMBER_FORMATS:
                return list(self.numbers(NUMBER_FORMATS[item_kind], count))
            return [self.value(item_kind) for _ in range(count)]
        if kind not in NUMBER_FORMATS:
            raise ValueError(f"{self.path}: damaged GGUF file: unknown value type {kind} before byte {self.position}")
        return self.numbers(NUMBER_FORMATS[kind])[0]


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies.

    Attributes:
      shape: row-major, as NumPy has it.
      kind: quantisation type.
      offset: of its first byte, from the start of the file.
      row_bytes: size of one row (of the last axis).
    """

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    row_bytes: int

    @property
    def num_rows(self) -> int:
        """Rows of the tensor seen as a matrix."""
        return math.prod(self.shape[:-1])


class GGUFFile:
    """An opened GGUF file; a tensor reader (see :class:`specjax.checkpoints.fuse.TensorReader`).

    Attributes:
      path: of the file.
      metadata: key to value: numbers, strings, booleans, lists.
      entries: tensor name to :class:`TensorEntry`.

    Raises:
      ValueError: not a GGUF file, truncated, or of a version or tensor type that cannot be read; names file, tensor, values.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        size = self.path.stat().st_size
        with open(self.path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{self.path}: not a GGUF file: it does not start with 'GGUF'")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _Header(self.path, data)
                header.skip(4)
                (version,) = header.numbers("I")
                if version not in VERSIONS:
                    raise ValueError(f"{self.path}: GGUF version {version} cannot be read; supported: {VERSIONS}, little-endian")
                num_tensors, num_keys = header.numbers("Q", 2)
                self.metadata = {header.text(): header.value() for _ in range(num_keys)}
                listed = [self._listed_tensor(header) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"{self.path}: general.alignment is {alignment!r}; it must be a positive integer")
        start = -(-header.position // alignment) * alignment
        self.entries = {name: self._entry(name, dims, kind, start + offset, size) for name, dims, kind, offset in listed}
        if len(self.entries) != num_tensors:
            raise ValueError(f"{self.path}: damaged GGUF file: {num_tensors} tensors with {len(self.entries)} different names")

    @staticmethod
    def _listed_tensor(header: _Header):
        name = header.text()
        (num_dims,) = header.numbers("I")
        dims = header.numbers("Q", num_dims)
        (kind,) = header.numbers("I")
        (offset,) = header.numbers("Q")
        return name, dims, kind, offset

    def _entry(self, name, dims, kind, offset, file_size) -> TensorEntry:
        try:
            kind = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise ValueError(f"{self.path}: tensor {name!r} has type number {kind}, which gguf does not know") from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not dims or dims[0] % block:
            raise ValueError(f"{self.path}: tensor {name!r} has dims {dims}; rows of type {kind.name} are multiples of {block}")
        entry = TensorEntry(tuple(reversed(dims)), kind, offset, dims[0] // block * block_bytes)
        end = offset + entry.num_rows * entry.row_bytes
        if end > file_size:
            raise ValueError(f"{self.path}: truncated: tensor {name!r} ends at byte {end}, the file at {file_size}")
        return entry

    @property
    def where(self) -> str:
        """What messages call this source."""
        return str(self.path)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor name to shape."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def check_readable(self, name: str) -> None:
        """Raises a ValueError if a tensor's type cannot be dequantised."""
        kind = self.entries[name].kind
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            raise ValueError(
                f"{self.path}: tensor {name!r} has type {kind.name}, which the gguf library cannot dequantise"
            ) from None

    def read(self, name: str, dtype) -> np.ndarray:
        """A tensor, dequantised piece by piece in float32 and rounded once to ``dtype``."""
        entry = self.entries[name]
        self.check_readable(name)
        values = np.empty((entry.num_rows, entry.shape[-1]), dtype)
        step = max(1, CHUNK_VALUES // entry.shape[-1])
        with open(self.path, "rb") as file:
            file.seek(entry.offset)
            for start in range(0, entry.num_rows, step):
                count = min(step, entry.num_rows - start)
                packed = np.fromfile(file, np.uint8, count * entry.row_bytes).reshape(count, entry.row_bytes)
                # Overflow to infinity in a narrow dtype is reported by the caller, by name.
                with np.errstate(over="ignore"):
                    values[start : start + count] = gguf.dequantize(packed, entry.kind)
        return values.reshape(entry.shape)
