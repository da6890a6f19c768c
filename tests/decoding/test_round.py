import dataclasses
import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import SamplingParams
from specjax.decoding import Finish, prefill, run_rounds
from specjax.drafters import draft_model, prompt_lookup
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.tree import Draft, DraftTree, Law
from tests import hash_model as tiny

TABLE = tiny.random_table(0)
TARGET = tiny.model(TABLE)
PROMPTS = [[1, 2, 3], [*range(4, 44)], [7]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
SAMPLED = SamplingParams(max_tokens=16, seed=12)


@dataclasses.dataclass(frozen=True)
class Fork(tiny.Observer):
    """Proposes the two likeliest tokens after the root and the likeliest after each, and keeps what it observes.

    The likeliest comes first after an even number of tokens and second after an odd one, so both branches are taken.
    """

    tree = DraftTree((-1, 0, 0, 1, 2))
    law_choices = (Law.DETERMINISTIC,)

    def propose(self, params, state, context, choices, num_draft):
        table = context.target_params["table"][:, : context.vocab_size]
        place = jnp.arange(context.tokens.shape[1])[None, :]
        here = jnp.where(place < context.lengths[:, None], (context.tokens + 1) * tiny.weight(place), 0)
        state_here = jnp.sum(here, axis=1) % tiny.STATES
        best = jax.lax.top_k(table[state_here], 2)[1]
        best = jnp.where((context.lengths % 2 == 0)[:, None], best, best[:, ::-1])
        after = (state_here[:, None] + (best + 1) * tiny.weight(context.lengths)[:, None]) % tiny.STATES
        tokens = jnp.concatenate([best, jnp.argmax(table[after], axis=-1)], axis=1).astype(jnp.int32)
        valid = jnp.arange(4)[None, :] < num_draft[:, None]
        return Draft(tokens, valid, None, self.tree, (Law.DETERMINISTIC,) * 4), state


def fork_accepts(budget):
    """How many tokens of a Fork each round of a greedy row accepts: both branches, as deep as the budget reaches."""
    accepted = []
    while budget:
        accepted.append(min(2, budget - 1))
        budget -= accepted[-1] + 1
    return accepted


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def sampled():
    return tokens_of(specjax.generate(TARGET, PROMPTS, SAMPLED))


def test_round_info():
    batch, state = tiny.start(TARGET, PROMPTS, [GREEDY, dataclasses.replace(GREEDY, max_tokens=1), GREEDY], Fork())
    assert state.lengths.tolist() == [3, 40, 1]
    assert state.running.tolist() == [True] * 3
    state, info = tiny.one_round(batch, state)
    expected = [tiny.greedy(TABLE, prompt, 3) for prompt in PROMPTS]
    # The third row of the dispatch's report: the tokens of its first round, -1 behind the last.
    assert info.tokens[:, 0].tolist() == [expected[0], [expected[1][0], -1, -1], expected[2]]
    assert info.tokens[:, 1:].max() == -1
    # Four nodes for two rows; the second row's budget holds no draft.
    assert info.drafted.tolist() == [8, *[0] * (batch.program.rounds_per_dispatch - 1)]
    assert (info.rounds, info.finish.tolist()) == (1, [Finish.RUNNING, Finish.LENGTH, Finish.RUNNING])
    assert state.lengths.tolist() == [6, 41, 4]
    before = jax.device_get(state)
    state, info = tiny.one_round(batch, state)
    # A row that has finished stays as it is.
    assert info.tokens[1].max() == -1
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b[1]), before.counters, jax.device_get(state.counters))


def test_a_dispatch_ends_when_every_row_has():
    batch, state = tiny.start(TARGET, PROMPTS, dataclasses.replace(GREEDY, max_tokens=4), Fork())
    state, info = run_rounds(batch.program, batch.params, state, jnp.int32(8))
    assert info.rounds == len(fork_accepts(4)) == 2
    assert info.finish.tolist() == [Finish.LENGTH] * 3


def test_a_fork_through_the_round(sampled):
    greedy = specjax.generate(TARGET, PROMPTS, GREEDY, drafter=Fork(), rule="gumbel")
    assert tokens_of(greedy) == [tiny.greedy(TABLE, prompt, 16) for prompt in PROMPTS]
    # One of the two branches is always right: 3 tokens a round, but for the last ones, where the budget cuts the tree.
    accepted = fork_accepts(16)
    assert accepted == [2, 2, 2, 2, 2, 0]
    assert [c.stats.num_drafts for c in greedy] == [6] * 3
    assert [c.stats.num_accepted_tokens_per_pos for c in greedy] == [(5, 5)] * 3
    completions = specjax.generate(TARGET, PROMPTS, SAMPLED, drafter=Fork(), rule="gumbel")
    assert tokens_of(completions) == sampled
    assert sum(c.stats.num_accepted_tokens for c in completions) > 0


def test_a_fork_under_match_and_greedy():
    expected = [tiny.greedy(TABLE, prompt, 16) for prompt in PROMPTS]
    for rule in ("match", "greedy"):
        completions = specjax.generate(TARGET, PROMPTS, GREEDY, drafter=Fork(), rule=rule)
        assert tokens_of(completions) == expected
        assert [c.stats.num_drafts for c in completions] == [6] * 3


