"""Trees that a drafter shapes per row, through the round: the promises of ``test_invariants``, on the model of hash states."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import SamplingParams
from specjax.decoding import run_rounds
from specjax.drafters import BoundDrafter
from specjax.row_trees import RowTrees, TreeBounds, best_nodes
from specjax.tree import NO_PARENT, Draft, Law
from specjax.verification import ROW_TREE
from tests import hash_model as tiny

TABLE = tiny.random_table(0)
TARGET = tiny.model(TABLE)
PROMPTS = [[1, 2, 3], [*range(4, 20), 1, 2], [7]]
MIXED = [
    SamplingParams(temperature=1.0, top_p=0.9, max_tokens=20, seed=5),
    SamplingParams(temperature=0.0, max_tokens=14),
    SamplingParams(temperature=0.8, top_k=5, max_tokens=20, seed=2**40 + 11),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, seed=3)


@dataclasses.dataclass(frozen=True)
class BestPaths(tiny.Observer):
    """The best of all paths of the two likeliest tokens of each node; right about half of the time.

    Deaf to budgets, which the round must see to; and nodes that are unlikely are not drafted.
    """

    tree = TreeBounds(num_nodes=6, depth=3)
    law: Law = Law.DETERMINISTIC
    law_choices = (Law.DETERMINISTIC, Law.COUPLED)

    def with_law(self, law):
        return dataclasses.replace(self, law=law)

    def propose(self, params, state, context, choices, num_draft):
        place = jnp.arange(context.tokens.shape[1])[None, :]
        here = jnp.where(place < context.lengths[:, None], (context.tokens + 1) * tiny.weight(place), 0)
        states = jnp.sum(here, axis=1, keepdims=True) % tiny.STATES
        reached, number, levels = jnp.zeros(states.shape), jnp.full(states.shape, NO_PARENT, jnp.int32), []
        for depth in range(self.tree.depth):
            scores = params["table"][states][..., : context.vocab_size]
            if self.law is Law.COUPLED:
                noise = choices.gumbel(depth, context.logits_width, scores.dtype)
                scores = scores + noise[:, None, : context.vocab_size]
            log_q, tokens = jax.lax.top_k(jax.nn.log_softmax(scores, axis=-1), 2)
            steps = (tokens + 1) * tiny.weight(context.lengths + depth)[:, None, None]
            parents = jnp.broadcast_to(number[..., None], tokens.shape)
            batch = len(tokens)
            levels.append([v.reshape(batch, -1) for v in (tokens.astype(jnp.int32), reached[..., None] + log_q, parents)])
            reached, states = levels[-1][1], (states[..., None] + steps).reshape(batch, -1) % tiny.STATES
            before = sum(level[0].shape[1] for level in levels[:-1])
            number = jnp.broadcast_to(before + jnp.arange(states.shape[1], dtype=jnp.int32), states.shape)
        tokens, scores, parents = (jnp.concatenate(values, axis=1) for values in zip(*levels, strict=True))
        chosen, of_tree = best_nodes(scores, parents, self.tree.num_nodes)
        draft = Draft(
            tokens=jnp.take_along_axis(tokens, chosen, axis=1),
            valid=(jnp.take_along_axis(scores, chosen, axis=1) > -4) & (num_draft > 0)[:, None],
            parent_log_probs=None,
            tree=RowTrees.from_parents(of_tree, self.tree.depth),
            laws=(self.law,) * self.tree.num_nodes,
        )
        return draft, state


DRAFTER = BoundDrafter(BestPaths(), {"table": jnp.asarray(TABLE + 0.7 * tiny.random_table(1))}, name="best_paths")


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


def run(prompts, params, rule="gumbel"):
    return specjax.generate(TARGET, prompts, params, drafter=DRAFTER, rule=rule)


@pytest.fixture(scope="module")
def plain():
    """Plain decoding of PROMPTS with MIXED."""
    return tokens_of(specjax.generate(TARGET, PROMPTS, MIXED))


def test_invariant_2_seed_stable(plain):
    completions = run(PROMPTS, MIXED)
    assert tokens_of(completions) == plain
    for completion in completions:
        stats = completion.stats
        assert stats.num_accepted_tokens + stats.num_drafts == len(completion.token_ids)
        assert 0 < stats.num_accepted_tokens <= stats.num_tested < stats.num_draft_tokens < 6 * stats.num_drafts
    # It must have been put to the test.
    assert all(count > 0 for count in np.sum([c.stats.num_accepted_tokens_per_pos for c in completions], axis=0))


def test_invariants_2_and_7_every_batch_and_place_by_one_program(plain):
    run(PROMPTS, MIXED)
    traces = run_rounds._cache_size()
    for order in ([2, 0, 1], [0, 0, 2]):
        assert tokens_of(run([PROMPTS[i] for i in order], [MIXED[i] for i in order])) == [plain[i] for i in order]
    for length in range(1, 8):
        random = np.random.default_rng(length)
        params = SamplingParams(temperature=length % 3 / 2, top_k=length % 4, max_tokens=13 - length, seed=length)
        run([random.integers(0, tiny.VOCAB, length) for _ in PROMPTS], params)
    assert run_rounds._cache_size() == traces


def test_greedy_requests_come_out_greedy_under_every_rule():
    """And invariant 3, row-independent: rows accept as much as they do beside others."""
    rule = tiny.all_rules(ROW_TREE)
    assert {each.name for each in rule.rules} == {"greedy", "gumbel", "match", "membership", "typical"}
    completions = run(PROMPTS, GREEDY, rule)
    assert tokens_of(completions) == [tiny.greedy(TABLE, prompt, 20) for prompt in PROMPTS]
    assert sum(c.stats.num_accepted_tokens for c in completions) > 10
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        alone = run([prompt] * 3, GREEDY, rule)[1]
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens_per_pos", "num_tested"):
            assert getattr(alone.stats, name) == getattr(completion.stats, name), name


def test_invariant_4_rows_accept_different_paths_at_once(plain):
    """Case 121: the cache entries and features that stay are those of the row's own branch, in order."""
    batch, state = tiny.start(TARGET, PROMPTS, MIXED, DRAFTER)
    accepted = []
    while np.any(state.running):
        lengths, running = np.asarray(state.lengths), np.asarray(state.running)
        state, info = tiny.one_round(batch, state)
        seen, info = jax.device_get((state, info))
        counts = (info.tokens[:, 0] != -1).sum(axis=1)
        assert seen.lengths.tolist() == (lengths + counts).tolist()
        assert seen.drafter.count.tolist() == seen.lengths.tolist()
        accepted.append(tuple((counts - 1)[running].tolist()))
        for row, length in enumerate(seen.lengths):
            history = [*PROMPTS[row], *plain[row]][:length]
            assert seen.tokens[row, :length].tolist() == history
            assert tiny.entries(seen.cache, row) == [(t, p) for p, t in enumerate(history[:-1])]
            assert seen.drafter.tokens[row, :length].tolist() == history
            assert seen.drafter.features[row, :length].tolist() == [0, *tiny.states(history)[:-1]]
    # Rounds in which every row went another way, and paths of every length.
    assert any(len(set(counts)) == 3 for counts in accepted)
    assert {count for counts in accepted for count in counts} == {0, 1, 2, 3}


