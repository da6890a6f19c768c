import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import SamplingParams
from specjax.drafters import draft_model
from specjax.tree import Law
from tests import hash_model as tiny

TABLE = tiny.random_table(0)
SAMPLED = SamplingParams(seed=4)


@dataclasses.dataclass(frozen=True)
class Driver:
    """A draft model's functions, compiled one by one."""

    bound: specjax.drafters.BoundDrafter
    vocab_size: int = tiny.VOCAB
    width: int = tiny.WIDTH
    capacity: int = 64

    @functools.cached_property
    def functions(self):
        return self.bound.functions.with_law(Law.INDEPENDENT)

    def init(self, batch):
        return self.functions.init(self.bound.params, batch, self.capacity)

    @functools.cached_property
    def _observe(self):
        return jax.jit(self.functions.observe)

    def observe(self, state, tokens, counts=None):
        counts = [len(row) for row in tokens] if counts is None else counts
        tokens = jnp.asarray(tokens, jnp.int32)
        features = jnp.zeros((*tokens.shape, 0, 1))
        return self._observe(self.bound.params, state, tokens, features, jnp.asarray(counts, jnp.int32))

    @functools.cached_property
    def _propose(self):
        def propose(params, state, context, asked):
            return self.functions.propose(params, state, context, tiny.keys(context), asked)

        return jax.jit(propose)

    def propose(self, state, histories, asked, params=SAMPLED):
        context = tiny.context(histories, [params] * len(histories), self.vocab_size, self.width, self.capacity)
        return self._propose(self.bound.params, state, context, jnp.asarray(asked, jnp.int32))


def entries(cache, row):
    tokens, positions = (np.asarray(a)[row, 0, : int(cache.lengths[row]), 0].tolist() for a in (cache.keys[0], cache.values[0]))
    return [(token - 1, position) for token, position in zip(tokens, positions, strict=True)]


def held(history, count):
    """What a cache of the first ``count`` tokens holds."""
    return [(token, position) for position, token in enumerate(history[:count])]


@pytest.fixture(scope="module")
def four():
    return Driver(draft_model(tiny.model(TABLE), 4))


def history_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, tiny.VOCAB, length).tolist()


def observed_in_chunks(driver, histories, chunk):
    """The state after the histories have been shown in chunks, rows of different length side by side."""
    state = driver.init(len(histories))
    for start in range(0, max(map(len, histories)), chunk):
        rows = [history[start : start + chunk] for history in histories]
        state = driver.observe(state, [row + [0] * (chunk - len(row)) for row in rows], [len(row) for row in rows])
    return state


def test_prompts_come_in_chunks(four):
    histories = [history_of(length, length) for length in (40, 1, 17, 16)]
    state = observed_in_chunks(four, histories, 16)
    assert state.observed.tolist() == [40, 1, 17, 16]
    # A chunk is worth a pass of its own: nothing is left to catch up.
    assert state.cache.lengths.tolist() == [40, 1, 17, 16]
    draft, after = four.propose(state, histories, [4] * 4)
    for row, history in enumerate(histories):
        drafted = draft.tokens[row].tolist()
        assert entries(after.cache, row) == held([*history, *drafted], len(history) + 3)


def test_q_after_chunks_is_that_of_one_pass(four):
    histories = [history_of(length, length) for length in (40, 1, 17, 16)]
    in_chunks, _ = four.propose(observed_in_chunks(four, histories, 16), histories, [4] * 4)
    # Nothing of these prompts was fed when it was shown, so all of it is caught up with in one proposal.
    state = four.init(4).replace(observed=jnp.array([40, 1, 17, 16]))
    caught_up, after = four.propose(state, histories, [4] * 4)
    assert in_chunks.tokens.tolist() == caught_up.tokens.tolist()
    np.testing.assert_array_equal(in_chunks.parent_log_probs, caught_up.parent_log_probs)
    assert entries(after.cache, 0) == held([*histories[0], *caught_up.tokens[0].tolist()], 43)


