"""The promises of ``test_invariants``, for drafts with branches: a draft model that drafts trees, on the model of hash states."""

import dataclasses

import jax
import numpy as np
import pytest

import specjax
from specjax import SamplingParams
from specjax.decoding import prefill, run_rounds
from specjax.drafters import draft_model
from specjax.tree import DraftTree
from specjax.verification import TREE
from tests import hash_model as tiny

TABLE = tiny.random_table(0)
TARGET = tiny.model(TABLE)
DRAFT_POSITIONS = 24
CLOSE = tiny.model(TABLE + 0.7 * tiny.random_table(1), max_positions=DRAFT_POSITIONS)
"""A draft model that is right about half of the time, made for fewer positions than the second prompt reaches (case 31)."""
PROMPTS = [[1, 2, 3], [*range(4, 20), 1, 2], [7]]
MIXED = [
    SamplingParams(temperature=1.0, top_p=0.9, max_tokens=20, seed=5),
    SamplingParams(temperature=0.0, max_tokens=14),
    SamplingParams(temperature=0.8, top_k=5, max_tokens=20, seed=2**40 + 11),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
# Numbered by depth and by branch.
LEVELS = DraftTree((-1, 0, 0, 1, 1, 2, 3))
BRANCHES = DraftTree((-1, 0, 1, 1, 0, 4))
TREES = pytest.mark.parametrize("tree", [LEVELS, BRANCHES], ids=["levels", "branches"])


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


def run(prompts, params, tree, model=CLOSE, rule="gumbel"):
    return specjax.generate(TARGET, prompts, params, drafter=draft_model(model, tree=tree), rule=rule)


@pytest.fixture(scope="module")
def plain():
    """Plain decoding of PROMPTS with MIXED."""
    return tokens_of(specjax.generate(TARGET, PROMPTS, MIXED))


@TREES
def test_invariant_2_seed_stable_with_every_tree(plain, tree):
    completions = run(PROMPTS, MIXED, tree)
    assert tokens_of(completions) == plain
    # It must have been put to the test.
    accepted = [c.stats.num_accepted_tokens_per_pos for c in completions]
    assert all(per_position[0] > 0 for per_position in accepted)
    assert sum(per_position[-1] for per_position in accepted) > 0
    assert all(c.stats.num_drafts > c.stats.num_accepted_tokens_per_pos[0] for c in completions)
    # Cases 129 and 131: every round emits what it accepted and one token more.
    for completion in completions:
        stats = completion.stats
        assert stats.num_accepted_tokens + stats.num_drafts == len(completion.token_ids)
        assert 0 < stats.num_accepted_tokens <= stats.num_tested <= stats.num_draft_tokens <= tree.num_nodes * stats.num_drafts


def test_invariant_2_seed_stable_in_every_batch_and_row_place(plain):
    for order in ([2, 0, 1], [0, 0, 2]):
        assert tokens_of(run([PROMPTS[i] for i in order], [MIXED[i] for i in order], LEVELS)) == [plain[i] for i in order]


def test_invariant_3_row_independent():
    for params in (GREEDY, SamplingParams(max_tokens=20, seed=8)):
        together = run(PROMPTS, params, LEVELS)
        for prompt, completion in zip(PROMPTS, together, strict=True):
            # By the same program; that of a batch of one is compiled for chains.
            alone = run([prompt] * 3, params, LEVELS)[1]
            assert alone.token_ids == completion.token_ids
            for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens_per_pos", "num_tested"):
                assert getattr(alone.stats, name) == getattr(completion.stats, name), name


@pytest.mark.parametrize("rule", [tiny.all_rules(TREE), "kseq", "traversal"], ids=["all", "kseq", "traversal"])
def test_greedy_requests_come_out_greedy_under_every_rule(rule):
    """With deterministic children under all that take them; k-SEQ's are independent, traversal's drawn without replacement."""
    completions = run(PROMPTS, GREEDY, LEVELS, rule=rule)
    assert tokens_of(completions) == [tiny.greedy(TABLE, prompt, 20) for prompt in PROMPTS]
    # The whole tree counts, whatever law the run has: the children are the best of the draft's ranking. (k-SEQ weighs several
    # children against one another and may turn the right one down, which costs a token and changes none.)
    best = run(PROMPTS, GREEDY, LEVELS, rule="match")
    accepted, most = (sum(c.stats.num_accepted_tokens for c in done) for done in (completions, best))
    assert most > 20
    assert accepted == most if rule != "kseq" else 0 < accepted <= most


@TREES
def test_invariant_4_the_target_as_its_own_draft_is_accepted_along_a_whole_path(tree):
    """Its greedy path is that of the first children."""
    drafter = draft_model(dataclasses.replace(CLOSE, params=TARGET.params), tree=tree)
    batch, state = tiny.start(TARGET, PROMPTS, GREEDY, drafter)
    emitted = [[], [], []]
    while np.any(state.running):
        left, room = np.asarray(state.limits - state.lengths), DRAFT_POSITIONS + 1 - np.asarray(state.lengths)
        state, info = tiny.one_round(batch, state)
        new = [row[row != -1].tolist() for row in np.asarray(info.tokens)]
        assert [len(tokens) for tokens in new] == np.minimum(np.clip(room, 0, tree.depth) + 1, left).tolist()
        for tokens, more in zip(emitted, new, strict=True):
            tokens.extend(more)
    assert emitted == [tiny.greedy(TABLE, prompt, 20) for prompt in PROMPTS]


def test_invariant_4_cache_arithmetic(plain):
    """Case 121: what stays of a branch that is not the first is that branch, in order."""
    batch, state = tiny.start(TARGET, PROMPTS, MIXED, draft_model(CLOSE, tree=BRANCHES))
    accepted, through = set(), set()
    for _ in range(20):
        lengths, running = np.asarray(state.lengths), np.asarray(state.running)
        assert np.asarray(state.cache.lengths).tolist() == (lengths - 1).tolist()
        limits, draft_before = np.asarray(state.limits), np.asarray(state.drafter.cache.lengths)
        state, info = tiny.one_round(batch, state)
        seen, info = jax.device_get((state, info))
        for row in np.flatnonzero(running):
            n, num_accepted = int(lengths[row]), int((info.tokens[row, 0] != -1).sum()) - 1
            accepted.add(num_accepted)
            assert seen.cache.lengths[row] == n + num_accepted
            # Drafts are no part of the draft model's cache: it lacks all that was emitted.
            drafting = limits[row] - n > 1 and n <= DRAFT_POSITIONS
            assert seen.drafter.cache.lengths[row] == (n if drafting else draft_before[row])
            history = seen.tokens[row, : seen.lengths[row]].tolist()
            assert history == [*PROMPTS[row], *plain[row]][: len(history)]
            for cache in (seen.cache, seen.drafter.cache):
                assert tiny.entries(cache, row) == [(t, p) for p, t in enumerate(history[: int(cache.lengths[row])])]
            through.add(row)
        if not np.any(seen.finish == 0):
            break
    assert not np.any(state.running)
    assert accepted == {0, 1, 2}
    assert through == {0, 1, 2}


@TREES
def test_invariant_8_exact_budgets(plain, tree):
    """And case 133: nodes that no budget holds are not drafted and not counted."""
    for most in (1, 2, 3, 4, 7):
        params = [dataclasses.replace(p, max_tokens=most) for p in MIXED]
        completions = run(PROMPTS, params, tree)
        assert [(c.token_ids, c.finish_reason) for c in completions] == [(tokens[:most], "length") for tokens in plain]
        if most <= 2:
            # Two tokens: one level, 2 nodes of which are first in one numbering and 1 in the other; top_k leaves both.
            drafted = {LEVELS: 2, BRANCHES: 1}[tree] if most == 2 else 0
            assert [c.stats.num_draft_tokens for c in completions] == [drafted] * 3


def test_invariant_8_an_end_token_on_a_branch(plain):
    for index in range(8):
        params = [dataclasses.replace(p, stop_token_ids=(tokens[index],)) for p, tokens in zip(MIXED, plain, strict=True)]
        expected = [(tokens[: tokens.index(tokens[index]) + 1], "stop") for tokens in plain]
        assert [(c.token_ids, c.finish_reason) for c in run(PROMPTS, params, LEVELS)] == expected


def test_invariant_7_fixed_traces():
    traces, prefills = run_rounds._cache_size(), prefill._cache_size()
    rng = np.random.default_rng(0)
    for length in range(1, 13):
        params = SamplingParams(
            temperature=length % 3 / 2, top_k=length % 4, top_p=1 - length / 100, max_tokens=13 - length, seed=length
        )
        run([rng.integers(0, tiny.VOCAB, length) for _ in PROMPTS], params, LEVELS)
    assert run_rounds._cache_size() - traces <= 1
    assert prefill._cache_size() - prefills <= 1


def test_a_row_of_nan_is_flagged_alone(plain):
    """Case 104, with the NaN behind a node of the tree."""
    table = TABLE.copy()
    table[tiny.states([*PROMPTS[0], *plain[0][:6]])[-1]] = np.nan
    broken = tiny.model(table)
    drafter = draft_model(dataclasses.replace(CLOSE, params=broken.params), tree=LEVELS)
    completions = specjax.generate(broken, PROMPTS, MIXED, drafter=drafter, rule="gumbel")
    assert tokens_of(completions) == [plain[0][:6], plain[1], plain[2]]
    assert [c.finish_reason for c in completions] == ["nan", "length", "length"]


def test_a_row_of_nan_is_flagged_alone_by_a_rule_that_tests_against_q():
    """Greedy, so that what comes before the NaN is known."""
    expected = [tiny.greedy(TABLE, prompt, 20) for prompt in PROMPTS]
    table = TABLE.copy()
    table[tiny.states([*PROMPTS[2], *expected[2][:6]])[-1]] = np.nan
    broken = tiny.model(table)
    drafter = draft_model(dataclasses.replace(CLOSE, params=broken.params), tree=LEVELS)
    completions = specjax.generate(broken, PROMPTS, GREEDY, drafter=drafter, rule="traversal")
    assert tokens_of(completions) == [*expected[:2], expected[2][:6]]
    assert [c.finish_reason for c in completions] == ["length", "length", "nan"]
