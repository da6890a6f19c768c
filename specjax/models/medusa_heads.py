"""Medusa heads (Cai et al. 2024, arXiv:2401.10774, section 2.1): one guess for each of the next places, all from one state.

Which state and which place is the commonest mistake in writing them down. With the newest committed token r (the root of the
draft) the target's newest hidden state is that of r's *predecessor*: its own output made r. Head k speaks of the token k places
after r::

    text            ...  p    r    ?    ?    ?
    place               i   i+1  i+2  i+3  i+4
    hidden state        h_i                           the target has not seen r yet: the verify pass feeds it
    target's output      -> r
    head 1               -------> x_{i+2}             the child of the root
    head 2               ------------> x_{i+3}
    head 3               -----------------> x_{i+4}

A head is any number of residual blocks x + SiLU(W x + b), none of them for a single linear layer, and an output matrix, its own
or the target's.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from specjax.models.draft_vocabulary import widen
from specjax.models.products import contract, exact


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """Sizes of Medusa heads.

    Attributes:
      width: E, of the target's hidden states.
      vocab_size: V, of the target's logits.
      num_heads: N; head k proposes the token k places after the root.
      num_blocks: residual blocks of each head; with 0 the heads are single linear layers and need output matrices of their own.
      draft_vocab_size: R, tokens that the heads know; None is all.
      own_output: whether each head has an output matrix of its own, instead of the target's.

    Raises:
      ValueError: names the field, its value and the range.
    """

    width: int
    vocab_size: int
    num_heads: int = 4
    num_blocks: int = 1
    draft_vocab_size: int | None = None
    own_output: bool = False

    def __post_init__(self):
        for name, least in (("width", 1), ("vocab_size", 1), ("num_heads", 1), ("num_blocks", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"MedusaConfig: {name} is {value!r}; it must be a whole number of at least {least}")
        size = self.draft_vocab_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= self.vocab_size):
            raise ValueError(f"MedusaConfig: draft_vocab_size is {size!r}; it must be None or from 1 to {self.vocab_size}")
        if self.num_blocks == 0 and not self.own_output:
            raise ValueError(
                "MedusaConfig: num_blocks is 0 and own_output is False; heads without blocks need output matrices of their own"
            )

    @property
    def output_size(self) -> int:
        """R, or V where the heads know all tokens."""
        return self.draft_vocab_size or self.vocab_size


@dataclasses.dataclass(frozen=True)
class MedusaHeads:
    """The pure functions of the heads: hashable, without parameters.

    Parameters: ``blocks`` (for each block ``weight`` [N, E, E] and ``bias`` [N, E]), ``output`` [N, R, E] where heads have their
    own. What is shared comes beside them: ``shared["output"]`` [R, E] rows of the target's matrix, ``shared["ids"]`` [R] int32
    the tokens that the heads know, None for all.

    Example:
      >>> heads = MedusaHeads(MedusaConfig(width=8, vocab_size=11, num_heads=2, own_output=True))
      >>> params = heads.init(jax.random.key(0))
      >>> heads.logits(params, {"ids": None}, jnp.ones((3, 8))).shape
      (3, 2, 11)
    """

    config: MedusaConfig
    kind: ClassVar[str] = "medusa"

    @property
    def shared_names(self) -> tuple[str, ...]:
        """The matrices of the target that they read."""
        return () if self.config.own_output else ("output",)

    def abstract_params(self, dtype=jnp.float32) -> dict:
        """The parameters' nested dict with a ``jax.ShapeDtypeStruct`` for each array."""
        config = self.config
        heads, width = config.num_heads, config.width
        block = {
            "weight": jax.ShapeDtypeStruct((heads, width, width), dtype),
            "bias": jax.ShapeDtypeStruct((heads, width), dtype),
        }
        params: dict[str, Any] = {"blocks": {index: dict(block) for index in range(config.num_blocks)}}
        if config.own_output:
            params["output"] = jax.ShapeDtypeStruct((heads, config.output_size, width), dtype)
        return params

    def init(self, key: jax.Array, dtype=jnp.float32, output: jax.Array | None = None) -> dict:
        """Parameters to start from: blocks that pass the state on unchanged, so that a head says at first what the target says.

        Args:
          key: for the output matrices, where the heads have their own and none is given.
          dtype: of the parameters.
          output: [R, E], what the heads' own output matrices start from.
        """
        config = self.config
        params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.abstract_params(dtype))
        if config.own_output:
            if output is None:
                output = jax.random.normal(key, (config.output_size, config.width)) * config.width**-0.5
            params["output"] = jnp.broadcast_to(output.astype(dtype), params["output"].shape)
        return params

    def states(self, params, hidden: jax.Array) -> jax.Array:
        """[..., N, E] what each head makes of the target's ``hidden`` [..., E]."""
        leading = hidden.shape[:-1]
        # Heads first, as a batched product wants them.
        states = jnp.broadcast_to(hidden.reshape(1, -1, hidden.shape[-1]), (self.config.num_heads, *self._rows(hidden)))
        for index in range(self.config.num_blocks):
            block = params["blocks"][index]
            moved = _per_head(states, block["weight"]) + block["bias"][:, None]
            states = states + jax.nn.silu(moved.astype(jnp.promote_types(moved.dtype, jnp.float32))).astype(states.dtype)
        return jnp.moveaxis(states, 0, 1).reshape(*leading, self.config.num_heads, -1)

    def _rows(self, hidden):
        return (hidden.size // hidden.shape[-1], hidden.shape[-1])

    def logits(self, params, shared: dict, hidden: jax.Array) -> jax.Array:
        """Logits [..., N, R] of every head, at least float32, for the target's ``hidden`` [..., E]."""
        states = self.states(params, hidden)
        dtype = jnp.promote_types(states.dtype, jnp.float32)
        if not self.config.own_output:
            return contract(states, shared["output"], dtype=dtype)
        by_head = jnp.moveaxis(states.reshape(-1, *states.shape[-2:]), 1, 0)
        return jnp.moveaxis(_per_head(by_head, params["output"], dtype), 0, 1).reshape(*states.shape[:-1], -1)

    def widen(self, logits: jax.Array, shared: dict, width: int) -> jax.Array:
        """``logits`` [..., R] over the target's ids, [..., width]."""
        return widen(logits, shared["ids"], width)


def _per_head(inputs, weights, dtype=None):
    """``inputs`` [N, rows, E] times ``weights`` [N, out, E]: [N, rows, out]."""
    return jax.lax.dot_general(
        inputs,
        weights,
        (((2,), (2,)), ((0,), (0,))),
        precision=exact(inputs.dtype),
        preferred_element_type=dtype or inputs.dtype,
    )
