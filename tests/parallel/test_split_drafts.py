"""Draft models that are split as the target is: tokens of one device, shares of weights and caches, few exchanges."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from specjax import Engine
from specjax.choices import KeyedChoices, Stream, coupled_draw
from specjax.decoding import prefill, run_rounds
from specjax.decoding.layout import Place
from specjax.drafters import draft_model, prompt_lookup, stacked
from specjax.drafters.draft_model import DraftModel
from specjax.models.other_vocabulary import with_other_ids
from specjax.models.shallow import keep_layers
from specjax.parallel import make_mesh, place_params, spread_round
from specjax.parallel.split_drafts import split_drafter
from specjax.row_trees import TreeBounds
from specjax.tree import DraftTree, Law
from tests import hash_model as tiny
from tests import heads
from tests.parallel.shared import close_to, decoder, run_all, several_requests, started
from tests.parallel.test_layout import collectives

TARGET = decoder()
CLOSE = close_to(TARGET)
TREE = DraftTree((-1, 0, 0, 1))
DRAFTERS = {
    "chain": lambda **split: draft_model(CLOSE, 3, **split),
    "tree": lambda **split: draft_model(CLOSE, tree=TREE, **split),
    "growing": lambda **split: draft_model(CLOSE, tree=TreeBounds(4, 2), **split),
    "stacked": lambda **split: stacked(prompt_lookup(3, prompt_lookup_min=1), draft_model(CLOSE, 2, **split)),
}
MESHES = [(2, 4), (1, 8)]
RULES = {
    "chain": ("token", "gumbel"),
    "tree": ("without_replacement", "gumbel"),
    "growing": ("gumbel",),
    "stacked": ("block", "gumbel"),
}
"""One that tests against q, where the drafter knows it, and the one that does not."""
SOME = [
    ("chain", "token", (2, 4)),
    ("tree", "without_replacement", (1, 8)),
    ("growing", "gumbel", (2, 4)),
    ("stacked", "gumbel", (1, 8)),
]


@functools.cache
def on_one_device(name, rule):
    """Tokens and statistics of the whole draft model on one device."""
    tokens, state, _ = run_all(*started(TARGET, DRAFTERS[name](), None, rule)[1:])
    return tokens, jax.device_get(state.counters)


def on_a_device(tree):
    """Bytes that one device has of arrays, each counted once."""
    arrays = {id(leaf): leaf for leaf in jax.tree.leaves(tree)}.values()
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in arrays)


def model_of(drafter):
    """What the draft model of a drafter, perhaps in a stack, has of parameters or state."""
    return getattr(drafter, "then", drafter[1] if isinstance(drafter, tuple) else drafter)


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        every = [(name, rule, mesh) for name, rules in RULES.items() for rule in rules for mesh in MESHES]
        cases = every if metafunc.config.getoption("--all-meshes") else SOME
        metafunc.parametrize("case", cases, ids=[f"{name}-{rule}-{data}x{model}" for name, rule, (data, model) in cases])


def test_a_split_draft_model_gives_the_tokens_of_one_device(case):
    name, rule, mesh = case
    expected, counted = on_one_device(name, rule)
    assert np.sum(counted.num_accepted_tokens_per_pos) > 10
    before = run_rounds._cache_size(), prefill._cache_size()
    _, program, params, state = started(TARGET, DRAFTERS[name](split=True), mesh, rule)
    tokens, state, _ = run_all(program, params, state)
    assert tokens == expected
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-3), jax.device_get(state.counters), counted)
    assert (run_rounds._cache_size() - before[0], prefill._cache_size() - before[1]) == (1, 1)
    # Every device holds its share of the draft model and of its cache, and no more.
    data, model = mesh
    cache, own = model_of(state.drafter).cache, model_of(params.drafter)
    for array in (*cache.keys, *cache.values):
        assert {shard.data.shape for shard in array.addressable_shards} == {(8 // data, 8 // model, *array.shape[2:])}
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(own))
    norms = sum(leaf.nbytes for leaf in jax.tree.leaves(own) if leaf.ndim == 1)
    assert held - norms == (sum(leaf.nbytes for leaf in jax.tree.leaves(own)) - norms) / model


def lowered(drafter, mesh, target=TARGET):
    _, program, params, state = started(target, drafter, mesh, "token")
    return run_rounds.lower(program, params, state, jnp.int32(1)).as_text()


def test_the_exchanges_of_a_split_chain_are_its_sums_and_one_gather_of_logits_a_step():
    # Half as wide as the target: its streams are told from the target's by their shape.
    model = decoder(seed=3, width=16)
    whole, split = (lowered(draft_model(model, 3, split=split), (2, 4)) for split in (False, True))
    gathered, sums = collectives(split, "all_gather"), collectives(split, "all_reduce")
    # Four shares of the vocabulary of all rows: for the first draft token, and for each of the loop's.
    assert gathered.count("tensor<4x4x1x16xf32>") == 2
    for _ in range(2):
        gathered.remove("tensor<4x4x1x16xf32>")
    assert gathered == collectives(whole, "all_gather")
    # For each pass that there is (to catch up, up to the root, a step): the embedding and, of its only layer, two.
    own = [f"tensor<4x{width}x16xf32>" for width in (32, 2, 1)]
    assert sorted(result for result in sums if "x16x" in result) == sorted(3 * own)
    assert [result for result in sums if "x16x" not in result] == collectives(whole, "all_reduce")
    assert collectives(split, "all_to_all") == collectives(whole, "all_to_all")
    for other in ("collective_permute", "reduce_scatter", "collective_broadcast"):
        assert other not in split


@pytest.mark.parametrize("law", [Law.INDEPENDENT, Law.COUPLED])
def test_q_is_what_the_tokens_were_drawn_from_on_every_device(law):
    _, one, params, state = started(TARGET, draft_model(CLOSE, 3), None)

    def proposed(program, params, state):
        choices = KeyedChoices(state.sampling.seeds, state.sampling.completion, state.lengths)
        drafter = program.drafter.with_law(law)
        num_draft = jnp.full_like(state.lengths, 3)
        draft, _ = drafter.propose(params.drafter, state.drafter, program.context(params, state), choices, num_draft)
        return draft.tokens, draft.parent_log_probs, draft.valid

    expected = jax.jit(functools.partial(proposed, one))(params, state)
    _, program, params, state = started(TARGET, draft_model(CLOSE, 3, split=True), (2, 4))
    spread = program.layout.spread(program, functools.partial(proposed, program), (Place.PARAMS, Place.STATE), (Place.ROWS,) * 3)
    drawn = jax.jit(spread)(params, state)
    for array in drawn:
        # The four devices of a part have the same bits.
        for part in range(2):
            first, *others = [shard.data for shard in array.addressable_shards if shard.index[0].start == 4 * part]
            assert len(others) == 3
            for other in others:
                np.testing.assert_array_equal(first, other)
    tokens, log_probs, valid = jax.device_get(drawn)
    assert np.all(valid)
    np.testing.assert_array_equal(tokens, expected[0])
    np.testing.assert_allclose(np.exp(log_probs), np.exp(expected[1]), atol=1e-4)
    sampling = jax.device_get(state.sampling)
    choices = KeyedChoices(sampling.seeds, sampling.completion, jax.device_get(state.lengths))
    for node in range(3):
        if law is Law.COUPLED:
            again = coupled_draw(choices, node, log_probs[:, node])
        else:
            again = choices.categorical(Stream.DRAFT, node + 1, log_probs[:, node])
        np.testing.assert_array_equal(again, tokens[:, node])


def test_parts_may_draft_more_and_less():
    """One part's rows are at their ends while the other's go on; and one is told to draft nothing at all."""
    expected, _ = on_one_device("chain", "token")
    _, program, params, state = started(TARGET, DRAFTERS["chain"](split=True), (2, 4), "token")
    cut = jnp.where(jnp.arange(8) < 4, state.max_depths, 0)
    silent = jax.device_put(cut, state.max_depths.sharding)
    tokens, state, _ = run_all(program, params, state.replace(max_depths=silent))
    drafted = np.asarray(state.counters.num_draft_tokens)
    assert np.all(drafted[:4] > 0)
    assert np.all(drafted[4:] == 0)
    assert tokens[:4] == expected[:4]


def test_what_does_not_divide_is_on_all_devices():
    """Three heads over four devices: attention and cache of the draft are on each, MLP and vocabulary are split."""
    model = decoder(seed=3, num_kv_heads=3, num_query_heads=9)
    expected, *_ = run_all(*started(TARGET, draft_model(model, 2), None, "token")[1:])
    _, program, params, state = started(TARGET, draft_model(model, 2, split=True), (2, 4), "token")
    split = program.drafter.model.split
    assert (split.heads, split.mlp, split.vocab) == (False, True, True)
    tokens, state, _ = run_all(program, params, state)
    assert tokens == expected
    layer = params.drafter["layers"][0]
    assert {shard.data.shape for shard in layer["attention"]["qkv"].addressable_shards} == {(3, 5, 4, 32)}
    assert {shard.data.shape for shard in layer["mlp"]["gate_up"].addressable_shards} == {(2, 8, 32)}
    assert {shard.data.shape[:2] for shard in state.drafter.cache.keys[0].addressable_shards} == {(4, 3)}


def test_a_model_of_another_vocabulary_and_an_int8_model():
    """Ids are translated before the shares of the embedding and behind the whole logits; int8 adds up as on one device."""
    ids = np.random.default_rng(0).permutation(60)
    dressed = with_other_ids(CLOSE, ids, np.where(ids % 7 == 0, -1, ids))
    quantised = keep_layers(decoder(num_layers=2, int8_stream="float32"), [0])
    for model in (dressed, quantised):
        expected, alone, _ = run_all(*started(TARGET, draft_model(model, 2), None, "token")[1:])
        _, program, params, state = started(TARGET, draft_model(model, 2, split=True), (2, 4), "token")
        tokens, state, _ = run_all(program, params, state)
        assert tokens == expected
        drafted = np.asarray(state.counters.num_draft_tokens)
        assert np.all(drafted > 0)
        np.testing.assert_array_equal(drafted, alone.counters.num_draft_tokens)
        own = params.drafter.get("model", params.drafter)
        matrix = own["layers"][0]["mlp"]["down"]
        assert getattr(matrix, "values", matrix).sharding.spec == PartitionSpec(None, "model")
        assert state.drafter.cache.keys[0].sharding.spec == PartitionSpec("data", "model")


def test_an_engine_plans_and_has_the_share_of_both():
    asked = several_requests()
    found = {}
    for split in (False, True):
        drafter = stacked(prompt_lookup(2, prompt_lookup_min=1), draft_model(CLOSE, 2, split=split))
        with Engine(TARGET, drafter=drafter, rule="gumbel", slots=4, capacity=48, mesh="data=2,model=4") as engine:
            done = engine.run([dataclasses.replace(r, params=dataclasses.replace(r.params, seed=5)) for r in asked])
            found[split] = [completion.token_ids for completion in done], engine.memory
            # Planned is what there is.
            params, state = engine._batch.params, engine._batch.state
            assert engine.memory.weights == on_a_device((params.target, params.drafter))
            assert engine.memory.caches == on_a_device((state.cache, state.drafter))
    assert found[True][0] == found[False][0]
    assert found[True][1].weights < 0.45 * found[False][1].weights


def test_matrices_that_target_and_split_draft_share_are_there_once():
    target = decoder(num_layers=2)
    drafter = draft_model(keep_layers(target, [1]), 2, split=True)
    _, program, params, _ = started(target, drafter, (2, 4))
    assert params.drafter["embedding"] is params.target["embedding"]
    assert params.drafter["layers"][0]["mlp"]["down"] is params.target["layers"][1]["mlp"]["down"]
    assert program.layout.share(program, params).held == on_a_device(params.target)


def test_without_devices_that_share_a_model_nothing_changes():
    whole, split = (started(TARGET, draft_model(CLOSE, 3, split=split), None) for split in (False, True))
    assert split[1].drafter == dataclasses.replace(whole[1].drafter, split=True)
    assert split_drafter(split[1].drafter, 1) is split[1].drafter
    program = spread_round(split[1], make_mesh(8, 1))
    params = place_params(program, split[2])
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(params.drafter)} == {PartitionSpec()}
    assert run_all(*split[1:])[0] == run_all(*whole[1:])[0]
    # Nor does it for one that is not to be split, beside others that are.
    assert split_drafter(whole[1].drafter, 4) == whole[1].drafter


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match=r"draft_model: split is 'yes'; it must be True or False"):
        draft_model(CLOSE, 2, split="yes")
    own = tiny.model(tiny.random_table(0))
    dressed = with_other_ids(own, np.arange(50), np.arange(50))
    for model in (own, dressed):
        with pytest.raises(ValueError, match=r"draft_model: split is True, and the model is a HashModel, not a Decoder"):
            draft_model(model, 2, split=True)
    with pytest.raises(ValueError, match=r"split is True, and the model was distilled from 'tiny', .* split must be False"):
        draft_model(heads.draft_layers(), 2, split=True)
    # One of its own making is told by the mesh.
    with pytest.raises(ValueError, match=r"mesh has model=2, and the draft model is a HashModel, not a Decoder"):
        split_drafter(DraftModel(tiny.HashModel(), 50, 64, split=True), 2)
