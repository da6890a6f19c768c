import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax.cache as cache_module
from specjax.cache import KVBlock, KVCache

LAYERS, HEADS, SIZE = 2, 3, 4


def numbered(kind, batch, tokens, start=0):
    """Arrays [B, K, T, D] that differ in every entry, between layers, and between keys and values."""
    shape = (batch, HEADS, tokens, SIZE)
    return tuple(kind(start + layer * 1000 + np.arange(np.prod(shape)).reshape(shape), jnp.float32) for layer in range(LAYERS))


def filled(batch, capacity, lengths):
    cache = KVCache(
        keys=numbered(jnp.asarray, batch, capacity),
        values=numbered(jnp.asarray, batch, capacity, 10_000),
        lengths=jnp.array(lengths),
    )
    assert cache.capacity == capacity
    return cache


def block_of(batch, tokens):
    return KVBlock(keys=numbered(jnp.asarray, batch, tokens, 50_000), values=numbered(jnp.asarray, batch, tokens, 70_000))


def check(before, after, block, written, lengths):
    """``written`` maps (row, position) to the node that must stand there; all the rest must be bit-equal to before."""
    assert after.lengths.tolist() == lengths
    for name in ("keys", "values"):
        for old, new, fresh in zip(getattr(before, name), getattr(after, name), getattr(block, name), strict=True):
            expected = np.array(old)
            for (row, position), node in written.items():
                expected[row, :, position] = fresh[row, :, node]
            np.testing.assert_array_equal(new, expected)


def test_a_new_cache_is_empty():
    cache = KVCache.zeros(LAYERS, batch=2, num_kv_heads=HEADS, capacity=5, head_dim=SIZE, dtype=jnp.bfloat16)
    assert len(cache.keys) == len(cache.values) == LAYERS
    assert cache.keys[1].shape == cache.values[1].shape == (2, HEADS, 5, SIZE)
    assert cache.keys[0].dtype == jnp.bfloat16
    assert cache.lengths.tolist() == [0, 0]
    assert cache.lengths.dtype == jnp.int32


def test_commit_writes_behind_each_row():
    cache, block = filled(2, 8, [3, 5]), block_of(2, 4)
    after = cache.commit(block, jnp.array([[0, 1, 2, 3], [0, 1, 2, 3]]), jnp.array([4, 2]))
    check(cache, after, block, {(0, 3): 0, (0, 4): 1, (0, 5): 2, (0, 6): 3, (1, 5): 0, (1, 6): 1}, [7, 7])


def test_commit_of_a_branch():
    cache, block = filled(3, 8, [3, 5, 0]), block_of(3, 4)
    # Row 0 took the second branch, row 1 the first, row 2 nothing.
    after = cache.commit(block, jnp.array([[0, 2], [0, 1], [0, 3]]), jnp.array([2, 1, 0]))
    check(cache, after, block, {(0, 3): 0, (0, 4): 2, (1, 5): 0}, [5, 6, 0])


def test_commit_beyond_the_capacity_destroys_nothing():
    cache, block = filled(1, 8, [6]), block_of(1, 4)
    after = cache.commit(block, jnp.arange(4)[None], jnp.array([4]))
    check(cache, after, block, {(0, 6): 0, (0, 7): 1}, [8])


def test_the_last_slot_is_usable_and_a_full_row_stays():
    cache, block = filled(2, 8, [7, 8]), block_of(2, 2)
    after = cache.commit(block, jnp.array([[1, 0], [0, 1]]), jnp.array([1, 2]))
    check(cache, after, block, {(0, 7): 1}, [8, 8])


def test_commit_of_nothing():
    cache, block = filled(2, 8, [3, 8]), block_of(2, 3)
    check(cache, cache.commit(block, jnp.array([[0, 1], [2, 2]]), jnp.zeros(2, jnp.int32)), block, {}, [3, 8])


def test_roll_back_then_commit_overwrites():
    cache, block = filled(2, 8, [6, 2]), block_of(2, 1)
    shorter = cache.roll_back(jnp.array([4, 7]))
    check(cache, shorter, block, {}, [4, 2])
    after = shorter.commit(block, jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32))
    check(cache, after, block, {(0, 4): 0, (1, 2): 0}, [5, 3])


def test_commit_keeps_the_dtype_of_the_cache():
    cache = KVCache.zeros(LAYERS, batch=1, num_kv_heads=HEADS, capacity=4, head_dim=SIZE, dtype=jnp.bfloat16)
    after = cache.commit(block_of(1, 2), jnp.array([[1]]), jnp.array([1]))
    assert {leaf.dtype for leaf in (*after.keys, *after.values)} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(after.keys[0][0, :, 0], block_of(1, 2).keys[0][0, :, 1].astype(jnp.bfloat16))


def test_counts_must_match_the_rows():
    with pytest.raises(AssertionError):
        filled(2, 8, [3, 5]).commit(block_of(2, 1), jnp.zeros((2, 1), jnp.int32), jnp.ones(3, jnp.int32))


@pytest.mark.filterwarnings("error")
def test_a_donated_commit_copies_no_cache():
    cache, block = filled(2, 64, [3, 60]), block_of(2, 6)
    nodes, counts = jnp.broadcast_to(jnp.arange(6), (2, 6)), jnp.array([6, 5])
    expected = jax.tree.map(np.array, cache.commit(block, nodes, counts))
    # "Some donated buffers were not usable" is a warning, and so an error here.
    commit = jax.jit(KVCache.commit, donate_argnums=0).lower(cache, block, nodes, counts).compile()
    shape = f"f32[2,{HEADS},64,{SIZE}]"
    copies = [line for line in commit.as_text().splitlines() if " copy(" in line and f"= {shape}" in line]
    assert not copies
    addresses = [leaf.unsafe_buffer_pointer() for leaf in (*cache.keys, *cache.values)]
    after = commit(cache, block, nodes, counts)
    assert [leaf.unsafe_buffer_pointer() for leaf in (*after.keys, *after.values)] == addresses
    assert all(leaf.is_deleted() for leaf in (*cache.keys, *cache.values))
    jax.tree.map(np.testing.assert_array_equal, after, expected)


@pytest.mark.parametrize("on_tpu", [cache_module._write_one_by_one, cache_module._scatter_by_head])
def test_what_a_tpu_does_is_the_same(on_tpu):
    # In place of the usual scatter, here on whatever runs the tests.
    cache, block = filled(5, 8, [3, 5, 0, 6, 8]), block_of(5, 4)
    nodes = jnp.array([[0, 2, 3], [0, 1, 2], [0, 3, 1], [0, 1, 2], [0, 1, 2]])
    arrays = (cache.keys, cache.values, block.keys, block.values, cache.lengths, nodes, jnp.array([2, 1, 0, 3, 1]))
    expected = jax.jit(cache_module._scatter)(*arrays)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(on_tpu)(*arrays), expected)
    assert not np.array_equal(expected[0][0], cache.keys[0])
