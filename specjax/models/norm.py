"""The norm before and behind the parts of a layer."""

import jax.numpy as jnp
from flax import nnx
from jax import lax

from specjax.models.products import parameter


class RMSNorm(nnx.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467), in at least float32."""

    def __init__(self, width: int, eps: float, dtype, axis: str = "embed"):
        self.eps = eps
        self.scale = parameter((width,), (axis,), jnp.promote_types(dtype, jnp.float32))

    def __call__(self, inputs):
        wide = inputs.astype(self.scale.dtype)
        normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (normed * jnp.expand_dims(self.scale[...], tuple(range(inputs.ndim - 1)))).astype(inputs.dtype)
