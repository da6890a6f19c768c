"""Matrices of int8, and their products with activations that are quantised row by row.

Symmetric and linear, with a scale for every output channel of a matrix and for every row of activations::

    matrix[o, i] ~ values[o, i] * scale[o]       rounded once, when a model is loaded
    inputs[n, i] ~ whole[n, i] * step[n]         rounded in every product; step is the row's largest over 127
    outputs[n, o] = (sum over i of whole[n, i] * values[o, i]) * step[n] * scale[o]

The sum is one of whole numbers, exact in any order: a row's outputs are the same bits whatever other rows and padding a pass has,
and over however many devices the inputs are spread. Rounding is a step, though: inputs that differ in their last bit, as those
behind an attention that adds up in another order, may fall on two sides of it; their outputs then differ by what a step makes.

Letters in shapes: N rows, X groups.
"""

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LARGEST = 127
"""Whole numbers run from -127 to 127, the same on both sides of 0."""
MOST_INPUTS = (2**31 - 1) // LARGEST**2
"""Inputs of a product whose sum fits into int32 whatever they are."""
NOTHING = 1e-30
"""A row whose largest value is at most this counts as zeros: steps stay far from the smallest float32."""
AT_ONCE = 1 << 21
"""Values that are quantised at once on the host."""


@flax.struct.dataclass
class QuantisedMatrix:
    """A matrix in int8. Products, rows and ``[...]`` take it where they take an array.

    Attributes:
      values: [*out, *in] int8, -127 to 127.
      scale: [*out] float32, what a step of each output channel is.
      dtype: what its rows are given in.

    Example:
      >>> matrix = quantise(jnp.array([[1.0, -2.0], [0.0, 0.5]]))
      >>> matrix.values.tolist(), (127 * matrix.scale).tolist()
      ([[64, -127], [0, 127]], [2.0, 0.5])
    """

    values: jax.Array
    scale: jax.Array
    dtype: Any = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """[*out, *in]."""
        return self.values.shape

    @property
    def num_in(self) -> int:
        """How many of the last axes are inputs."""
        return len(self.values.shape) - len(self.scale.shape)

    def astype(self, dtype) -> "QuantisedMatrix":
        """The same matrix, its rows given in ``dtype``."""
        return self.replace(dtype=jnp.dtype(dtype))

    def __getitem__(self, index) -> "QuantisedMatrix":
        """The matrix of some output channels; of all of them for ``...``."""
        return self if index is Ellipsis else self.replace(values=self.values[index], scale=self.scale[index])