def test_the_drafter_observes_every_token_with_the_feature_before_it():
    batch = tiny.Batch.prepare(TARGET, PROMPTS, SAMPLED, Fork(), "gumbel", False)
    # The longest prompt takes three chunks, the others one.
    program = dataclasses.replace(batch.program, prefill_width=16)
    state = prefill(program, batch.params, batch.initial_state(), jnp.int32(99))
    for rounds in range(4):
        seen = jax.device_get(state)
        assert seen.drafter.count.tolist() == seen.observed.tolist() == seen.lengths.tolist()
        for row, length in enumerate(seen.lengths):
            history = seen.tokens[row, :length]
            assert seen.drafter.tokens[row, :length].tolist() == history.tolist()
            assert seen.drafter.features[row, :length].tolist() == [0, *tiny.states(history)[:-1]]
        if rounds < 3:
            state, _ = tiny.one_round(batch, state)


@pytest.mark.parametrize(
    "drafter", [None, prompt_lookup(4, prompt_lookup_min=1), "perfect", Fork()], ids=["none", "lookup", "draft", "fork"]
)
def test_a_row_of_nan_is_flagged_alone(sampled, drafter):
    # The target breaks down where the fourth token of the second row is to be drawn.
    table = TABLE.copy()
    table[tiny.states([*PROMPTS[1], *sampled[1][:3]])[-1]] = np.nan
    broken = tiny.model(table)
    drafter = draft_model(broken, 4) if drafter == "perfect" else drafter
    completions = specjax.generate(broken, PROMPTS, SAMPLED, drafter=drafter, rule="gumbel")
    assert tokens_of(completions) == [sampled[0], sampled[1][:3], sampled[2]]
    assert [c.finish_reason for c in completions] == ["length", "nan", "length"]


def test_an_end_token_before_the_nan_wins(sampled):
    table = TABLE.copy()
    table[tiny.states([*PROMPTS[1], *sampled[1][:3]])[-1]] = np.nan
    broken = tiny.model(table)
    params = dataclasses.replace(SAMPLED, stop_token_ids=(sampled[1][2],))
    for drafter in (None, draft_model(broken, 4)):
        row = specjax.generate(broken, PROMPTS, params, drafter=drafter, rule="gumbel")[1]
        assert (row.token_ids, row.finish_reason) == (sampled[1][:3], "stop")


def caches(state):
    return [leaf for cache in (state.cache, state.drafter.cache) for leaf in (*cache.keys, *cache.values)]


def test_no_cache_is_copied():
    # The eight arrays of the two caches are far larger than all others of this program.
    config = DecoderConfig(
        vocab_size=8, num_layers=2, width=8, num_query_heads=1, num_kv_heads=1, head_dim=256, mlp_width=8, max_positions=1024
    )
    decoder = Decoder(config)
    target = specjax.Model(functions=decoder, params=decoder.init(jax.random.key(0)), vocab_size=8, max_positions=1024)
    params = dataclasses.replace(GREEDY, max_tokens=1000)
    batch = tiny.Batch.prepare(target, [[1, 2, 3]], params, draft_model(target, 2), "greedy", False)
    state = batch.initial_state()
    assert [leaf.shape for leaf in caches(state)] == [(1, 1, 1024, 256)] * 8
    arrays = (batch.program, batch.params, state, jnp.int32(1))
    program, prefilling = (function.lower(*arrays).compile() for function in (run_rounds, prefill))
    for compiled in (program, prefilling):
        copies = [line for line in compiled.as_text().splitlines() if re.search(r"= f32\[1,1,1024,256\]\S* copy\(", line)]
        assert not copies
        assert compiled.memory_analysis().alias_size_in_bytes > 8 * caches(state)[0].nbytes
    addresses = [leaf.unsafe_buffer_pointer() for leaf in caches(state)]
    donated = caches(state)
    state = prefilling(batch.params, state, jnp.int32(1))
    for _ in range(3):
        state, _ = program(batch.params, state, jnp.int32(1))
    assert [leaf.unsafe_buffer_pointer() for leaf in caches(state)] == addresses
    assert state.lengths[0] > 5
    assert all(leaf.is_deleted() for leaf in donated)


def test_a_donated_state_is_not_used_again():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "Some donated buffers were not usable" would be one
        batch, state = tiny.start(TARGET, PROMPTS, GREEDY, Fork())
        after, _ = tiny.one_round(batch, state)
    with pytest.raises((ValueError, RuntimeError), match=r"deleted|donated"):
        tiny.one_round(batch, state)
    # The state that came back is whole.
    tokens = [np.asarray(after.tokens)[row, : after.lengths[row]].tolist() for row in range(3)]
    assert tokens == [[*prompt, *tiny.greedy(TABLE, prompt, 3)] for prompt in PROMPTS]
    assert all(not leaf.is_deleted() for leaf in itertools.chain(jax.tree.leaves(after), jax.tree.leaves(batch.params)))
