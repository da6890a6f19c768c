"""Matrices of int8, and their products with activations that are quantised row by row.

Symmetric and linear, with a scale for every output channel of a matrix and for every row of activations::

    matrix[o, i] ~ values[o, i] * scale[o]                            rounded once, when a model is loaded
    inputs[n, i] ~ (first[n, i] + second[n, i] / 256) * step[n]       rounded in every product; 127 steps are the row's largest
    outputs[n, o] = (sum over i of the same * values[o, i]) * step[n] * scale[o]

Everything in the sums is int8. A few activations of a row are a hundred times larger than the others, of which steps of a 127th
leave little: a second digit makes them as fine as 16 bits are. It is another row of the same product, which reads the weights
once; a single digit is there for who would rather save the arithmetic.

Sums are those of whole numbers, exact in any order: a row's outputs are the same bits whatever other rows and padding a pass has,
and over however many devices the inputs are spread. Rounding is a step, though: inputs that differ in their last bit, as those
behind an attention that adds up in another order, may fall on two sides of it; their outputs then differ by what a step makes.

Letters in shapes: N rows, X groups.
"""

import math
from typing import Any, TypeGuard

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax.numeric import for_jit

LARGEST = 127
"""Whole numbers run from -127 to 127, the same on both sides of 0."""
MOST_INPUTS = (2**31 - 1) // LARGEST**2
"""Inputs of a product whose sum fits into int32 whatever they are."""
NOTHING = 1e-30
"""A row whose largest value is at most this counts as zeros: steps stay far from the smallest float32."""
DIGIT = 256
"""Steps of the second digit in one of the first."""
AT_ONCE = 1 << 21
"""Values that are quantised at once on the host."""


@flax.struct.dataclass
class QuantisedMatrix:
    """A matrix in int8. Products, rows and ``[...]`` take it where they take an array.

    Attributes:
      values: [*out, *in] int8, -127 to 127.
      scale: [*out] float32, what a step of each output channel is.
      dtype: what its rows are given in.
      digits: of int8 that activations are rounded to, 1 or 2.

    Example:
      >>> matrix = quantise(jnp.array([[1.0, -2.0], [0.0, 0.5]]))
      >>> matrix.values.tolist(), (127 * matrix.scale).tolist()
      ([[64, -127], [0, 127]], [2.0, 0.5])
    """

    values: jax.Array
    scale: jax.Array
    dtype: Any = flax.struct.field(pytree_node=False)
    digits: int = flax.struct.field(pytree_node=False, default=2)

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