def test_invariant_8_exact_budgets(plain):
    """And case 133: nodes that no budget holds are not drafted and not counted, whatever the drafter proposes."""
    for most in (1, 2, 3, 7):
        params = [dataclasses.replace(p, max_tokens=most) for p in MIXED]
        completions = run(PROMPTS, params)
        assert [(c.token_ids, c.finish_reason) for c in completions] == [(tokens[:most], "length") for tokens in plain]
        drafted = [c.stats.num_draft_tokens for c in completions]
        if most == 1:
            assert drafted == [0, 0, 0]
        if most == 2:
            # One level deep there are two candidates.
            assert set(drafted) <= {1, 2}
    # Rows with different budgets in one round: 1, 2 and 4 tokens.
    params = [dataclasses.replace(p, max_tokens=most) for p, most in zip(MIXED, (1, 2, 4), strict=True)]
    batch, state = tiny.start(TARGET, PROMPTS, params, DRAFTER)
    after, info = tiny.one_round(batch, state)
    assert after.counters.num_draft_tokens.tolist()[0] == 0
    assert 1 <= after.counters.num_draft_tokens.tolist()[1] <= 2 < after.counters.num_draft_tokens.tolist()[2]
    for row, (tokens, most) in enumerate(zip(plain, (1, 2, 4), strict=True)):
        emitted = [token for token in info.tokens[row, 0].tolist() if token != -1]
        assert emitted == tokens[: len(emitted)]
        assert 1 <= len(emitted) <= most


def test_invariant_8_an_end_token_on_a_branch(plain):
    for index in range(8):
        params = [dataclasses.replace(p, stop_token_ids=(tokens[index],)) for p, tokens in zip(MIXED, plain, strict=True)]
        expected = [(tokens[: tokens.index(tokens[index]) + 1], "stop") for tokens in plain]
        assert [(c.token_ids, c.finish_reason) for c in run(PROMPTS, params)] == expected


def test_penalties_follow_each_row_s_own_paths():
    """What was drafted before a node counts there: with penalties the tokens are those of plain decoding with them."""
    params = [dataclasses.replace(p, frequency_penalty=1.5, repetition_penalty=1.4, presence_penalty=0.5) for p in MIXED]
    penalised = specjax.generate(TARGET, PROMPTS, params)
    drafted = run(PROMPTS, params)
    assert tokens_of(drafted) == tokens_of(penalised)
    assert sum(c.stats.num_accepted_tokens for c in drafted) > 5


@dataclasses.dataclass(frozen=True)
class Wrong(BestPaths):
    """Has other bounds than its proposals."""

    tree = TreeBounds(num_nodes=6, depth=2)

    def propose(self, *arguments):
        return BestPaths().propose(*arguments)


def test_bounds_that_differ_from_the_proposal_s():
    drafter = dataclasses.replace(DRAFTER, functions=Wrong())
    message = r"proposed the tree TreeBounds\(num_nodes=6, depth=3\); it must be its own, TreeBounds\(num_nodes=6, depth=2\)"
    with pytest.raises(ValueError, match=message):
        specjax.generate(TARGET, PROMPTS, GREEDY, drafter=drafter, rule="greedy")
