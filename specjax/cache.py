"""Preallocated key/value cache with a length per row.

Letters in shapes: B rows, L layers, K key/value heads, S capacity, D head size, T tokens of one pass, C chosen tokens.

The cache holds *committed* tokens only. A pass reads it and returns its own keys and values as a :class:`KVBlock`; the
round then commits the entries of the accepted path and nothing else::

    lengths = [3, 5]           entries 0..length-1 are valid, whatever lies behind is never attended to

    row 0  | a b c . . . . . |      commit(block, nodes=[[0, 2], [0, 1]], counts=[2, 1])
    row 1  | p q r s t . . . |

    row 0  | a b c n0 n2 . . . |    lengths = [5, 6]
    row 1  | p q r s t n0 . . |     node 1 of row 1 was not counted, so it was not written

Rolling back is a smaller length: nothing is moved and nothing is cleared.
"""

import functools

import chex
import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

LANES = 128
"""Numbers that a TPU has side by side. It stores the cache of smaller heads with S along them, where a scatter would first copy
all of the cache to another order and then back."""

FEW_TOKENS = 32
"""Up to so many chosen tokens are then written one by one; a copy is worth it for the many of a prompt."""


@flax.struct.dataclass
class KVBlock:
    """Keys and values of the tokens of one pass, not (yet) committed.

    Attributes:
      keys: L arrays [B, K, T, D], rotary embedding applied; where layers are scanned one of all their heads, [B, L * K, T, D].
      values: L arrays [B, K, T, D].
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


@flax.struct.dataclass
class SomeHeads:
    """Neighbouring heads of a cache, cut out of it only where they are read.

    Attributes:
      array: [B, heads, S, D].
      first: int32, number of the first.
      count: K, how many.
    """

    array: jax.Array
    first: jax.Array
    count: int = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """[B, K, S, D]."""
        return (self.array.shape[0], self.count, *self.array.shape[2:])


def _as_stored(array: jax.Array) -> jax.Array:
    """A cache [B, heads, S, D] in the order in which a TPU has it."""
    order = (0, 1, 3, 2) if array.shape[3] % LANES else (0, 1, 2, 3)
    return with_layout_constraint(array, Layout(major_to_minor=order))


def first_entries(cached: jax.Array | SomeHeads, used: int) -> jax.Array:
    """[B, K, used, D] of a layer's keys or values [B, K, S, D].

    Example:
      >>> heads = jnp.arange(6).reshape(1, 3, 2, 1)
      >>> first_entries(SomeHeads(heads, jnp.int32(1), count=2), used=1).tolist()
      [[[[2]], [[4]]]]
    """
    if not isinstance(cached, SomeHeads):
        return cached[:, :, :used]
    # Of one type, also where whole numbers are 64 bits wide.
    zero = jnp.int32(0)
    sizes = (cached.shape[0], cached.count, used, cached.shape[3])
    # Unasked, the TPU compiler brings the heads of each turn together first, in a copy of the whole cache.
    array = lax.platform_dependent(cached.array, tpu=_as_stored, default=lambda array: array)
    return lax.dynamic_slice(array, (zero, cached.first.astype(jnp.int32), zero, zero), sizes)


@flax.struct.dataclass
class KVCache:
    """Keys and values of committed tokens.

    Attributes:
      keys: L arrays [B, K, S, D]; entry ``s`` of row ``b`` is valid where ``s < lengths[b]``. Where layers are scanned (see
        :class:`specjax.models.config.DecoderConfig`) it is one array of the heads of all of them, [B, L * K, S, D].
      values: L arrays [B, K, S, D], likewise.
      lengths: [B] int32, number of valid entries.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    lengths: jax.Array

    @classmethod
    def zeros(cls, num_layers: int, batch: int, num_kv_heads: int, capacity: int, head_dim: int, dtype) -> "KVCache":
        """An empty cache.

        Example:
          >>> cache = KVCache.zeros(2, batch=1, num_kv_heads=1, capacity=8, head_dim=4, dtype=jnp.float32)
          >>> cache.capacity, cache.lengths.tolist()
          (8, [0])
        """
        shape = (batch, num_kv_heads, capacity, head_dim)
        return cls(
            keys=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
            values=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
            lengths=jnp.zeros((batch,), jnp.int32),
        )

    @property
    def capacity(self) -> int:
        """S, entries per row."""
        return self.keys[0].shape[2]

    def commit(self, block: KVBlock, nodes: jax.Array, counts: jax.Array) -> "KVCache":
        """Writes chosen entries of a block behind each row's length.

        Args:
          block: keys and values of the pass.
          nodes: [B, C] int32, which tokens of the block, in the order of their positions.
          counts: [B] int32, how many of them (0 to C).

        Returns:
          The cache with ``lengths + counts``, at most the capacity. An entry that would fall behind the capacity is
          dropped; it never displaces another (``dynamic_update_slice`` would shift the write and destroy two).
        """
        batch, num_chosen = nodes.shape
        chex.assert_shape(counts, (batch,))
        chex.assert_shape(self.lengths, (batch,))
        arrays = self.keys, self.values, block.keys, block.values, self.lengths, nodes, counts
        head_dim = self.keys[0].shape[3] if self.keys else LANES
        on_tpu = _write_one_by_one if head_dim % LANES and num_chosen <= FEW_TOKENS else _scatter_by_head
        keys, values = lax.platform_dependent(*arrays, tpu=on_tpu, default=_scatter)
        return KVCache(keys, values, lengths=jnp.minimum(self.lengths + counts, self.capacity))

    def roll_back(self, lengths: jax.Array) -> "KVCache":
        """Shortens rows to at most ``lengths`` [B]; a row that is shorter already stays as it is.

        Example:
          >>> cache = KVCache.zeros(1, batch=2, num_kv_heads=1, capacity=8, head_dim=2, dtype=jnp.float32)
          >>> cache = cache.replace(lengths=jnp.array([5, 2]))
          >>> cache.roll_back(jnp.array([3, 4])).lengths.tolist()
          [3, 2]
        """
        return self.replace(lengths=jnp.minimum(self.lengths, lengths))