def quantise(matrix: jax.Array | np.ndarray, num_in: int = 1, dtype=jnp.float32) -> QuantisedMatrix:
    """A matrix [*out, *in] in int8, each output channel with the scale that its largest value asks for.

    Args:
      matrix: of floats; where it is on the host, so is the result.
      num_in: how many of its last axes are inputs.
      dtype: of the rows; see :class:`QuantisedMatrix`.

    Raises:
      ValueError: there are so many inputs that a sum could overflow.
    """
    out_shape, num_inputs = matrix.shape[:-num_in], math.prod(matrix.shape[-num_in:])
    if num_inputs > MOST_INPUTS:
        raise ValueError(f"quantise: the matrix has {num_inputs} inputs; sums in int32 take at most {MOST_INPUTS}")
    rows = matrix.reshape(math.prod(out_shape), num_inputs)
    if isinstance(matrix, jax.Array):
        values, scale = whole_numbers(rows.astype(jnp.float32))
    else:
        values, scale = np.empty(rows.shape, np.int8), np.empty(len(rows), np.float32)
        count = max(1, AT_ONCE // num_inputs)
        for start in range(0, len(rows), count):
            some = slice(start, start + count)
            values[some], scale[some] = whole_numbers(rows[some].astype(np.float32, copy=False), array_module=np)
    return QuantisedMatrix(values.reshape(matrix.shape), scale.reshape(out_shape), jnp.dtype(dtype))


def dequantise(matrix: QuantisedMatrix) -> jax.Array:
    """The floats [*out, *in] that a matrix stands for.

    Example:
      >>> dequantise(quantise(jnp.array([[1.0, -2.0]]))).round(3).tolist()
      [[1.008..., -2.0]]
    """
    scale = matrix.scale.reshape(matrix.scale.shape + (1,) * matrix.num_in)
    return (matrix.values.astype(scale.dtype) * scale).astype(matrix.dtype)


def whole_numbers(rows, over: str | None = None, array_module=jnp):
    """``rows`` [N, in] of at least float32 as int8, and what a step of each row is [N].

    Args:
      rows: a row that is not finite has a step that is not, and so has everything that is made of it.
      over: mesh axis whose devices have parts of each row; they round by the step of the whole row.
      array_module: ``numpy`` on the host, with the same result.
    """
    largest = array_module.max(array_module.abs(rows), axis=-1)
    if over is not None:
        largest = lax.pmax(largest, over)
    some = largest > NOTHING
    inverse = array_module.where(some, LARGEST / array_module.where(some, largest, 1), array_module.zeros_like(largest))
    return array_module.round(rows * inverse[:, None]).astype(array_module.int8), largest * (1 / LARGEST)


def contract_quantised(inputs: jax.Array, matrix: QuantisedMatrix, dtype=None, over: str | None = None) -> jax.Array:
    """``inputs`` [..., *in] times ``matrix`` [*out, *in]: [..., *out]; see :func:`specjax.models.products.contract`."""
    rows = inputs.reshape(math.prod(inputs.shape[: -matrix.num_in]), -1)
    whole, step = whole_numbers(_wide(rows), over)
    sums = lax.platform_dependent(whole, matrix.values.reshape(-1, rows.shape[1]), cpu=_sums_on_cpu, default=_sums)
    if over is not None:
        sums = lax.psum(sums, over)
    outputs = sums.astype(step.dtype) * step[:, None] * matrix.scale.reshape(1, -1)
    return outputs.astype(dtype or inputs.dtype).reshape(inputs.shape[: -matrix.num_in] + matrix.scale.shape)


def _sums(whole: jax.Array, values: jax.Array) -> jax.Array:
    """``whole`` [N, in] times ``values`` [out, in], both int8: [N, out] int32."""
    return lax.dot_general(whole, values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)


def _sums_on_cpu(whole: jax.Array, values: jax.Array) -> jax.Array:
    """The same; see the product of few rows in :mod:`specjax.models.products`."""
    num_rows = whole.shape[0]
    # A product of one row is several times slower than one of two rows.
    if num_rows == 1:
        whole = jnp.concatenate([whole, whole])
    return lax.optimization_barrier(_sums(values, whole)).T[:num_rows]


def contract_quantised_by_group(
    inputs: jax.Array, matrices: QuantisedMatrix, counts: jax.Array, numbers, over: str | None = None
) -> jax.Array:
    """``inputs`` [N, in], so many rows after one another times each of ``matrices`` [X, *out, in].

    See :func:`specjax.models.products.contract_by_group`; ``numbers`` are those of the product of [N, in] with [X, out, in].
    """
    whole, step = whole_numbers(_wide(inputs), over)
    values = matrices.values.reshape(len(counts), -1, inputs.shape[1])
    sums = lax.ragged_dot_general(whole, values, counts, numbers, preferred_element_type=jnp.int32)
    group = jnp.repeat(jnp.arange(len(counts)), counts, total_repeat_length=inputs.shape[0])
    outputs = sums.astype(step.dtype) * step[:, None] * matrices.scale.reshape(len(counts), -1)[group]
    return outputs.astype(inputs.dtype).reshape(inputs.shape[0], *matrices.scale.shape[1:])


def take_quantised_rows(matrix: QuantisedMatrix, ids: jax.Array) -> jax.Array:
    """Rows of a matrix [V, E]; see :func:`specjax.models.products.take_rows`."""
    values, scale = (jnp.take(array, ids, axis=0, mode="clip") for array in (matrix.values, matrix.scale))
    return (values.astype(scale.dtype) * scale[..., None]).astype(matrix.dtype)


def in_the_form_of(wanted, tree):
    """A tree of float arrays in the form of ``wanted``: quantised where that is, and in its dtypes.

    Args:
      wanted: as ``Decoder.abstract_params`` gives it.
      tree: the same names and shapes.
    """

    def formed(want, leaf):
        if is_quantised(want):
            return quantise(leaf, want.num_in, want.dtype)
        return leaf if leaf.dtype == want.dtype else leaf.astype(want.dtype)

    return jax.tree.map(formed, wanted, tree, is_leaf=is_quantised)


def is_quantised(leaf) -> bool:
    """Whether a part of a tree is a quantised matrix."""
    return isinstance(leaf, QuantisedMatrix)


def _wide(rows):
    return rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