def test_a_row_that_paused_catches_up(four):
    # 45 rounds in which row 0 drafts nothing and row 1 does; then both draft. 45 are more than one pass takes in.
    histories = [history_of(5, 1), history_of(5, 2)]
    state = observed_in_chunks(four, histories, 16)
    news = [history_of(45, 3), history_of(45, 4)]
    for round_ in range(45):
        _, state = four.propose(state, histories, [0, 1])
        state = four.observe(state, [[new[round_]] + [0] * 4 for new in news], [1, 1])
        histories = [[*history, new[round_]] for history, new in zip(histories, news, strict=True)]
    assert state.cache.lengths.tolist() == [4, 49]
    draft, after = four.propose(state, histories, [4, 4])
    fresh, _ = four.propose(observed_in_chunks(four, histories, 16), histories, [4, 4])
    assert draft.tokens.tolist() == fresh.tokens.tolist()
    np.testing.assert_array_equal(draft.parent_log_probs, fresh.parent_log_probs)
    for row in (0, 1):
        assert entries(after.cache, row) == held([*histories[row], *draft.tokens[row].tolist()], 53)


def test_rejected_drafts_leave_the_cache(four):
    history = history_of(6)
    state = observed_in_chunks(four, [history] * 4, 16)
    draft, state = four.propose(state, [history] * 4, [4] * 4)
    # Row a accepts a drafts; the last row all four, and its last draft was never fed.
    drafted = draft.tokens[0].tolist()
    emitted = [[*drafted[:a], 49, 0, 0, 0, 0][:5] for a in (0, 2, 3, 4)]
    emitted[3] = [*drafted, 49]
    state = four.observe(state, emitted, [1, 3, 4, 5])
    assert state.cache.lengths.tolist() == [6, 8, 9, 9]
    for row, length in enumerate((6, 8, 9, 9)):
        assert entries(state.cache, row) == held([*history, *drafted], length)


def test_reset_forgets_the_chosen_rows(four):
    histories = [history_of(20, 1), history_of(20, 2)]
    state = observed_in_chunks(four, histories, 16)
    state = four.functions.reset(state, jnp.array([True, False]))
    assert state.observed.tolist() == state.cache.lengths.tolist() == [0, 20]
    # A new request in the first row drafts what it would in a new batch.
    new = history_of(16, 9)
    state = four.observe(state, [new, [0] * 16], [16, 0])
    draft, _ = four.propose(state, [new, histories[1]], [4, 4])
    fresh, _ = four.propose(observed_in_chunks(four, [new, histories[1]], 16), [new, histories[1]], [4, 4])
    np.testing.assert_array_equal(draft.parent_log_probs, fresh.parent_log_probs)


def test_padding_rows_change_nothing():
    # One real row and three that draft nothing, K = 10: bit by bit the run of the row alone.
    ten = Driver(draft_model(tiny.model(TABLE), 10))
    history = history_of(7)
    alone = observed_in_chunks(ten, [history], 16)
    padded = observed_in_chunks(ten, [history, [0], [0], [0]], 16)
    before = jax.device_get(padded.cache)
    draft, alone = ten.propose(alone, [history], [10])
    padded_draft, padded = ten.propose(padded, [history, [0], [0], [0]], [10, 0, 0, 0])
    assert padded_draft.valid.sum(axis=1).tolist() == [10, 0, 0, 0]
    assert padded_draft.tokens[0].tolist() == draft.tokens[0].tolist()
    for one, many, old in zip(*(jax.tree.leaves(cache) for cache in (alone.cache, padded.cache, before)), strict=True):
        np.testing.assert_array_equal(one[0], many[0])
        if many.ndim > 1:
            np.testing.assert_array_equal(many[1:], old[1:])


@dataclasses.dataclass(frozen=True)
class Watched(tiny.HashModel):
    """Reports the positions of every pass that is really made."""

    seen: list = dataclasses.field(default_factory=list, compare=False)

    def apply(self, params, tokens, positions, cache, block_mask):
        jax.debug.callback(lambda shown: self.seen.append(np.asarray(shown).tolist()), positions)
        return super().apply(params, tokens, positions, cache, block_mask)


def test_no_pass_for_drafts_that_cannot_be_used():
    watched = Watched()
    model = dataclasses.replace(tiny.model(TABLE), functions=watched)
    driver = Driver(draft_model(model, 5))
    history = history_of(6)
    state = driver.init(1).replace(observed=jnp.array([6]))
    state = state.replace(cache=state.cache.replace(lengths=jnp.array([5])))
    for asked, passes in ((2, 2), (5, 5), (1, 1), (0, 0)):
        watched.seen.clear()
        jax.block_until_ready(driver.propose(state, [history], [asked]))
        jax.effects_barrier()
        # Drafting k tokens takes the root and k - 1 drafts; the last is not fed.
        assert len(watched.seen) == passes
        assert [positions[0][0] for positions in watched.seen] == list(range(5, 5 + passes))


