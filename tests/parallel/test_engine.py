"""The engine over a mesh: requests come and go, and each gets the tokens of its solo run."""

import jax
import pytest
from jax.sharding import PartitionSpec

import specjax
from specjax import Engine, Request, SamplingParams
from specjax.drafters import draft_model
from specjax.parallel import make_mesh
from specjax.serving.device import admit, prefill_rows, run_slots
from specjax.serving.schedule import Slot, filling_order, next_prefill, pass_rows
from tests import hash_model as tiny
from tests.parallel.shared import close_to, decoder

TABLE = tiny.random_table(0)
TARGET = tiny.model(TABLE, tokenizer=tiny.Pieces())
CLOSE = draft_model(tiny.model(TABLE + 0.7 * tiny.random_table(1)), 3)


def requests(number, longest=40):
    """Prompts of all lengths, settings of many kinds, ends at different times."""
    made = []
    for i in range(number):
        prompt = [(7 * i + j * (i % 3 + 1)) % 50 for j in range(1 + i * 5 % longest)]
        settings = SamplingParams(
            temperature=[0.0, 0.9][i % 2], top_k=[0, 9][i % 3 == 0], max_tokens=3 + i * 7 % 13, seed=i, n=2 if i == 4 else 1
        )
        made.append(Request(prompt, settings))
    return made


def on_one_device(target, asked):
    """Tokens of every completion without speculation, engine or mesh."""
    prompts, settings = [request.prompt for request in asked], [request.params for request in asked]
    return [completion.token_ids for completion in specjax.generate(target, prompts, settings, rule="gumbel")]


def test_rows_of_own_models_go_over_data():
    asked = requests(19)
    programs = (run_slots, admit, prefill_rows)
    before = [function._cache_size() for function in programs]
    with Engine(TARGET, drafter=CLOSE, rule="gumbel", slots=8, capacity=64, mesh="data=4") as engine:
        done = engine.run(asked)
        assert engine.memory.devices == 4
        state = engine._batch.state
        assert state.cache.keys[0].sharding.spec == PartitionSpec("data")
        assert {shard.data.shape[0] for shard in state.tokens.addressable_shards} == {2}
    new = [function._cache_size() - size for function, size in zip(programs, before, strict=True)]
    assert new[:2] == [1, 1]
    assert new[2] <= 2
    assert [c.token_ids for c in done] == on_one_device(TARGET, asked)


def test_a_decoder_over_both_axes():
    target, asked = decoder(), requests(17, longest=20)
    drafter = draft_model(close_to(target), 2)
    with Engine(target, drafter=drafter, rule="gumbel", slots=8, capacity=48, mesh=make_mesh(4, 2)) as engine:
        done = engine.run(asked)
        weights = engine.memory.weights
        placed = engine._batch.params.target["layers"][0]["attention"]["qkv"]
        assert placed.sharding.spec == PartitionSpec("model", None, None, None)
    # Heads, MLP and vocabulary are all of the target but its norms; each device has half of them, and all of the draft.
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params))
    assert 1.5 * whole < weights < 1.51 * whole
    assert sum(completion.stats.num_accepted_tokens for completion in done) > 20
    assert [c.token_ids for c in done] == on_one_device(target, asked)


def test_slots_fill_all_parts_alike():
    assert filling_order(list(range(8)), 8) == list(range(8))
    assert filling_order(list(range(8)), 8, parts=4) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert filling_order([1, 4, 5, 7], 8, parts=4) == [4, 1, 5, 7]


def test_a_pass_over_prompts_has_rows_of_every_part():
    def slot(index, to_feed):
        return Slot(index, None, None, to_feed)

    # Slots 0 to 3 are the first part, 4 to 7 the second.
    waiting = [slot(1, 9), slot(5, 9), slot(0, 100), slot(2, 9), slot(3, 9), slot(7, 9)]
    width, chosen = next_prefill(waiting, part_size=4)
    assert (width, [s.index for s in chosen]) == (64, [1, 2, 3, 5, 7])
    assert pass_rows(width, [s.index for s in chosen], 8, parts=2).tolist() == [1, 2, 3, 4, 1, 3, 4, 4]
    # The oldest is long: every part reads its oldest.
    width, chosen = next_prefill([slot(1, 999), slot(5, 9), slot(6, 9)], part_size=4)
    assert (width, [s.index for s in chosen]) == (256, [1, 5])
    assert pass_rows(width, [s.index for s in chosen], 8, parts=2).tolist() == [1, 1]
    assert pass_rows(64, [2], 8).tolist() == [2]


def test_what_does_not_fit_a_mesh_is_refused():
    def engine(target=TARGET, **settings):
        return Engine(target, **{"slots": 8, "capacity": 16} | settings)

    with pytest.raises(ValueError, match=r"slots is 6, and mesh has data=4: the slots must be a multiple of it"):
        engine(slots=6, mesh="data=4")
    with pytest.raises(ValueError, match=r"takes 16 devices; there are 8"):
        engine(mesh="data=16")
    with pytest.raises(ValueError, match=r"mesh has model=2, and the target is a HashModel, not a Decoder"):
        engine(mesh="data=4,model=2")
    with pytest.raises(ValueError, match=r"mesh is 4; it must be"):
        engine(mesh=4)
    with pytest.raises(ValueError, match=r"available on each of 2 devices .* do not fit; 176 slots of 16 tokens would"):
        engine(decoder(), mesh="data=2", slots=512, memory_limit=1_000_000)


def test_a_drafter_on_devices_of_its_own_is_refused():
    moved = jax.device_put(tiny.model(TABLE).params, jax.devices()[7])
    apart = draft_model(specjax.Model(functions=tiny.HashModel(), params=moved, vocab_size=50, max_positions=64), 2)
    with pytest.raises(ValueError, match=r"the drafter's parameters are on \['cpu:7'\], and the mesh has 4 devices"):
        Engine(TARGET, drafter=apart, slots=4, capacity=16, mesh="data=4")
