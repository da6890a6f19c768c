"""The promises that every drafter, rule and setting keeps, each by its number and name.

2 seed-stable · 3 row-independent · 4 cache arithmetic · 5 (p, q) contract · 6 non-anticipating · 7 fixed traces · 8 exact
budgets · 9 nothing ignored. (1, lossless, is certified by enumeration, and 10 is about batch jobs.)

Most use the model of ``tests.hash_model``, whose logits are a different row of a table as soon as one cache entry is wrong.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import specjax
from specjax import SamplingParams
from specjax.choices import Stream
from specjax.decoding import prefill, run_rounds
from specjax.drafters import draft_model, prompt_lookup
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.sampling import to_log_probs
from specjax.tree import Law
from tests import hash_model as tiny

TABLE = tiny.random_table(0)
TARGET = tiny.model(TABLE)
CLOSE = tiny.model(TABLE + 0.7 * tiny.random_table(1))
"""A draft model that is right about half of the time."""
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 1, 2], [7]]
MIXED = [
    SamplingParams(temperature=1.0, top_p=0.9, max_tokens=20, seed=5),
    SamplingParams(temperature=0.0, max_tokens=14),
    SamplingParams(temperature=0.8, top_k=5, max_tokens=20, seed=2**40 + 11),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def plain():
    """Plain decoding of PROMPTS with MIXED."""
    return tokens_of(specjax.generate(TARGET, PROMPTS, MIXED))


# 2. Seed-stable


def test_plain_decoding_is_right(plain):
    assert plain[1] == tiny.greedy(TABLE, PROMPTS[1], 14)
    assert [len(tokens) for tokens in plain] == [20, 14, 20]
    greedy = specjax.generate(TARGET, PROMPTS, GREEDY)
    assert tokens_of(greedy) == [tiny.greedy(TABLE, prompt, 20) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "drafter",
    [prompt_lookup(4, prompt_lookup_min=1), draft_model(CLOSE, 0), *(draft_model(CLOSE, k) for k in (1, 2, 3, 4))],
    ids=["lookup-4", *(f"draft-{k}" for k in range(5))],
)
def test_invariant_2_seed_stable_with_every_drafter_and_draft_length(plain, drafter):
    assert tokens_of(specjax.generate(TARGET, PROMPTS, MIXED, drafter=drafter, rule="gumbel")) == plain


@pytest.mark.parametrize("drafter", [None, draft_model(CLOSE, 4)], ids=["none", "draft-4"])
def test_invariant_2_seed_stable_in_every_batch_and_row_place(plain, drafter):
    for order in ([2, 0, 1], [1, 2, 0], [0, 0, 2]):
        prompts, params = [PROMPTS[i] for i in order], [MIXED[i] for i in order]
        completions = specjax.generate(TARGET, prompts, params, drafter=drafter, rule="gumbel")
        assert tokens_of(completions) == [plain[i] for i in order]
    alone = [specjax.generate(TARGET, [p], s, drafter=drafter, rule="gumbel") for p, s in zip(PROMPTS, MIXED, strict=True)]
    assert [completion.token_ids for (completion,) in alone] == plain


def test_invariant_2_another_seed_gives_other_tokens(plain):
    others = [dataclasses.replace(params, seed=99) for params in MIXED]
    changed = tokens_of(specjax.generate(TARGET, PROMPTS, others))
    assert [a == b for a, b in zip(changed, plain, strict=True)] == [False, True, False]  # the greedy row has no noise


@pytest.fixture(scope="module")
def transformer():
    """A Transformer, and a draft model of other weights that are close."""
    config = DecoderConfig(
        vocab_size=24, num_layers=1, width=8, num_query_heads=4, num_kv_heads=2, head_dim=4, mlp_width=16, max_positions=64
    )
    decoder = Decoder(config)
    params = decoder.init(jax.random.key(0), scale=0.9)
    other = jax.tree.map(lambda leaf: leaf + 0.05 * jax.random.normal(jax.random.key(1), leaf.shape), params)
    return tuple(specjax.Model(functions=decoder, params=p, vocab_size=23, max_positions=64) for p in (params, other))


PROMPTS_23 = [[1, 2, 3], [*range(4, 20), 1, 2], [7]]


def test_invariant_2_seed_stable_with_a_transformer_in_float32(transformer):
    target, draft = transformer
    expected = tokens_of(specjax.generate(target, PROMPTS_23, MIXED))
    completions = specjax.generate(target, PROMPTS_23, MIXED, drafter=draft_model(draft, 4), rule="gumbel")
    assert tokens_of(completions) == expected
    # It must have been put to the test.
    assert sum(c.stats.num_accepted_tokens for c in completions) > 0
    assert sum(c.stats.num_tested - c.stats.num_accepted_tokens for c in completions) > 0


# 3. Row-independent


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=20, seed=8)], ids=["greedy", "gumbel"])
def test_invariant_3_row_independent(params):
    expected = tokens_of(specjax.generate(TARGET, PROMPTS, params))
    # Row 0 is always accepted, row 1 never, row 2 now and then.
    table = tiny.rejected_at(TABLE, PROMPTS[1], expected[1], range(20))
    table = tiny.rejected_at(table, PROMPTS[2], expected[2], [3, 4, 11])
    drafter = draft_model(tiny.model(table), 4)
    together = specjax.generate(TARGET, PROMPTS, params, drafter=drafter, rule="gumbel")
    assert tokens_of(together) == expected
    # No row waits for the slowest.
    assert [c.stats.num_drafts for c in together] == [4, 20, 6]
    assert [c.stats.num_accepted_tokens for c in together] == [16, 0, 14]
    for prompt, completion in zip(PROMPTS, together, strict=True):
        (alone,) = specjax.generate(TARGET, [prompt], params, drafter=drafter, rule="gumbel")
        assert alone.token_ids == completion.token_ids
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens_per_pos", "num_tested", "overlap"):
            assert getattr(alone.stats, name) == pytest.approx(getattr(completion.stats, name), rel=1e-6), name


def test_invariant_3_row_independent_under_token_verification():
    # Its randomness is keyed by seed and committed length, and the draft length here depends on the row's own budget only.
    params = [dataclasses.replace(p, temperature=0.7, seed=3) for p in MIXED]
    drafter = draft_model(CLOSE, 4)
    first = tokens_of(specjax.generate(TARGET, PROMPTS, params, drafter=drafter, rule="token"))
    order = [2, 0, 1]
    moved = specjax.generate(TARGET, [PROMPTS[i] for i in order], [params[i] for i in order], drafter=drafter, rule="token")
    assert tokens_of(moved) == [first[i] for i in order]


# 4. Cache arithmetic


def entries(cache, row):
    """The (token, position) pairs in a row of a hash model's cache."""
    tokens, positions = (np.asarray(a)[row, 0, : int(cache.lengths[row]), 0].tolist() for a in (cache.keys[0], cache.values[0]))
    return [(token - 1, position) for token, position in zip(tokens, positions, strict=True)]


