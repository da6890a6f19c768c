"""The part of a layer that looks at one token alone: a gated MLP, or a mixture of them.

Letters in shapes: B rows, T tokens of a pass, E width, F MLP width, X experts.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from specjax.models.config import DecoderConfig
from specjax.models.products import WHOLE, Split, contract, contract_by_group, parameter

ACTIVATION_FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": nnx.silu,
    "gelu_tanh": functools.partial(nnx.gelu, approximate=True),
}


def gated(projected: jax.Array, activation: str) -> jax.Array:
    """``projected`` [..., 2, F], gate and up, joined to [..., F] in at least float32."""
    wide = projected.astype(jnp.promote_types(projected.dtype, jnp.float32))
    return ACTIVATION_FUNCTIONS[activation](wide[..., 0, :]) * wide[..., 1, :]


class GatedMLP(nnx.Module):
    """Gated MLP (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, config: DecoderConfig, dtype, split: Split = WHOLE):
        self.split, self.activation, self.parts = split, config.activation, config.product_parts
        self.gate_up = parameter((2, config.mlp_width, config.width), ("gate_up", "mlp", "embed"), dtype)
        self.down = parameter((config.width, config.mlp_width), ("embed", "mlp"), dtype)

    def __call__(self, inputs):
        joined = gated(contract(inputs, self.gate_up[...], parts=self.parts), self.activation).astype(inputs.dtype)
        return contract(joined, self.down[...], parts=self.parts, over=self.split.over(self.split.mlp))


class ExpertsMLP(nnx.Module):
    """A mixture of gated MLPs (Shazeer et al. 2017, arXiv:1701.06538): a router sends every token to a few of them.

    Tokens are sorted by expert, so that the products of each run over its own tokens; X experts of width F.
    """

    def __init__(self, config: DecoderConfig, dtype, split: Split = WHOLE):
        assert config.experts is not None, "a layer without experts has a GatedMLP"
        self.split, self.activation, self.experts = split, config.activation, config.experts
        count, mlp, width = config.experts.num_experts, config.mlp_width, config.width
        self.router = parameter((count, width), ("experts", "embed"), dtype)
        self.gate_up = parameter((count, 2, mlp, width), ("experts", "gate_up", "mlp", "embed"), dtype)
        self.down = parameter((count, width, mlp), ("experts", "embed", "mlp"), dtype)

    def __call__(self, inputs):
        count, active = self.experts.num_experts, self.experts.num_active
        rows = inputs.reshape(-1, inputs.shape[-1])
        scores = contract(rows, self.router[...], dtype=jnp.promote_types(inputs.dtype, jnp.float32))
        shares, chosen = lax.top_k(jax.nn.softmax(scores, axis=-1), active)
        if self.experts.renormalise:
            shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
        chosen = chosen.reshape(-1)
        order = jnp.argsort(chosen)
        counts = jnp.bincount(chosen, length=count).astype(jnp.int32)
        projected = contract_by_group(rows[order // active], self.gate_up[...], counts)
        joined = gated(projected, self.activation).astype(inputs.dtype)
        outputs = contract_by_group(joined, self.down[...], counts, over=self.split.over(self.split.mlp))
        # Back in the order of the tokens: [rows, active, E].
        outputs = jnp.zeros_like(outputs).at[order].set(outputs, unique_indices=True).reshape(*shares.shape, -1)
        mixed = jnp.sum(outputs.astype(shares.dtype) * shares[..., None], axis=1).astype(inputs.dtype)
        return self.split.summed(self.split.mlp, mixed.reshape(inputs.shape))
