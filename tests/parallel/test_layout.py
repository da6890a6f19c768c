"""A round over a mesh emits what it emits on one device, and its collectives are those that were meant."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import prefill, run_rounds
from specjax.drafters import draft_model, prompt_lookup
from specjax.tree import DraftTree
from tests.parallel.shared import MESHES, close_to, decoder, run_all, started

TREE = DraftTree((-1, 0, 0, 1))
CLOSE = close_to(decoder())
DRAFTERS = {
    "none": lambda: None,
    "lookup": lambda: prompt_lookup(3, prompt_lookup_min=1),
    "chain": lambda: draft_model(CLOSE, 2),
    "tree": lambda: draft_model(CLOSE, tree=TREE),
}
RULES = {"tree": "without_replacement"}


@functools.cache
def on_one_device(name):
    """Tokens, statistics, and what the last dispatch reported."""
    _, program, params, state = started(decoder(), DRAFTERS[name](), None, RULES.get(name, "auto"))
    tokens, state, info = run_all(program, params, state)
    return tokens, jax.device_get(state.counters), jax.device_get(info)


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all-meshes")
        some = [("none", (8, 1)), ("lookup", (2, 4)), ("tree", (1, 8))]  # a chain on 4x2: test_engine.py
        cases = [(name, mesh) for name in DRAFTERS for mesh in MESHES] if every else some
        metafunc.parametrize("case", cases, ids=[f"{name}-{data}x{model}" for name, (data, model) in cases])


def test_a_mesh_gives_the_tokens_of_one_device(case):
    name, mesh = case
    expected, counted, reported = on_one_device(name)
    before = run_rounds._cache_size(), prefill._cache_size()
    _, program, params, state = started(decoder(), DRAFTERS[name](), mesh, RULES.get(name, "auto"))
    tokens, state, info = run_all(program, params, state)
    assert tokens == expected
    there = reported.tokens >= 0
    assert np.any(there)
    for ours, theirs in zip(jax.tree.leaves(info.logprobs), jax.tree.leaves(reported.logprobs), strict=True):
        np.testing.assert_allclose(np.asarray(ours)[there], theirs[there], atol=1e-3)
    if name in ("chain", "tree"):
        assert np.sum(counted.num_accepted_tokens_per_pos) > 10
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-3), jax.device_get(state.counters), counted)
    assert (run_rounds._cache_size() - before[0], prefill._cache_size() - before[1]) == (1, 1)
    # Every device holds its share of the cache and of the weights, and no more.
    data, model = mesh
    keys = state.cache.keys[0]
    assert {shard.data.shape for shard in keys.addressable_shards} == {(8 // data, 8 // model, *keys.shape[2:])}
    gate_up = params.target["layers"][0]["mlp"]["gate_up"]
    assert {shard.data.shape for shard in gate_up.addressable_shards} == {(2, 32 // model, 32)}
    assert info.tokens.sharding.shard_shape(info.tokens.shape)[0] == 8 // data


def lowered(drafter, mesh, target=None, **settings):
    _, program, params, state = started(target or decoder(), drafter, mesh, **settings)
    return run_rounds.lower(program, params, state, jnp.int32(1)).as_text()


def collectives(text, name):
    """Result types of the collectives of this ``name``."""
    found = re.findall(rf"stablehlo\.{name}\"?\(.*?(?:\n.*?)*?-> \(?(tensor<[^>]*>)", text)
    assert len(found) == text.count(f"stablehlo.{name}")
    return found


def test_logits_go_from_shares_of_the_vocabulary_to_shares_of_the_rows():
    text = lowered(None, (2, 4))
    # Four rows on each part of the data axis: one for each of the four devices that share the model.
    assert collectives(text, "all_to_all") == ["tensor<1x1x64xf32>"]
    gathered = collectives(text, "all_gather")
    assert gathered
    assert not any("64x" in result for result in gathered)
    # Two of the layer, and the embedding; the others are the decisions that all devices take alike.
    sums = collectives(text, "all_reduce")
    assert len([result for result in sums if result == "tensor<4x1x32xf32>"]) == 3
    assert {result for result in sums if result != "tensor<4x1x32xf32>"} == {"tensor<i32>"}


def test_rows_alone_need_nothing_but_common_decisions():
    text = lowered(None, (8, 1))
    assert "all_to_all" not in text
    assert "all_gather" not in text
    assert set(collectives(text, "all_reduce")) == {"tensor<i32>"}


def test_rows_that_do_not_divide_are_judged_everywhere():
    """Eight rows over two parts are four; three devices do not divide them."""
    target = decoder(num_kv_heads=3, num_query_heads=9, mlp_width=48, vocab_size=66)
    _, one, params, state = started(target, None, None)
    expected, *_ = run_all(one, params, state)
    _, program, params, state = started(target, None, (2, 3))
    text = run_rounds.lower(program, params, state, jnp.int32(1)).as_text()
    assert "all_to_all" not in text
    assert "tensor<4x1x66xf32>" in collectives(text, "all_gather")
    assert run_all(program, params, state)[0] == expected


def test_what_does_not_divide_is_on_all_devices():
    """Three heads, an MLP of 30 and a vocabulary of 66 over four devices."""
    target = decoder(num_kv_heads=3, num_query_heads=9, mlp_width=30, vocab_size=66)
    _, one, params, state = started(target, None, None)
    expected, *_ = run_all(one, params, state)
    _, program, params, state = started(target, None, (2, 4))
    assert (program.target.split.heads, program.target.split.mlp, program.target.split.vocab) == (False, False, False)
    assert run_all(program, params, state)[0] == expected
    text = run_rounds.lower(program, params, state, jnp.int32(1)).as_text()
    assert "all_to_all" not in text