def quantise(matrix: jax.Array | np.ndarray, num_in: int = 1, dtype=jnp.float32, digits: int = 2) -> QuantisedMatrix:
    """A matrix [*out, *in] in int8, each output channel with the scale that its largest value asks for.

    Args:
      matrix: of floats; where it is on the host, so is the result.
      num_in: how many of its last axes are inputs.
      dtype: of the rows; see :class:`QuantisedMatrix`.
      digits: of the activations; likewise.

    Raises:
      ValueError: there are so many inputs that a sum could overflow.
    """
    out_shape, num_inputs = matrix.shape[:-num_in], math.prod(matrix.shape[-num_in:])
    if num_inputs > MOST_INPUTS:
        raise ValueError(f"quantise: the matrix has {num_inputs} inputs; sums in int32 take at most {MOST_INPUTS}")
    rows = matrix.reshape(math.prod(out_shape), num_inputs)
    if isinstance(matrix, jax.Array):
        steps, scale = _in_steps(rows.astype(jnp.float32))
        values = jnp.round(steps).astype(jnp.int8)
    else:
        whole, scale = np.empty(rows.shape, np.int8), np.empty(len(rows), np.float32)
        count = max(1, AT_ONCE // num_inputs)
        for start in range(0, len(rows), count):
            some = slice(start, start + count)
            steps, scale[some] = _in_steps(rows[some].astype(np.float32, copy=False), array_module=np)
            whole[some] = np.round(steps)
        values = for_jit(whole)
    return QuantisedMatrix(values.reshape(matrix.shape), scale.reshape(out_shape), jnp.dtype(dtype), digits)


def dequantise(matrix: QuantisedMatrix) -> jax.Array:
    """The floats [*out, *in] that a matrix stands for.

    Example:
      >>> dequantise(quantise(jnp.array([[1.0, -2.0]]))).round(3).tolist()
      [[1.008..., -2.0]]
    """
    scale = matrix.scale.reshape(matrix.scale.shape + (1,) * matrix.num_in)
    return (matrix.values.astype(scale.dtype) * scale).astype(matrix.dtype)


def contract_quantised(inputs: jax.Array, matrix: QuantisedMatrix, dtype=None, over: str | None = None) -> jax.Array:
    """``inputs`` [..., *in] times ``matrix`` [*out, *in]: [..., *out]; see :func:`specjax.models.products.contract`."""
    rows = inputs.reshape(math.prod(inputs.shape[: -matrix.num_in]), -1)
    digits, step = _digits(rows, matrix.digits, over)
    sums = lax.platform_dependent(digits, matrix.values.reshape(-1, rows.shape[1]), cpu=_sums_on_cpu, default=_sums)
    if over is not None:
        sums = lax.psum(sums, over)
    outputs = _joined(sums, matrix.digits, step) * matrix.scale.reshape(1, -1)
    return outputs.astype(dtype or inputs.dtype).reshape(inputs.shape[: -matrix.num_in] + matrix.scale.shape)


def _sums(digits: jax.Array, values: jax.Array) -> jax.Array:
    """``digits`` [N, in] times ``values`` [out, in], both int8: [N, out] int32."""
    return lax.dot_general(digits, values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)


def _sums_on_cpu(digits: jax.Array, values: jax.Array) -> jax.Array:
    """The same; see the product of few rows in :mod:`specjax.models.products`."""
    num_rows = digits.shape[0]
    # A product of one row is several times slower than one of two rows.
    if num_rows == 1:
        digits = jnp.concatenate([digits, digits])
    return lax.optimization_barrier(_sums(values, digits)).T[:num_rows]


def contract_quantised_by_group(
    inputs: jax.Array, matrices: QuantisedMatrix, counts: jax.Array, numbers, over: str | None = None
) -> jax.Array:
    """``inputs`` [N, in], so many rows after one another times each of ``matrices`` [X, *out, in].

    See :func:`specjax.models.products.contract_by_group`; ``numbers`` are those of the product of [N, in] with [X, out, in].
    """
    digits, step = _digits(inputs, matrices.digits, over)
    values = matrices.values.reshape(len(counts), -1, inputs.shape[1])
    sums = lax.ragged_dot_general(digits, values, counts * matrices.digits, numbers, preferred_element_type=jnp.int32)
    group = jnp.repeat(jnp.arange(len(counts)), counts, total_repeat_length=inputs.shape[0])
    outputs = _joined(sums, matrices.digits, step) * matrices.scale.reshape(len(counts), -1)[group]
    return outputs.astype(inputs.dtype).reshape(inputs.shape[0], *matrices.scale.shape[1:])


def _in_steps(rows, over: str | None = None, array_module=jnp):
    """``rows`` [N, in] of at least float32 in steps of which each row's largest value has 127, and what a step is [N].

    A row that is not finite has a step that is not, and so has everything that is made of it. Devices of the mesh axis ``over``
    have parts of each row, and count in steps of the whole row. With ``numpy`` as ``array_module`` the result is the same.
    """
    largest = array_module.max(array_module.abs(rows), axis=-1)
    if over is not None:
        largest = lax.pmax(largest, over)
    some = largest > NOTHING
    inverse = array_module.where(some, LARGEST / array_module.where(some, largest, 1), array_module.zeros_like(largest))
    return rows * inverse[:, None], largest * (1 / LARGEST)


def _digits(rows, count: int, over: str | None):
    """``rows`` [N, in] in so many digits of int8, [N * count, in], those of a row one after the other; what a step is [N]."""
    steps, step = _in_steps(rows.astype(jnp.promote_types(rows.dtype, jnp.float32)), over)
    first = jnp.round(steps)
    if count == 1:
        return first.astype(jnp.int8), step
    second = jnp.clip(jnp.round((steps - first) * DIGIT), -LARGEST, LARGEST)
    return jnp.stack([first, second], axis=1).astype(jnp.int8).reshape(-1, rows.shape[1]), step


def _joined(sums, count: int, step):
    """[N, out] of the digits' sums [N * count, out]."""
    sums = sums.astype(step.dtype).reshape(len(step), count, -1)
    # The division is exact, so that it is no matter whether a compiler rounds between it and the sum.
    total = sums[:, 0] if count == 1 else sums[:, 0] + sums[:, 1] / DIGIT
    return total * step[:, None]


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
            return quantise(leaf, want.num_in, want.dtype, want.digits)
        return leaf if leaf.dtype == want.dtype else leaf.astype(want.dtype)

    return jax.tree.map(formed, wanted, tree, is_leaf=is_quantised)


def is_quantised(leaf) -> TypeGuard[QuantisedMatrix]:
    """Whether a part of a tree is a quantised matrix."""
    return isinstance(leaf, QuantisedMatrix)
