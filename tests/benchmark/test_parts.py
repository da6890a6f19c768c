"""A round taken apart: passes counted, bytes counted, seconds by a clock that the test sets."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import pytest

import specjax
from specjax.benchmark.parts import PARTS, measure_parts, memory_bandwidth, pass_bytes, passes_per_round, repeating
from specjax.decoding.round import Round
from specjax.drafters import draft_model, prompt_lookup, stacked
from specjax.models.config import DecoderConfig, ExpertsConfig
from specjax.models.decoder import Decoder
from specjax.row_trees import TreeBounds
from specjax.tree import DraftTree
from tests import hash_model

TARGET = hash_model.model(hash_model.random_table())
GREEDY = specjax.SamplingParams(temperature=0.0, max_tokens=20)
TREE = DraftTree((-1, 0, 0, 1))


@pytest.mark.parametrize(
    "drafter",
    [
        None,
        prompt_lookup(4),
        draft_model(TARGET, 3),
        draft_model(TARGET, tree=TREE),
        draft_model(TARGET, tree=TreeBounds(4, 2)),
        stacked(prompt_lookup(4), draft_model(TARGET, 2)),
    ],
    ids=["plain", "lookup", "chain", "tree", "growing", "stack"],
)
def test_a_round_makes_one_pass_of_the_target_whatever_it_drafts(drafter):
    batch, state = hash_model.start(TARGET, [[1, 2, 3]], GREEDY, drafter)
    assert passes_per_round(batch.program, batch.params, state) == (1, 1)


@dataclasses.dataclass(frozen=True)
class Wasteful(Round):
    """Goes through the target more often than it must."""

    how: str = ""

    def step(self, params, state, choices=None):
        def again():
            return self.target.apply(params.target, state.tokens[:, :2], state.tokens[:, :2], state.cache, None).hidden

        nothing = jnp.zeros_like(jax.eval_shape(again))
        if self.how == "twice":
            again()
        elif self.how == "sometimes":
            jax.lax.cond(state.lengths[0] > 5, again, lambda: nothing)
        elif self.how == "three more":
            jax.lax.scan(lambda carry, _: (carry, again()), 0, None, length=3)
        elif self.how == "for ever":
            jax.lax.while_loop(lambda hidden: hidden[0, 0, 0] > 0, lambda hidden: hidden + again(), nothing)
        return super().step(params, state, choices)


@pytest.mark.parametrize(
    ("how", "passes"), [("twice", (2, 2)), ("sometimes", (1, 2)), ("three more", (4, 4)), ("for ever", (1, math.inf))]
)
def test_more_passes_would_be_counted(how, passes):
    batch, state = hash_model.start(TARGET, [[1, 2, 3]], GREEDY, prompt_lookup(4))
    fields = {field.name: getattr(batch.program, field.name) for field in dataclasses.fields(Round)}
    assert passes_per_round(Wasteful(**fields, how=how), batch.params, state) == passes


CONFIG = DecoderConfig(
    vocab_size=11, num_layers=2, width=8, num_query_heads=2, num_kv_heads=1, head_dim=4, mlp_width=16, max_positions=32
)


def decoder(**changes):
    functions = Decoder(dataclasses.replace(CONFIG, **changes))
    return specjax.Model(functions=functions, params=functions.init(jax.random.key(0)), vocab_size=11, max_positions=32)


def test_a_pass_reads_all_weights_and_the_used_part_of_the_cache():
    entry = 2 * 2 * 4 * 4  # keys and values, layers, head size, bytes
    tied, untied = decoder(tied_embedding=True), decoder(tied_embedding=False)
    weights = {model: sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)) for model in (tied, untied)}
    assert pass_bytes(tied, 0) == weights[tied]
    assert pass_bytes(tied, 5, rows=3) == weights[tied] + 15 * entry
    # Of an embedding that nothing is multiplied with, the rows of the tokens alone.
    assert pass_bytes(untied, 0, rows=2, tokens=3) == weights[untied] - (11 - 6) * 8 * 4
    assert pass_bytes(untied, 0, rows=9, tokens=9) == weights[untied]


def test_of_a_mixture_of_experts_those_are_read_that_tokens_are_sent_to():
    model = decoder(tied_embedding=True, experts=ExpertsConfig(num_experts=8, num_active=2))
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    experts = 2 * 8 * 3 * 16 * 8 * 4  # layers, experts, gate up and down, sizes, bytes
    assert pass_bytes(model, 0) == weights - experts * 6 // 8
    assert pass_bytes(model, 0, tokens=3) == weights - experts * 2 // 8
    assert pass_bytes(model, 0, tokens=30) == weights


def test_a_model_of_ones_own_reads_all_its_parameters():
    assert pass_bytes(TARGET, 3, rows=2) == hash_model.STATES * hash_model.WIDTH * 4 + 2 * 3 * 2 * 4


def test_bandwidth_is_bytes_over_the_best_time():
    # Each timed run looks at the clock twice: copy 2 s, sum 4 s, sum 1 s, copy 8 s.
    seconds = itertools.accumulate([0, 2, 0, 4, 0, 1, 0, 8])
    found = memory_bandwidth(2**18, repeats=2, clock=lambda: next(seconds))
    assert found == {"copy": 2 * 2**18 / 2, "sum": 2**18 / 1}


def test_parts_add_up_to_the_round_and_the_draft_is_whole():
    ticks = itertools.count()
    # Every run takes one tick, whatever it does.
    found = measure_parts(
        TARGET,
        TARGET,
        [1, 2, 3, 4, 5, 6, 7, 8],
        prompt_lookup(4),
        "gumbel",
        0.0,
        rows=2,
        repeats=2,
        clock=lambda: float(next(ticks)),
    )
    assert set(found.parts) == set(PARTS)
    assert sum(found.parts.values()) == found.round.median == found.plain_round.median == 1.0
    assert (found.parts["host"], found.parts["draft"], found.parts["other"]) == (1.0, 0.0, 0.0)
    assert (found.num_drafted, found.num_cached, found.target_passes) == (4, 14, (1, 1))


def test_a_text_that_repeats_its_beginning():
    assert repeating([1, 2, 3], 9) == [1, 2, 3, 1, 2]
    assert len(repeating(list(range(100)), 30)) <= 30
    assert repeating([4], 9) == [4]