def test_invariant_4_cache_arithmetic():
    num_draft = 4
    expected = [tiny.greedy(TABLE, prompt, 20) for prompt in PROMPTS]
    table = tiny.rejected_at(TABLE, PROMPTS[0], expected[0], [0, 2, 5, 9])  # accepts 0, 1, 2, 3, then 4
    table = tiny.rejected_at(table, PROMPTS[1], expected[1], range(20))
    batch, state = tiny.start(TARGET, PROMPTS, GREEDY, draft_model(tiny.model(table), num_draft))
    limits = np.asarray(state.limits)
    accepted = set()
    for _ in range(20):
        lengths = np.asarray(state.lengths)
        assert np.asarray(state.cache.lengths).tolist() == (lengths - 1).tolist()
        asked = np.minimum(num_draft, limits - lengths - 1)
        running = np.asarray(state.running)
        draft_before = np.asarray(state.drafter.cache.lengths)
        state, info = tiny.one_round(batch, state)
        seen, info = jax.device_get((state, info))
        for row in np.flatnonzero(running):
            n, k = int(lengths[row]), int(asked[row])
            row_accepted = int((info.tokens[row, 0] != -1).sum()) - 1
            accepted.add(row_accepted)
            assert seen.cache.lengths[row] == n + row_accepted
            assert seen.drafter.cache.lengths[row] == (min(n + row_accepted, n + k - 1) if k else draft_before[row])
            # What is in the caches is what was committed, each token at its own position.
            history = seen.tokens[row, : seen.lengths[row]].tolist()
            assert history == [*PROMPTS[row], *expected[row]][: len(history)]
            for cache in (seen.cache, seen.drafter.cache):
                assert entries(cache, row) == [(t, p) for p, t in enumerate(history[: int(cache.lengths[row])])]
    assert not np.any(state.running)
    assert accepted == {0, 1, 2, 3, 4}