def test_drafting_stops_at_the_draft_model_s_positions():
    # Made for 16 positions: the last draft comes from position 15 of the draft model.
    driver = Driver(draft_model(tiny.model(TABLE, max_positions=16), 4))
    lengths = [11, 12, 13, 14, 15, 16, 17, 18, 30]
    histories = [history_of(length, length) for length in lengths]
    state = driver.init(len(lengths)).replace(observed=jnp.array(lengths))
    draft, after = driver.propose(state, histories, [4] * len(lengths))
    assert draft.valid.sum(axis=1).tolist() == [4, 4, 4, 3, 2, 1, 0, 0, 0]
    assert after.cache.capacity == 16
    assert after.cache.lengths.tolist() == [14, 15, 16, 16, 16, 16, 0, 0, 0]
    assert np.asarray(after.cache.values[0]).max() == 15


def test_crossing_the_draft_model_s_positions_in_a_run():
    prompt, params = history_of(14), SamplingParams(temperature=0.0, max_tokens=12)
    drafter = draft_model(tiny.model(TABLE, max_positions=16), 4)
    (completion,) = specjax.generate(tiny.model(TABLE), [prompt], params, drafter=drafter, rule="gumbel")
    assert completion.token_ids == tiny.greedy(TABLE, prompt, 12)
    # 14 tokens: drafts 3 and emits 4. Then there are 18, and no draft any more.
    assert (completion.stats.num_draft_tokens, completion.stats.num_drafts) == (3, 9)


def narrow_pair(target_width, draft_width):
    table = tiny.random_table(5, 16)
    return (
        tiny.model(table[:, :target_width], vocab_size=target_width),
        tiny.model(table[:, :draft_width], vocab_size=draft_width),
    )


@pytest.mark.parametrize(("target_width", "draft_width"), [(16, 12), (12, 16)])
def test_q_of_another_width(target_width, draft_width):
    # Rows of the table where an id that only the wider model has would win.
    _, draft = narrow_pair(target_width, draft_width)
    driver = Driver(draft_model(draft, 2), vocab_size=target_width, width=target_width)
    histories = [[1], [2, 3], [4, 5, 6], [7]]
    state = driver.init(4).replace(observed=jnp.array([1, 2, 3, 1]))
    proposal, _ = driver.propose(state, histories, [2] * 4)
    q = np.exp(np.asarray(proposal.parent_log_probs))
    assert q.shape == (4, 2, target_width)
    assert np.all(q[..., 12:] == 0)
    np.testing.assert_allclose(q.sum(-1), 1, atol=1e-6)
    # Over the ids that both have it is the softmax of the draft model's logits.
    rows = np.stack([np.asarray(draft.params["table"])[tiny.states(history)[-1], :12] for history in histories])
    np.testing.assert_allclose(q[:, 0, :12], np.exp(rows) / np.exp(rows).sum(-1, keepdims=True), atol=1e-6)
    assert proposal.tokens.max() < 12


@pytest.mark.parametrize(("target_width", "draft_width"), [(16, 12), (12, 16)])
def test_a_draft_model_of_another_width(target_width, draft_width):
    target, draft = narrow_pair(target_width, draft_width)
    drafter = draft_model(draft, 3)
    prompts = [[1, 2], [3], [4, 5, 6]]
    table = np.asarray(target.params["table"])
    greedy = specjax.generate(target, prompts, SamplingParams(temperature=0.0, max_tokens=20), drafter=drafter, rule="token")
    assert [c.token_ids for c in greedy] == [tiny.greedy(table, prompt, 20, target_width) for prompt in prompts]
    assert sum(c.stats.num_accepted_tokens for c in greedy) > 0
    sampled = specjax.generate(target, prompts, SamplingParams(max_tokens=40, seed=1), drafter=drafter, rule="token")
    emitted = {token for c in sampled for token in c.token_ids}
    # Ids that the draft model does not know come from the target itself.
    assert max(emitted) >= 12 if target_width == 16 else max(emitted) < 12


def test_wrong_settings_are_told():
    model = tiny.model(TABLE)
    with pytest.raises(ValueError, match="num_speculative_tokens is 33"):
        draft_model(model, 33)
    with pytest.raises(ValueError, match="law is 'without_replacement'"):
        draft_model(model, 2).functions.with_law(Law.WITHOUT_REPLACEMENT)