def _scatter(keys, values, block_keys, block_values, lengths, nodes, counts):
    """The caches' keys and values with what was chosen of a block's."""
    batch, num_chosen = nodes.shape
    slot, row = jnp.arange(num_chosen)[None, :], jnp.arange(batch)[:, None]

    def write(cached, fresh):
        # Out of range means "do not write": a scatter drops such entries.
        position = jnp.where(slot < counts[:, None], lengths[:, None] + slot, cached.shape[2])
        chosen = jnp.take_along_axis(fresh, nodes[:, None, :, None], axis=2)
        # Advanced indices separated by a slice put their axes first: [B, C, K, D].
        return cached.at[row, :, position].set(chosen.swapaxes(1, 2).astype(cached.dtype), mode="drop", unique_indices=True)

    return tuple(map(write, keys, block_keys)), tuple(map(write, values, block_values))


def _scatter_by_head(keys, values, block_keys, block_values, lengths, nodes, counts):
    """The same with the heads of a token written one by one: in memory they are far apart.

    A TPU would bring them together first, in a copy of all of the cache.
    """
    batch, num_chosen = nodes.shape
    slot, row = jnp.arange(num_chosen)[None, :], jnp.arange(batch)[:, None, None]

    def write(cached, fresh):
        position = jnp.where(slot < counts[:, None], lengths[:, None] + slot, cached.shape[2])[:, None]
        chosen = jnp.take_along_axis(fresh, nodes[:, None, :, None], axis=2).astype(cached.dtype)
        head = jnp.arange(cached.shape[1])[None, :, None]
        return cached.at[row, head, position].set(chosen, mode="drop", unique_indices=True)

    return tuple(map(write, keys, block_keys)), tuple(map(write, values, block_values))


def _write_one_by_one(keys, values, block_keys, block_values, lengths, nodes, counts):
    """The same, token by token in place, as many as some row has; the caches in the order in which a TPU has them."""
    in_order = functools.partial(with_layout_constraint, layouts=Layout(major_to_minor=(0, 1, 3, 2)))
    batch, last = lengths.shape[0], keys[0].shape[2] - 1

    def write(index, caches):
        slot, row = index // batch, index % batch
        position = lengths[row] + slot
        there = (slot < counts[row]) & (position <= last)
        # Of one type, also where whole numbers are 64 bits wide.
        row, position, node, first = (jnp.int32(n) for n in (row, jnp.minimum(position, last), nodes[row, slot], 0))

        def one(cached, fresh):
            size = (1, cached.shape[1], 1, cached.shape[3])
            place = (row, first, position, first)
            entry = lax.dynamic_slice(fresh, (row, first, node, first), size).astype(cached.dtype)
            entry = jnp.where(there, entry, lax.dynamic_slice(cached, place, size))
            return in_order(lax.dynamic_update_slice(cached, entry, place))

        return jax.tree.map(one, caches, (block_keys, block_values))

    # Unasked, the compiler gives the loop arrays of the usual order, and copies all of them before it and behind it.
    caches = jax.tree.map(in_order, (keys, values))
    return lax.fori_loop(0, batch * jnp.max(counts, initial=0), write, caches)
