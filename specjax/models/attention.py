"""Attention of a pass over the committed cache and within itself, with rotary positions.

Letters in shapes: B rows, T tokens of a pass, S cache capacity, E width, K key/value heads, G query heads per key/value head,
D head size.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from specjax.cache import first_entries
from specjax.models.config import DecoderConfig
from specjax.models.norm import RMSNorm
from specjax.models.products import WHOLE, Split, contract, exact, parameter


def rotate(heads: jax.Array, positions: jax.Array, frequencies, magnitude: float = 1.0) -> jax.Array:
    """Rotary embedding of ``heads`` [B, T, ..., D] at ``positions`` [B, T], half-split layout, in at least float32.

    The result is multiplied with ``magnitude``.
    """
    compute_dtype = jnp.promote_types(heads.dtype, jnp.float32)
    angles = positions[..., None].astype(compute_dtype) * jnp.asarray(frequencies, compute_dtype)[None, None]
    angles = angles.reshape(angles.shape[:2] + (1,) * (heads.ndim - 3) + angles.shape[2:])
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    first, second = jnp.split(heads.astype(compute_dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(heads.dtype)


def soft_cap(values: jax.Array, cap: float | jax.Array | None) -> jax.Array:
    """``values`` drawn smoothly into (-cap, cap); None leaves them alone.

    Example:
      >>> soft_cap(jnp.array([0.01, 1000.0]), 5.0).round(3).tolist()
      [0.01..., 5.0]
    """
    return values if cap is None else cap * jnp.tanh(values / cap)


LEAST_PART = 256
"""Entries of a cache below which leaving some out saves nothing."""


def attend(
    query, block_keys, block_values, cache_keys, cache_values, lengths, block_mask, *, since=None, scale=None, cap=None
) -> jax.Array:
    """Attention over the committed cache and within the block, without joining the two.

    Args:
      query: [B, T, K, G, D].
      block_keys: [B, K, T', D], T' is T but where a block attends to more than itself.
      block_values: [B, K, T', D].
      cache_keys: [B, K, S, D], an array or some heads of one.
      cache_values: [B, K, S, D], likewise.
      lengths: [B], valid entries of the cache.
      block_mask: [T, T'] or [B, T, T'] bool.
      since: [B, T], the first entry of the cache that each token attends to; None: the first of all.
      scale: what scores are multiplied with; None: 1 / sqrt(D).
      cap: soft cap of the scores; None: none.

    Returns:
      [B, T, K, G, D] in the dtype of the query.
    """
    options = {"since": since, "scale": scale, "cap": cap}

    def over(used):
        keys, values = first_entries(cache_keys, used), first_entries(cache_values, used)
        return _attend_to_all(query, block_keys, block_values, keys, values, lengths, block_mask, **options)

    sizes = used_sizes(cache_keys.shape[2])
    if len(sizes) == 1:
        return over(sizes[0])
    # What lies behind the longest row is not even read.
    enough = jnp.searchsorted(jnp.array(sizes), jnp.minimum(jnp.max(lengths), sizes[-1]))
    return lax.switch(enough, [functools.partial(over, used) for used in sizes])


def used_sizes(capacity: int) -> tuple[int, ...]:
    """Parts of a cache, ascending, that a pass may be over: the whole, and its halves, quarters and eighths down to 256 entries.

    Example:
      >>> used_sizes(200), used_sizes(1023), used_sizes(8192)
      ((200,), (256, 512, 1023), (1024, 2048, 4096, 8192))
    """
    sizes = {-(-capacity // share) for share in (1, 2, 4, 8)}
    return tuple(sorted(size for size in sizes if size >= LEAST_PART or size == capacity))


def _attend_to_all(query, block_keys, block_values, cache_keys, cache_values, lengths, block_mask, *, since, scale, cap):
    """:func:`attend` over all of ``cache_keys`` and ``cache_values``."""
    score_dtype = jnp.promote_types(query.dtype, jnp.float32)
    product = functools.partial(jnp.einsum, precision=exact(query.dtype), preferred_element_type=score_dtype)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    capacity = cache_keys.shape[2]

    def scores(keys, mask):
        return jnp.where(mask, soft_cap(product("btkgd,bksd->bkgts", query, keys) * scale, cap), -jnp.inf)

    block_mask = block_mask if block_mask.ndim == 3 else block_mask[None]
    in_cache = (jnp.arange(capacity)[None, :] < lengths[:, None])[:, None, None, None, :]
    if since is not None:
        in_cache = in_cache & (jnp.arange(capacity)[None, None, :] >= since[:, :, None])[:, None, None]
    cache_scores = scores(cache_keys, in_cache)
    block_scores = scores(block_keys, block_mask[:, None, None])
    # Every token attends to itself, so the maximum is finite even over an empty cache.
    top = jnp.maximum(jnp.max(cache_scores, -1, keepdims=True, initial=-jnp.inf), jnp.max(block_scores, -1, keepdims=True))
    cache_weights = jnp.exp(cache_scores - top)
    block_weights = jnp.exp(block_scores - top)
    total = jnp.sum(cache_weights, -1) + jnp.sum(block_weights, -1)

    def mix(weights, values):
        # This order of the output, because XLA's CPU backend has no half-precision product that also moves batch axes.
        return product("bkgts,bksd->bkgtd", weights.astype(values.dtype), values).transpose(0, 3, 1, 2, 4)

    mixed = mix(cache_weights, cache_values) + mix(block_weights, block_values)
    return (mixed / total.transpose(0, 3, 1, 2)[..., None]).astype(query.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, over the whole text or, in a local layer, over a window of it.

    Its inputs may be wider than the residual stream: the draft head's are a token and a state side by side.
    """

    def __init__(self, config: DecoderConfig, dtype, input_width: int | None = None, split: Split = WHOLE, local: bool = False):
        self.config, self.split = config, split
        self.window = config.window if local else None
        self.rope = config.local_rope if local and config.local_rope is not None else config.rope
        heads, group, size, width = config.num_kv_heads, config.group_size, config.head_dim, input_width or config.width
        self.qkv = parameter((heads, group + 2, size, width), ("kv_heads", "group", "head_dim", "embed"), dtype)
        if config.qkv_bias:
            self.qkv_bias = parameter((heads, group + 2, size), ("kv_heads", "group", "head_dim"), dtype)
        if config.query_key_norm:
            self.query_norm = RMSNorm(size, config.norm_eps, dtype, "head_dim")
            self.key_norm = RMSNorm(size, config.norm_eps, dtype, "head_dim")
        self.out = parameter((config.width, heads * group * size), ("embed", "heads"), dtype)

    def project(self, inputs, positions):
        """Queries [B, T, K, G, D], keys [B, K, T, D] and values [B, K, T, D]; the first two turned to their positions."""
        projected = contract(inputs, self.qkv[...], parts=self.config.product_parts)
        if self.config.qkv_bias:
            projected = projected + self.qkv_bias[...][None, None]
        heads = projected[..., :-1, :]
        if self.config.query_key_norm:
            heads = jnp.concatenate([self.query_norm(heads[..., :-1, :]), self.key_norm(heads[..., -1:, :])], axis=-2)
        # Query heads and the key head turn by the same angles: [B, T, K, G + 1, D].
        turned = rotate(heads, positions, self.rope.frequencies(self.config.head_dim), self.rope.magnitude)
        return turned[..., :-1, :], turned[..., -1, :].swapaxes(1, 2), projected[..., -1, :].swapaxes(1, 2)

    def join(self, mixed):
        """[B, T, E] of the heads' results [B, T, K, G, D]."""
        over = self.split.over(self.split.heads)
        mixed = mixed.reshape(*mixed.shape[:2], -1)
        return contract(mixed, self.out[...], parts=self.config.product_parts, over=over)

    def __call__(self, inputs, positions, cache_keys, cache_values, lengths, block_mask):
        query, keys, values = self.project(inputs, positions)
        since = None
        if self.window is not None:
            # By position, not by place in the pass: siblings of a tree have the same window.
            since = positions - (self.window - 1)
            block_mask = block_mask if block_mask.ndim == 3 else block_mask[None]
            block_mask = block_mask & (positions[:, None, :] >= since[:, :, None])
        options = {"since": since, "scale": self.config.attention_scale, "cap": self.config.attention_soft_cap}
        mixed = attend(query, keys, values, cache_keys, cache_values, lengths, block_mask, **options)
        return self.join(mixed), keys, values
