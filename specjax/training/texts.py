"""Token sequences to train on: prompts with the target's own answers, or any text.

One flat array holds all of them; row i is ``tokens[offsets[i]:offsets[i + 1]]``, prompt first, then answer. Files are NumPy
archives with the arrays' names; further arrays in a file are left alone.
"""

import dataclasses
import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Texts:
    """Many token sequences in one array.

    Attributes:
      tokens: [N] integers, all rows one after the other.
      offsets: [R + 1] int64, where each row starts; the last is N.
      prompt_lengths: [R] int32, how many of a row's tokens are its prompt.

    Raises:
      ValueError: names the array that does not fit.

    Example:
      >>> texts = Texts.of_rows([[1, 2, 3], [4, 5]], prompt_lengths=[2, 0])
      >>> len(texts), texts.row(1).tolist(), texts.num_tokens
      (2, [4, 5], 5)
    """

    tokens: np.ndarray
    offsets: np.ndarray
    prompt_lengths: np.ndarray

    def __post_init__(self):
        lengths = np.diff(self.offsets)
        if self.offsets.ndim != 1 or not len(self.offsets) or self.offsets[0] != 0 or self.offsets[-1] != len(self.tokens):
            raise ValueError(f"Texts: offsets must run from 0 to the {len(self.tokens)} tokens")
        if not np.issubdtype(self.tokens.dtype, np.integer) or np.any(self.tokens < 0):
            raise ValueError(f"Texts: tokens are {self.tokens.dtype}; they must be integers of at least 0")
        if np.any(lengths < 1):
            raise ValueError(f"Texts: row {int(np.argmin(lengths))} is empty")
        if self.prompt_lengths.shape != lengths.shape or np.any((self.prompt_lengths < 0) | (self.prompt_lengths > lengths)):
            raise ValueError("Texts: prompt_lengths must hold a number from 0 to its row's length for every row")

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[int] | np.ndarray], prompt_lengths: Sequence[int]) -> "Texts":
        """Texts of token lists."""
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
        tokens = np.concatenate([np.asarray(row, np.int64) for row in rows]) if rows else np.zeros(0, np.int64)
        return cls(tokens.astype(np.uint32), offsets, np.asarray(prompt_lengths, np.int32))

    @classmethod
    def load(cls, path: str | Path) -> "Texts":
        """Reads a NumPy archive.

        Raises:
          ValueError: the file is damaged or lacks an array.
        """
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
                missing = [name for name in ("tokens", "offsets", "prompt_lengths") if name not in archive]
                if missing:
                    raise ValueError(f"{path}: no array is called {missing[0]!r}; texts have tokens, offsets and prompt_lengths")
                return cls(archive["tokens"], archive["offsets"], archive["prompt_lengths"])
        except (zipfile.BadZipFile, EOFError, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise ValueError(f"{path}: there is no such file") from error
            raise ValueError(f"{path}: no NumPy archive, or a damaged one: {error}") from error

    def save(self, path: str | Path) -> None:
        """Writes a NumPy archive; the file is complete or not there."""
        path = Path(path)
        unfinished = path.with_name(path.name + ".part.npz")
        np.savez_compressed(unfinished, tokens=self.tokens, offsets=self.offsets, prompt_lengths=self.prompt_lengths)
        unfinished.replace(path)

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows together."""
        return len(self.tokens)

    @property
    def lengths(self) -> np.ndarray:
        """[R] int64, tokens of each row."""
        return np.diff(self.offsets)

    def row(self, index: int) -> np.ndarray:
        """The tokens of one row."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def prompt(self, index: int) -> np.ndarray:
        """The tokens of one row's prompt."""
        return self.row(index)[: self.prompt_lengths[index]]

    def select(self, rows: Sequence[int] | np.ndarray) -> "Texts":
        """The texts of some rows, in their order."""
        return Texts.of_rows([self.row(row) for row in rows], [self.prompt_lengths[row] for row in rows])

    def split(self, share: float, seed: int = 0) -> tuple["Texts", "Texts"]:
        """Two parts without a common prompt; the second holds about ``share`` of the prompts.

        Rows of one prompt (a greedy and a sampled answer) stay together, or the second part would not be new.

        Example:
          >>> texts = Texts.of_rows([[1, 2, 7], [1, 2, 8], [3, 9]], prompt_lengths=[2, 2, 1])
          >>> first, second = texts.split(0.5)
          >>> sorted([len(first), len(second)])
          [1, 2]
        """
        if not 0 <= share <= 1:
            raise ValueError(f"Texts.split: share is {share!r}; it must be from 0 to 1")
        prompts: dict[bytes, list[int]] = {}
        for index in range(len(self)):
            prompts.setdefault(self.prompt(index).astype(np.int64).tobytes(), []).append(index)
        groups = list(prompts.values())
        order = np.random.default_rng(seed).permutation(len(groups))
        held_out = round(share * len(groups))
        second = sorted(row for group in order[:held_out] for row in groups[group])
        first = sorted(row for group in order[held_out:] for row in groups[group])
        return self.select(first), self.select(second)

    @staticmethod
    def join(parts: Sequence["Texts"]) -> "Texts":
        """All rows of several texts."""
        rows = [part.row(index) for part in parts for index in range(len(part))]
        return Texts.of_rows(rows, [length for part in parts for length in part.prompt_lengths])

    def digest(self) -> str:
        """SHA-256 of tokens and rows, to tell whether something was made of these texts."""
        sha = hashlib.sha256()
        for array in (self.tokens.astype("<u4"), self.offsets.astype("<i8"), self.prompt_lengths.astype("<i4")):
            sha.update(array.tobytes())
        return sha.hexdigest()