def test_invariant_4_cache_arithmetic_of_a_transformer(transformer):
    target, draft = transformer
    batch, state = tiny.start(target, PROMPTS_23, MIXED, draft_model(draft, 4))
    for _ in range(5):
        state, _ = tiny.one_round(batch, state)
    seen = jax.device_get(state)
    one_pass = jax.jit(target.apply)
    positions = jnp.broadcast_to(jnp.arange(65), (3, 65))
    for model, cache in ((target, seen.cache), (draft, seen.drafter.cache)):
        linear = jax.device_get(one_pass(model.params, state.tokens, positions, model.init_cache(3, 1)).block)
        for got, want in zip((*cache.keys, *cache.values), (*linear.keys, *linear.values), strict=True):
            for row, length in enumerate(cache.lengths):
                np.testing.assert_allclose(got[row, :, :length], want[row, :, :length], atol=2e-6)


@pytest.mark.parametrize("num_draft", [1, 2, 3, 4, 5])
def test_invariant_4_the_target_as_its_own_draft_is_always_accepted(num_draft):
    batch, state = tiny.start(TARGET, PROMPTS, GREEDY, draft_model(TARGET, num_draft))
    emitted = [[], [], []]
    while np.any(state.running):
        left = np.asarray(state.limits - state.lengths)
        state, info = tiny.one_round(batch, state)
        new = [row[row != -1].tolist() for row in np.asarray(info.tokens)]
        assert [len(tokens) for tokens in new] == np.minimum(num_draft + 1, left).tolist()
        for tokens, more in zip(emitted, new, strict=True):
            tokens.extend(more)
    assert emitted == [tiny.greedy(TABLE, prompt, 20) for prompt in PROMPTS]


def test_invariant_4_a_long_prompt_and_64_tokens_of_the_target_as_its_own_draft():
    # The prompt takes two chunks of prefill.
    target = tiny.model(TABLE, max_positions=512)
    prompt = np.random.default_rng(3).integers(0, tiny.VOCAB, 300).tolist()
    params = dataclasses.replace(GREEDY, max_tokens=64)
    (completion,) = specjax.generate(target, [prompt], params, drafter=draft_model(target, 4), rule="gumbel")
    assert completion.token_ids == tiny.greedy(TABLE, prompt, 64)
    assert completion.stats.draft_acceptance_rate == 1.0


# 5. (p, q) contract


@functools.partial(jax.jit, static_argnames=("law", "num_draft"))
def proposal(law, context, num_draft=2):
    """A draft on ``context``, whose tokens the draft model has yet to catch up with."""
    bound = draft_model(CLOSE, num_draft)
    functions = bound.functions.with_law(law)
    state = functions.init(bound.params, len(context.lengths), 64).replace(observed=context.lengths)
    asked = jnp.full_like(context.lengths, num_draft)
    return functions.propose(bound.params, state, context, tiny.keys(context), asked)[0]


