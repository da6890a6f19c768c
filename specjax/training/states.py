"""The target's hidden states over texts: what heads are trained on.

Made once and stored they cost 2 bytes per number (float16) and no further pass of the target. The store is a folder with one
array over all tokens and a note of how far it got, so that an interrupted run goes on where it was.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.loaded import Model
from specjax.models.trained_head import TargetMark, target_functions
from specjax.training.texts import Texts

TOKENS_PER_PASS = 4096
"""Tokens of one pass, padding included."""


def bucket(length: int) -> int:
    """The padded length of a row: few sizes, so that few programs are compiled.

    Example:
      >>> [bucket(n) for n in (3, 65, 200, 600)]
      [64, 96, 256, 768]
    """
    size = 64
    while size < length:
        # 64, 96, 128, 192, 256, 384, ...
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def batches_by_length(lengths: Sequence[int] | np.ndarray, tokens_per_batch: int) -> Iterator[tuple[np.ndarray, int]]:
    """Rows of similar length together: yields row indices and the padded length of each batch.

    A batch holds ``tokens_per_batch // padded length`` rows, at least one; the last of a length may hold fewer.

    Example:
      >>> [(rows.tolist(), size) for rows, size in batches_by_length([70, 10, 20, 30], tokens_per_batch=128)]
      [([1, 2], 64), ([3], 64), ([0], 96)]
    """
    lengths = np.asarray(lengths)
    sizes = np.array([bucket(length) for length in lengths])
    for size in np.unique(sizes):
        rows = np.flatnonzero(sizes == size)
        at_once = max(1, tokens_per_batch // int(size))
        for start in range(0, len(rows), at_once):
            yield rows[start : start + at_once], int(size)


def padded_rows(texts: Texts, rows: Sequence[int] | np.ndarray, num_rows: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [num_rows, size] int32 and lengths [num_rows] int32 of some rows; missing rows are empty."""
    tokens, lengths = np.zeros((num_rows, size), np.int32), np.zeros(num_rows, np.int32)
    for place, row in enumerate(rows):
        text = texts.row(row)[:size]
        tokens[place, : len(text)] = text
        lengths[place] = len(text)
    return tokens, lengths


@functools.partial(jax.jit, static_argnames="functions")
def forced(functions, params, tokens):
    """Features [B, T, F, E] of texts ``tokens`` [B, T] that are fed at once."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    cache = functions.init_cache(params, tokens.shape[0], 1)
    return functions.apply(params, tokens, positions, cache, None).features


@dataclasses.dataclass(frozen=True, eq=False)
class StateStore:
    """Hidden states of every token of some texts.

    Attributes:
      features: [N, F, E] float16, ``features[texts.offsets[i] + t]`` belongs to token t of row i; usually mapped from disk.
      feature_layers: the layers that the F stand for.
    """

    features: np.ndarray
    feature_layers: tuple[int, ...]

    @classmethod
    def make(
        cls,
        model: Model,
        texts: Texts,
        feature_layers: Sequence[int],
        folder: str | Path,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> "StateStore":
        """Feeds ``texts`` to ``model`` and stores what its layers show, or goes on with what is in ``folder`` already.

        Args:
          model: the target; its functions have ``with_features``.
          texts: what is fed.
          feature_layers: layers whose hidden states are kept.
          folder: where; it is made.
          progress: called with the tokens done and all of them.

        Raises:
          ValueError: the folder holds the states of other texts, layers or another model.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        functions = target_functions(model).with_features(tuple(feature_layers))
        width = jax.eval_shape(forced, functions, model.params, jax.ShapeDtypeStruct((1, 1), jnp.int32)).shape[-1]
        shape = (texts.num_tokens, len(feature_layers), width)
        made_of = {"texts": texts.digest(), "feature_layers": list(feature_layers), "width": width}
        # The weights too: another model may have the same name.
        mark = TargetMark.of(model)
        made_of["target"] = [mark.name, *mark.sample]
        note, array = folder / "note.json", folder / "features.npy"
        done = 0
        if note.exists():
            known = json.loads(note.read_text())
            if known["made_of"] != made_of:
                raise ValueError(f"{folder} holds the states of {known['made_of']}; asked for were those of {made_of}")
            done = known["batches"]
            features = np.lib.format.open_memmap(array, mode="r+")
        else:
            features = np.lib.format.open_memmap(array, mode="w+", dtype=np.float16, shape=shape)
        fed = 0
        for index, (rows, size) in enumerate(batches_by_length(texts.lengths, TOKENS_PER_PASS)):
            fed += int(texts.lengths[rows].sum())
            if index < done:
                continue
            tokens, lengths = padded_rows(texts, rows, max(1, TOKENS_PER_PASS // size), size)
            made = np.asarray(forced(functions, model.params, tokens))
            if np.max(np.abs(made)) > np.finfo(np.float16).max:
                raise ValueError(
                    f"layers {tuple(feature_layers)} of {model.name!r} show numbers up to {np.max(np.abs(made)):g}; the "
                    "states are stored in float16, which ends at 65504: leave out the layer that shows them"
                )
            for place, row in enumerate(rows):
                start = texts.offsets[row]
                features[start : start + lengths[place]] = made[place, : lengths[place]]
            features.flush()
            _write_whole(note, json.dumps({"made_of": made_of, "batches": index + 1}))
            progress(fed, texts.num_tokens)
        return cls(features, tuple(feature_layers))


def _write_whole(path: Path, text: str) -> None:
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text)
    unfinished.replace(path)
