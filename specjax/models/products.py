"""Matrix products, parameters with named axes, and sums over the devices of a mesh: what every module is made of.

Letters in shapes: B rows, T tokens of a pass, V vocabulary, E width.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from specjax.models.quantised import QuantisedMatrix, contract_quantised, contract_quantised_by_group, take_quantised_rows

Matrix = jax.Array | QuantisedMatrix

MANY_ROWS = 128
"""From this many rows on a CPU multiplies as everything else does."""


def exact(dtype) -> lax.Precision | None:
    """Precision of a product: float32 means float32, also where the hardware would rather multiply in bfloat16."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype).itemsize >= 4 else None


def contract(
    inputs: jax.Array, weight: Matrix, num_in: int = 1, dtype=None, parts: int = 1, over: str | None = None
) -> jax.Array:
    """``inputs`` [..., *in] times ``weight`` [*out, *in], over their last ``num_in`` axes: [..., *out].

    Accumulated in at least float32, in ``parts`` sums that are added up at the end, and then over the devices of the mesh axis
    ``over`` where each has a part of the inputs; in ``dtype``, which is the inputs' unless given. With a quantised ``weight`` the
    sums are those of whole numbers, whatever ``parts`` is.
    """
    if isinstance(weight, QuantisedMatrix):
        return contract_quantised(inputs, weight, dtype, over)
    rows, out_shape = inputs.shape[:-num_in], weight.shape[:-num_in]
    # Two plain matrices: XLA's CPU backend transposes a weight of more axes before it multiplies, at ten times the cost.
    inputs = inputs.reshape(math.prod(rows), -1)
    weight = weight.reshape(math.prod(out_shape), -1)
    if parts > 1:
        inputs = _shares(inputs, parts)
    usual, few = (functools.partial(form, dtype=dtype or inputs.dtype) for form in (_multiply, _multiply_few_rows))
    outputs = lax.platform_dependent(inputs, weight, cpu=few if inputs.shape[0] < MANY_ROWS else usual, default=usual)
    if parts > 1:
        outputs = jnp.sum(outputs.reshape(parts, -1, outputs.shape[-1]), axis=0)
    outputs = outputs.reshape(rows + out_shape)
    return outputs if over is None else lax.psum(outputs, over)


def _multiply(inputs: jax.Array, weight: jax.Array, dtype) -> jax.Array:
    """``inputs`` [N, in] times ``weight`` [out, in]: [N, out]."""
    axes = (((1,), (1,)), ((), ()))
    return lax.dot_general(inputs, weight, axes, precision=exact(inputs.dtype), preferred_element_type=dtype)


def _multiply_few_rows(inputs: jax.Array, weight: jax.Array, dtype) -> jax.Array:
    """The same as XLA's CPU backend does it fastest: the weight first, up to 2.4 times as fast for 2 to 32 rows.

    The barrier keeps the compiler from turning that round again.
    """
    num_rows = inputs.shape[0]
    # A half-precision product of one row is about five times slower than one of two rows.
    if num_rows == 1 and inputs.dtype.itemsize < 4:
        inputs = jnp.concatenate([inputs, inputs])
    # A half-precision product is faster, too, that is not rounded before it is turned.
    product = _multiply(weight, inputs, jnp.promote_types(dtype, jnp.float32))
    return lax.optimization_barrier(product).T[:num_rows].astype(dtype)


def _shares(inputs: jax.Array, parts: int) -> jax.Array:
    """``inputs`` [N, in] as rows [parts * N, in] that each have a share of the inputs and zeros elsewhere.

    A sum that meets zeros does not round there, and one product over more rows reads the weights once; they are not cut, which
    would copy them.
    """
    size = inputs.shape[-1]
    mine = (jnp.arange(size) * parts // size)[None] == jnp.arange(parts)[:, None]
    return jnp.where(mine[:, None], inputs[None], 0).reshape(-1, size)


def contract_by_group(inputs: jax.Array, weights: Matrix, counts: jax.Array, over: str | None = None) -> jax.Array:
    """``inputs`` [N, in], the first ``counts[0]`` rows times ``weights[0]`` [*out, in], the next ``counts[1]`` times the next.

    Nothing is added up over the mesh axis ``over``, whose devices have parts of the inputs: it only says which rows are one.
    """
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    if isinstance(weights, QuantisedMatrix):
        return contract_quantised_by_group(inputs, weights, counts, numbers, over)
    rows = weights.reshape(len(weights), -1, weights.shape[-1])
    outputs = lax.ragged_dot_general(
        inputs, rows, counts, numbers, precision=exact(inputs.dtype), preferred_element_type=inputs.dtype
    )
    return outputs.reshape(len(inputs), *weights.shape[1:-1])


def take_rows(matrix: Matrix, ids: jax.Array) -> jax.Array:
    """Rows ``ids`` [...] of a ``matrix`` [V, E], in its dtype: [..., E]; ids outside it are clipped."""
    if isinstance(matrix, QuantisedMatrix):
        return take_quantised_rows(matrix, ids)
    return jnp.take(matrix, ids, axis=0, mode="clip")


def parameter(shape, axes, dtype) -> nnx.Param:
    """A zero parameter with logical axis names; values come from a checkpoint or :meth:`Decoder.init`."""
    return nnx.Param(jnp.zeros(shape, dtype), out_sharding=axes, eager_sharding=False)


def random_params(abstract: dict, key: jax.Array, scale: float | None = None) -> dict:
    """Parameters of the shapes in ``abstract``: vectors 1, the rest normal with ``scale`` (default: 1 / sqrt(last axis))."""
    leaves, treedef = jax.tree.flatten(abstract)

    def draw(key, leaf):
        if leaf.ndim == 1:
            return jnp.ones(leaf.shape, leaf.dtype)
        deviation = scale if scale is not None else 1.0 / math.sqrt(leaf.shape[-1])
        return (deviation * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)

    return jax.tree.unflatten(treedef, list(map(draw, jax.random.split(key, len(leaves)), leaves)))


@dataclasses.dataclass(frozen=True)
class Split:
    """Which parts of a decoder a device of a mesh axis has its share of; the sizes of the config are then those of the share.

    A product over what is split is a sum over the axis, in the dtype of the stream. With no axis nothing is split.

    Attributes:
      axis: name of the mesh axis; None: one device has everything.
      heads: whether attention heads, and with them the cache, are split.
      mlp: whether the width of the MLPs is.
      vocab: whether the rows of the embedding and of the output matrix are.
    """

    axis: str | None = None
    heads: bool = False
    mlp: bool = False
    vocab: bool = False

    def over(self, part: bool) -> str | None:
        """The axis whose devices each have a share of the inputs of the ``part``; None where each has all of them."""
        return self.axis if part else None

    def summed(self, part: bool, values: jax.Array) -> jax.Array:
        """``values``, added up over the axis where the ``part`` that they were made of is split."""
        return lax.psum(values, self.axis) if part else values

    def embed(self, matrix: Matrix, tokens: jax.Array) -> jax.Array:
        """Rows of the embedding, of which ``matrix`` [V, E] is this device's share; ids outside the vocabulary are clipped."""
        if not self.vocab:
            return take_rows(matrix, tokens)
        share = matrix.shape[0]
        places = jnp.clip(tokens, 0, share * lax.axis_size(self.axis) - 1) - share * lax.axis_index(self.axis)
        here = (places >= 0) & (places < share)
        rows = take_rows(matrix, jnp.where(here, places, 0))
        # All but one of the shares add zeros: the sum is exact.
        return lax.psum(jnp.where(here[..., None], rows, 0), self.axis)


WHOLE = Split()