@pytest.mark.parametrize("law", [Law.INDEPENDENT, Law.COUPLED])
def test_invariant_5_draft_tokens_are_drawn_from_the_q_that_is_stored(law):
    context = tiny.context(PROMPTS, MIXED)
    draft, choices = proposal(law, context), tiny.keys(context)
    # q is what the draft model's logits and the row's own temperature and filters make.
    drafted = [tiny.states([*prompt, *tokens])[-3:-1] for prompt, tokens in zip(PROMPTS, draft.tokens.tolist(), strict=True)]
    logits = np.asarray(CLOSE.params["table"])[np.stack(drafted)]
    q = jax.jit(to_log_probs, static_argnums=2)(logits, context.sampling, tiny.VOCAB)
    np.testing.assert_allclose(np.exp(draft.parent_log_probs), np.exp(q), atol=1e-6)
    for node in (0, 1):
        stored = draft.parent_log_probs[:, node]
        if law is Law.INDEPENDENT:
            drawn = choices.categorical(Stream.DRAFT, node + 1, stored)
        else:
            drawn = jnp.argmax(stored + choices.gumbel(node, tiny.WIDTH, jnp.float32), axis=-1)
        assert draft.tokens[:, node].tolist() == drawn.tolist()


def test_invariant_5_draft_tokens_are_distributed_as_q():
    # 4000 seeds. Stated beforehand: the test fails by chance once in a million runs, were the seeds not fixed.
    rows = 4000
    context = tiny.context([PROMPTS[0]] * rows, [SamplingParams(temperature=1.3, top_p=0.95, seed=s) for s in range(rows)])
    draft = proposal(Law.INDEPENDENT, context, num_draft=1)
    expected = rows * np.exp(np.asarray(draft.parent_log_probs[0, 0], np.float64))
    seen = np.bincount(draft.tokens[:, 0], minlength=tiny.WIDTH)
    assert np.all(seen[expected == 0] == 0)
    usual = expected > 5
    kept = [*seen[usual], seen[~usual].sum() + 1], [*expected[usual], expected[~usual].sum() + 1]  # + 1: may be empty
    statistic = sum((s - e) ** 2 / e for s, e in zip(*kept, strict=True))
    assert statistic < scipy.stats.chi2.ppf(1 - 1e-6, df=len(kept[0]) - 1)


# 6. Non-anticipating


def test_invariant_6_non_anticipating():
    """Rows of one prompt and many seeds draft different tokens, but at one committed length the same number of them."""
    params = [dataclasses.replace(MIXED[0], seed=seed, max_tokens=9) for seed in range(3)]
    batch, state = tiny.start(TARGET, [PROMPTS[0]] * 3, params, draft_model(CLOSE, 4))
    drafted_at, emitted = {}, set()
    while np.any(state.running):
        lengths, before, running = (np.asarray(a) for a in (state.lengths, state.counters.num_draft_tokens, state.running))
        state, info = tiny.one_round(batch, state)
        emitted |= {tuple(row) for row in np.asarray(info.tokens[:, 0]).tolist()}
        for row in np.flatnonzero(running):
            drafted = int(state.counters.num_draft_tokens[row] - before[row])
            assert drafted == drafted_at.setdefault(int(lengths[row]), min(4, 3 + 9 - int(lengths[row]) - 1))
    assert len(emitted) > 3


def test_invariant_6_a_draft_is_as_long_whatever_its_tokens_are():
    context = tiny.context([PROMPTS[1]] * 3, MIXED)
    draft = proposal(Law.INDEPENDENT, context)
    assert len(set(map(tuple, draft.tokens.tolist()))) > 1
    assert draft.valid.tolist() == [[True, True]] * 3


# 7. Fixed traces


def test_invariant_7_fixed_traces():
    drafter = draft_model(CLOSE, 4)
    traces, prefills = run_rounds._cache_size(), prefill._cache_size()
    rng = np.random.default_rng(0)
    for length in range(1, 33):
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.5, 1.5])), top_k=length % 3, top_p=1 - length / 100, min_p=length / 1000,
            max_tokens=33 - length, seed=length, stop_token_ids=tuple(range(length % 4)),
        )  # fmt: skip
        target = TARGET if length % 2 else CLOSE  # other weights, and another acceptance pattern
        prompt = rng.integers(0, tiny.VOCAB, length)
        specjax.generate(target, [prompt], params, drafter=drafter, rule="gumbel")
    assert run_rounds._cache_size() - traces <= 1
    assert prefill._cache_size() - prefills <= 2  # 16 and 64 tokens per pass


