"""Reduced vocabularies of draft heads.

For a small model the output matrix is most of a draft step's cost, and a few thousand tokens make up nearly all of a text
(FR-Spec, Zhao et al. 2025, arXiv:2502.14856, section 3). A head may therefore know R of the target's V tokens: ``ids`` [R]
says which, in rising order. Behind the head its logits are spread over the target's vocabulary, -inf elsewhere, before anything
is made of them: q is then a distribution over the target's own ids, and every rule stays exact.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np


def widen(logits: jax.Array, ids: jax.Array | None, width: int) -> jax.Array:
    """Logits [..., V] with ``logits`` [..., R] at ``ids`` [R] and -inf elsewhere.

    Args:
      logits: of the tokens ``ids``; of the first tokens where ``ids`` is None.
      ids: [R] int32, rising.
      width: V.

    Example:
      >>> widen(jnp.array([[1.0, 2.0]]), jnp.array([1, 3]), 4).tolist()
      [[-inf, 1.0, -inf, 2.0]]
    """
    if ids is None:
        padding = [(0, 0)] * (logits.ndim - 1) + [(0, width - logits.shape[-1])]
        return jnp.pad(logits, padding, constant_values=-jnp.inf)
    wide = jnp.full((*logits.shape[:-1], width), -jnp.inf, logits.dtype)
    return wide.at[..., ids].set(logits, indices_are_sorted=True, unique_indices=True)


def most_frequent(tokens: np.ndarray, size: int, vocab_size: int, always: Iterable[int] = ()) -> np.ndarray:
    """The ``size`` most frequent ids of a text, and ``always`` those, [size] int32 in rising order.

    Of equally frequent ones the smaller id counts more, so that the choice is the same everywhere.

    Raises:
      ValueError: ``size`` is not from 1 to ``vocab_size``, or a token is outside of the vocabulary.

    Example:
      >>> most_frequent(np.array([5, 5, 2, 2, 2, 7]), size=3, vocab_size=9, always=[0]).tolist()
      [0, 2, 5]
    """
    always = sorted(set(always))
    if not max(1, len(always)) <= size <= vocab_size:
        raise ValueError(f"most_frequent: size is {size}; it must be from {max(1, len(always))} to {vocab_size}")
    if len(tokens) and np.max(tokens) >= vocab_size:
        raise ValueError(f"most_frequent: tokens holds {np.max(tokens)}; ids are below {vocab_size}")
    counts = np.bincount(np.asarray(tokens, np.int64), minlength=vocab_size)
    counts[always] = np.max(counts, initial=0) + 1
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def coverage(tokens: np.ndarray, ids: np.ndarray) -> float:
    """Share of ``tokens`` that ``ids`` hold.

    Example:
      >>> coverage(np.array([1, 1, 2, 3]), np.array([1, 2]))
      0.75
    """
    return float(np.isin(tokens, ids).mean()) if len(tokens) else 0.0


def check_vocabulary(ids, size: int, vocab_size: int, owner: str) -> None:
    """Raises ValueError unless ``ids`` are ``size`` rising ids below ``vocab_size``."""
    ids = np.asarray(ids)
    if ids.shape != (size,) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{owner}: the vocabulary map has shape {ids.shape} and dtype {ids.dtype}; it must be {size} integers")
    if np.any(np.diff(ids) <= 0) or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ValueError(
            f"{owner}: the vocabulary map runs from {ids.min()} to {ids.max()}; its ids must rise from at least 0 to at most "
            f"{vocab_size - 1}, the target's last"
        )
