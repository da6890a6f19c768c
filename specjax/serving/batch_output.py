"""The output file of a batch job: a record for every line of the input, whole or not there, whatever happens meanwhile.

Records are appended as they are ready, each by one write, and every record tells its line. So the file itself is the journal: a
job that is started again reads which lines are answered, cuts a torn last record off and goes on. Beside it stands ``OUT.job``,
what the job is; the output of another job is never touched.

Records in the order of the input are asked for afterwards: until the last line is answered they are collected in
``OUT.unordered``, and then written anew in one go.
"""

import array
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from specjax.serving.batch_lines import WrongLine, failed, line_of, name_of, parse

SYNC_SECONDS = 5.0
"""How much work a crash of the system (not of the program) can cost."""

BLOCK = 1 << 20


class JobError(RuntimeError):
    """A job that cannot begin, or go on; the message says what to do. Nothing that was written is lost."""


class BatchInput:
    """The input file: read once beforehand, then line by line.

    A line is a number of 8 bytes in memory at most, however long it is. Blank lines are no input.

    Attributes:
      path: the file.
      num_lines: lines, blank ones included.
      num_inputs: lines that are to be answered.
      digest: SHA-256 of the content.

    Raises:
      JobError: it cannot be read, or there is nothing in it.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        sha, hashes, self._blank = hashlib.sha256(), array.array("Q"), bytearray()
        try:
            with open(self.path, "rb") as file:
                for data in file:
                    sha.update(data)
                    self._blank.append(not data.strip())
                    hashes.append(_name_hash(data))
        except OSError as error:
            raise JobError(f"{self.path} cannot be read: {error.strerror}") from error
        self.num_lines = len(self._blank)
        self.num_inputs = self.num_lines - sum(self._blank)
        self.digest = sha.hexdigest()
        if not self.num_inputs:
            raise JobError(f"{self.path} holds no line to be answered")
        values, counts = np.unique(np.frombuffer(hashes, np.uint64), return_counts=True)
        self._suspects = set(values[(counts > 1) & (values != 0)].tolist())

    def __iter__(self) -> Iterator[tuple[int, bytes, int | None]]:
        """Yields (number, line, earlier line of the same id or None) of every line that is to be answered."""
        first: dict = {}
        with open(self.path, "rb") as file:
            for number, data in enumerate(file, 1):
                if number <= self.num_lines and not self._blank[number - 1]:
                    duplicate_of = None
                    if _name_hash(data) in self._suspects:
                        duplicate_of = first.setdefault(_name_text(data), number)
                    yield number, data, None if duplicate_of == number else duplicate_of


def _name_text(data: bytes) -> str:
    try:
        return json.dumps(name_of(parse(data, 0)))
    except WrongLine:
        return "null"


def _name_hash(data: bytes) -> int:
    """8 bytes that tell ids apart; 0 for none."""
    name = _name_text(data)
    return 0 if name == "null" else int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") or 1


class BatchOutput:
    """The output file, open for the records that are missing.

    Args:
      path: the file.
      job: what the job is, JSON; a job that goes on must be the same.
      source: the input.
      keep_order: whether the records come in the order of the input at the end.

    Attributes:
      num_answered: lines that have a record.
      num_errors: those of them that could not be answered.

    Raises:
      JobError: the file is that of another job, or cannot be written. It is as it was.
    """

    def __init__(self, path: str | Path, job: dict, source: BatchInput, keep_order: bool = False):
        self.path, self._source, self._keep_order = Path(path), source, keep_order
        self._job = Path(f"{path}.job")
        self._file = Path(f"{path}.unordered") if keep_order else self.path
        self._answered = bytearray(source.num_lines + 1)
        self._places = np.full(source.num_lines + 1, -1, np.int64) if keep_order else None
        self.num_answered = self.num_errors = 0
        self._size, self._synced = 0, time.monotonic()
        self._descriptor: int | None = None
        if self.path.exists() and os.path.samefile(self.path, source.path):
            raise JobError(f"{self.path} is the input; name another file for the output")
        try:
            self._begin(job | {"keep_order": keep_order})
        except OSError as error:
            raise JobError(f"{error.filename or self.path} cannot be written: {error.strerror}") from error

    def _begin(self, job):
        if self._job.exists():
            self._check_same(job)
        elif self.path.exists():
            raise JobError(
                f"{self.path} exists and is not the output of a batch job (there is no {self._job}); nothing was changed"
            )
        else:
            whole = self._job.with_name(self._job.name + ".part")
            whole.write_text(json.dumps(job, indent=1) + "\n")
            whole.replace(self._job)
        if self._keep_order and self.path.exists():
            # It is written in one go, when all is answered.
            self._count(self.path, None)
            return
        self._descriptor = descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError(f"another process is writing {self._file}; wait for it, or stop it") from None
        self._count(self._file, descriptor)

    def _check_same(self, job):
        try:
            known = json.loads(self._job.read_text())
        except (ValueError, UnicodeDecodeError) as error:
            raise JobError(f"{self._job} is damaged ({error}); nothing was changed") from error
        different = [name for name in sorted(known.keys() | job.keys()) if known.get(name) != job.get(name)]
        if different:
            name = different[0]
            raise JobError(
                f"{self.path} belongs to another job: its {name} is {known.get(name)!r}, this one's is {job.get(name)!r}; "
                "nothing was changed. Give the same command again, or name another output"
            )

    def _count(self, path, descriptor):
        good = 0
        with open(path, "rb") as file:
            for number, data in enumerate(file, 1):
                if not data.endswith(b"\n"):
                    break
                try:
                    record = json.loads(data)
                except ValueError:
                    record = None
                line = line_of(record)
                if line is None or line > self._source.num_lines or self._answered[line]:
                    raise JobError(f"{path}: line {number} is no record of this job, or one too many; nothing was changed")
                self._note(line, good, failed(record))
                good += len(data)
        self._size = good
        if descriptor is not None and os.fstat(descriptor).st_size != good:
            os.ftruncate(descriptor, good)

    def _note(self, line, place, is_error):
        self._answered[line] = 1
        self.num_answered += 1
        self.num_errors += is_error
        if self._places is not None:
            self._places[line] = place

    def has(self, line: int) -> bool:
        """Whether a line has its record."""
        return bool(self._answered[line])

    def write(self, record: dict) -> None:
        """Appends a record.

        Raises:
          JobError: the disk is full, say. What was there before is whole.
        """
        line = line_of(record)
        if line is None or self.has(line):
            raise ValueError(f"a record of line {line} is there already, or it tells none")
        descriptor, data = self._descriptor, _to_json(record) + b"\n"
        assert descriptor is not None, "a complete output has every record"
        try:
            written = os.write(descriptor, data)
            # Only the whole record is there for others, or none of it.
            while written < len(data):
                written += os.write(descriptor, data[written:])
            if time.monotonic() - self._synced > SYNC_SECONDS:
                os.fsync(descriptor)
                self._synced = time.monotonic()
        except OSError as error:
            os.ftruncate(descriptor, self._size)
            raise JobError(
                f"{self._file} cannot be written: {error.strerror}. The {self.num_answered} records in it are whole; make room "
                "and give the same command again"
            ) from error
        self._note(line, self._size, failed(record))
        self._size += len(data)

    def finish(self) -> None:
        """Makes the output complete, all lines having their record.

        Raises:
          JobError: it cannot be written.
        """
        if self._descriptor is None:
            return
        os.fsync(self._descriptor)
        places = self._places
        if places is None:
            return
        whole = self.path.with_name(self.path.name + ".part")
        try:
            with open(whole, "wb") as ordered, open(self._file, "rb") as unordered:
                for place in places[places >= 0]:
                    unordered.seek(place)
                    ordered.write(unordered.readline())
                ordered.flush()
                os.fsync(ordered.fileno())
            whole.replace(self.path)
        except OSError as error:
            whole.unlink(missing_ok=True)
            raise JobError(
                f"{self.path} cannot be written: {error.strerror}. All records are in {self._file}; make room and give the same "
                "command again"
            ) from error
        self._file.unlink()

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _to_json(record: dict) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        # An id of half a character, which only an escape can hold.
        return json.dumps(record, separators=(",", ":")).encode()