# 8. Exact budgets

PLAIN = [tiny.greedy(TABLE, prompt, 20) for prompt in PROMPTS]
PERFECT = draft_model(TARGET, 4)


def outcomes(params, drafter, prompts=PROMPTS, target=TARGET):
    return [(c.token_ids, c.finish_reason) for c in specjax.generate(target, prompts, params, drafter=drafter, rule="gumbel")]


def test_invariant_8_an_end_token_at_every_place_of_an_accepted_block():
    # The perfect drafter's blocks are tokens 0-4 and 5-9; 4 and 9 are the bonus tokens.
    for index in (0, 1, 2, 3, 4, 7, 9):
        params = [dataclasses.replace(GREEDY, stop_token_ids=(tokens[index],)) for tokens in PLAIN]
        expected = [(tokens[: tokens.index(tokens[index]) + 1], "stop") for tokens in PLAIN]
        assert outcomes(params, PERFECT) == expected == outcomes(params, None)
        assert {len(tokens) for tokens, _ in expected} >= {index + 1}  # in some row it really is the first


def test_invariant_8_the_model_s_own_end_token():
    target = tiny.model(TABLE, stop_token_ids=(PLAIN[0][2],))
    assert outcomes(GREEDY, PERFECT, target=target)[0] == (PLAIN[0][:3], "stop")
    ignoring = dataclasses.replace(GREEDY, ignore_eos=True)
    assert outcomes(ignoring, PERFECT, target=target) == [(tokens, "length") for tokens in PLAIN]


@pytest.mark.parametrize("drafter", [None, PERFECT, prompt_lookup(4, prompt_lookup_min=1)], ids=["none", "draft-4", "lookup-4"])
def test_invariant_8_exact_budgets(drafter):
    for most in (1, 2, 3, 6):
        params = dataclasses.replace(GREEDY, max_tokens=most)
        assert outcomes(params, drafter) == [(tokens[:most], "length") for tokens in PLAIN]
    # A stop behind the budget does not lengthen the output, and on its last token it is the reason.
    for most, reason in ((2, "length"), (4, "stop")):
        params = [dataclasses.replace(GREEDY, max_tokens=most, stop_token_ids=(tokens[3],)) for tokens in PLAIN]
        assert outcomes(params, drafter) == [(tokens[:most], reason) for tokens in PLAIN]


def test_invariant_8_a_repetitive_prompt_does_not_exceed_the_budget():
    prompt = [5, 6, 7, 8, 9, 10, 11, 7, 8]
    lookup = prompt_lookup(4, prompt_lookup_min=1)
    for most in (1, 2, 3, 15):
        params = dataclasses.replace(GREEDY, max_tokens=most)
        assert outcomes(params, lookup, [prompt] * 3) == [(tiny.greedy(TABLE, prompt, most), "length")] * 3


def test_invariant_8_the_end_of_the_context():
    # 30 tokens of 32 are there: two more, and no position beyond 31 is ever fed.
    target = tiny.model(TABLE, max_positions=32)
    prompt = [8, 9] * 15
    expected = (tiny.greedy(TABLE, prompt, 2), "length")
    for drafter in (None, prompt_lookup(4, prompt_lookup_min=1)):
        assert outcomes(GREEDY, drafter, [prompt] * 3, target) == [expected] * 3


def test_invariant_8_the_last_cache_slot_is_used_and_never_overrun():
    # 5 + 60 tokens: all but the newest are in the cache, which has 64 places.
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 9]]
    target = tiny.model(TABLE, max_positions=65)
    params = dataclasses.replace(GREEDY, max_tokens=60)
    expected = [tiny.greedy(TABLE, prompt, 60) for prompt in prompts]
    for drafter in (None, prompt_lookup(4, prompt_lookup_min=1), PERFECT):
        assert outcomes(params, drafter, prompts, target) == [(tokens, "length") for tokens in expected]
    batch, state = tiny.start(target, prompts, params, PERFECT)
    assert state.cache.capacity == 64
    while np.any(state.running):
        state, _ = tiny.one_round(batch, state)
    assert state.cache.lengths.tolist() == [64] * 3
    assert entries(state.cache, 0) == [(t, p) for p, t in enumerate([*prompts[0], *expected[0]][:64])]


# 9. Nothing ignored


@dataclasses.dataclass(frozen=True)
class Raising(tiny.HashModel):
    """No pass may be made, not even an abstract one."""

    def apply(self, params, tokens, positions, cache, block_mask):
        raise AssertionError("a model ran")


class Headless:
    """A drafter without ``propose`` and ``with_law``."""

    tree = law_choices = init = observe = reset = None


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"rule is 'blok'; it must be 'auto' or one of", {"rule": "blok"}),
        (r"rule is None, without name, .*; it must be", {"rule": None}),
        (r"rule 'greedy' needs temperature 0", {"rule": "greedy", "params": MIXED}),
        (r"rule 'token' is right for the laws .* draws 'coupled'", {"rule": "token", "drafter": "coupled only"}),
        (r"drafter is .*; a drafter has with_law, propose", {"drafter": Headless()}),
        (r"drafter is 'lookup'; a drafter has", {"drafter": "lookup"}),
        (r"prompts is empty", {"prompts": []}),
        (r"prompts is int", {"prompts": 3}),
        (r"prompts\[1\] has no tokens", {"prompts": [[1], []]}),
        (r"prompts\[0\] holds 50; token ids are whole numbers from 0 to 49", {"prompts": [[1, 50]]}),
        (r"prompts\[0\] holds -1", {"prompts": [[-1]]}),
        (r"prompts\[0\] holds 1\.0", {"prompts": [[1.0]]}),
        (r"prompts\[0\] holds True", {"prompts": [[True]]}),
        (r"prompts\[0\] is int; it must be text, a list", {"prompts": [1, 2, 3]}),
        (r"prompts\[0\] is text, but model 'model' has no tokenizer", {"prompts": "hello"}),
        (r"prompts\[2\] has 64 tokens; with one new token it must fit into 64", {"prompts": [[1], [1], [1] * 64]}),
        (r"params is .*; it must be one SamplingParams or 3", {"params": MIXED[:2]}),
        (r"params is 5; it must be one SamplingParams or 3", {"params": 5}),
        (r"params\[1\]: stop_token_ids holds 50; ids of this model are below 50",
         {"params": [GREEDY, dataclasses.replace(GREEDY, stop_token_ids=(50,)), GREEDY]}),
        (r"params\[2\]: stop is \('x',\), but model 'model' has no tokenizer",
         {"params": [GREEDY, GREEDY, dataclasses.replace(GREEDY, stop="x")]}),
        (r"model is int; it must be a specjax.Model", {"model": 1}),
    ],
)  # fmt: skip
def test_invariant_9_nothing_ignored_and_told_before_any_model_runs(message, arguments):
    if arguments.get("drafter") == "coupled only":
        functions = draft_model(TARGET, 4).functions
        object.__setattr__(functions, "law_choices", (Law.COUPLED,))
        arguments = arguments | {"drafter": functions}
    target = specjax.Model(functions=Raising(), params=TARGET.params, vocab_size=tiny.VOCAB, max_positions=64)
    arguments = {"model": target, "prompts": PROMPTS, "params": GREEDY} | arguments
    with pytest.raises(ValueError, match=message):
        specjax.generate(**arguments)
    prompts = arguments.pop("prompts")
    if not isinstance(arguments["params"], list) and isinstance(prompts, list) and len(prompts) == 1:
        # The stream tells it at the call, not at the first piece.
        with pytest.raises(ValueError, match=message):
            specjax.stream(prompt=prompts[0], **arguments)
