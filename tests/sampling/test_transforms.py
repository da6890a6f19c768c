import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specjax.choices import KeyedChoices, Stream
from specjax.sampling import SamplingArrays, SamplingParams, keep_top_k, keep_top_p, to_log_probs
from specjax.sampling.transforms import has_nan
from specjax.tree import Draft, DraftTree, Law
from specjax.verification import Match, Token

VOCAB = 6
compiled = jax.jit(to_log_probs, static_argnames="vocab_size")


def probabilities(logits, *params, vocab_size=None):
    """[B, T, V] of logits [B, T, V]."""
    logits = jnp.asarray(logits, jnp.float32)
    arrays = SamplingArrays.stack(params, seeds=[0] * len(params))
    return np.exp(np.asarray(compiled(logits, arrays, vocab_size=vocab_size or logits.shape[-1])))


def by_sorting(weights, params):
    """Probabilities [V] of exp(logits) = ``weights``: the order of the documentation, by sorting, in float64."""
    probs = np.asarray(weights, np.float64) ** (1 / params.temperature)
    probs /= probs.sum()
    probs = np.where(probs >= params.min_p * probs.max(), probs, 0)
    if params.top_k:
        probs = np.where(probs >= np.sort(probs)[::-1][min(params.top_k, len(probs)) - 1], probs, 0)
    probs /= probs.sum()
    if params.top_p < 1:
        descending = np.sort(probs)[::-1]
        probs = np.where(probs >= descending[np.searchsorted(np.cumsum(descending), params.top_p)], probs, 0)
    return probs / probs.sum()


# Thresholds are odd multiples of 1/2018, a twice prime: no quotient of small whole numbers comes nearer to one than float32's
# rounding, and ties among the small weights are frequent.
THRESHOLD = st.integers(0, 1008).map(lambda odd: (2 * odd + 1) / 2018)
SETTINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.5, 1.0]),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.one_of(st.just(1.0), THRESHOLD),
    min_p=st.one_of(st.just(0.0), THRESHOLD),
)
WEIGHTS = st.lists(st.integers(1, 6), min_size=VOCAB, max_size=VOCAB)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.tuples(WEIGHTS, WEIGHTS), st.tuples(WEIGHTS, WEIGHTS), SETTINGS, SETTINGS)
@example(([3, 3, 2, 1, 1, 1],) * 2, ([1] * 6,) * 2, SamplingParams(top_k=1), SamplingParams(top_p=0.25))
def test_filters_equal_sorting(first, second, first_params, second_params):
    """Two rows of two tokens with settings of their own."""
    result = probabilities(np.log([first, second]), first_params, second_params)
    expected = [[by_sorting(w, params) for w in row] for row, params in ((first, first_params), (second, second_params))]
    np.testing.assert_allclose(result, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("top_k", "kept"),
    [
        (0, [1, 1, 1, 1, 1]),
        (1, [0, 1, 0, 0, 0]),
        (2, [0, 1, 1, 0, 1]),
        (3, [0, 1, 1, 0, 1]),
        (4, [1] * 5),
        (5, [1] * 5),
        (9, [1] * 5),
    ],
)
def test_top_k_keeps_ties(top_k, kept):
    values = jnp.array([[-1.5, 4.0, 2.0, -1.5, 2.0]])
    assert keep_top_k(values, jnp.array([[top_k]])).astype(int).tolist() == [kept]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1.0, [1, 1, 1, 1, 1]),
        (0.9, [0, 1, 1, 1, 1]),
        (0.7, [0, 1, 1, 0, 1]),
        (0.45, [0, 1, 1, 0, 1]),
        (0.35, [0, 1, 0, 0, 0]),
        (1e-6, [0, 1, 0, 0, 0]),
        (1e-50, [0, 1, 0, 0, 0]),  # 0 in float32
    ],
)
def test_top_p_keeps_ties_and_at_least_one(top_p, kept):
    log_probs = jnp.log(jnp.array([[0.05, 0.4, 0.2, 0.15, 0.2]], jnp.float32))
    assert keep_top_p(log_probs, jnp.asarray([[top_p]], jnp.float32)).astype(int).tolist() == [kept]


def test_thresholds_are_exact_to_the_last_bit():
    values = np.float32([[1.0, np.nextafter(np.float32(1), np.float32(2)), -0.5, np.nextafter(np.float32(-0.5), np.float32(0))]])
    assert keep_top_k(jnp.asarray(values), jnp.array([[1]])).tolist() == [[False, True, False, False]]
    assert keep_top_k(jnp.asarray(values), jnp.array([[3]])).tolist() == [[True, True, False, True]]


def test_order_top_k_before_top_p():
    # After top_k: 4/7 and 3/7. The other way round both would stay.
    result = probabilities(np.log([[[0.4, 0.3, 0.2, 0.1]]]), SamplingParams(top_k=2, top_p=0.5))
    np.testing.assert_allclose(result, [[[1, 0, 0, 0]]], atol=1e-6)


def test_order_min_p_before_top_p():
    # After min_p: 4/7 and 3/7. The other way round both would stay.
    result = probabilities(np.log([[[0.4, 0.3, 0.2, 0.1]]]), SamplingParams(min_p=0.6, top_p=0.55))
    np.testing.assert_allclose(result, [[[1, 0, 0, 0]]], atol=1e-6)


def test_order_temperature_before_min_p():
    # Square roots of 16, 9, 4, 1; 2/4 is just kept, 1/4 is not. Before the temperature 4/16 would be dropped.
    result = probabilities(np.log([[[16, 9, 4, 1]]]), SamplingParams(temperature=2, min_p=0.49))
    np.testing.assert_allclose(result, [[[4 / 9, 3 / 9, 2 / 9, 0]]], atol=1e-6)


def test_min_p_of_one_keeps_the_most_likely():
    result = probabilities(np.log([[[3, 1, 3, 2]]]), SamplingParams(min_p=1.0))
    np.testing.assert_allclose(result, [[[0.5, 0, 0.5, 0]]], atol=1e-6)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=np.float64(0.0), top_k=2),
        SamplingParams(temperature=1e-9, top_p=0.5),
        SamplingParams(temperature=0.0, min_p=0.3),
        SamplingParams(top_k=1),
    ],
)
def test_temperature_zero_is_argmax(params):
    """Cases 80 and 82; 79: top_k=1 is the same."""
    assert probabilities([[[1, 2], [4, 3]]], params).tolist() == [[[0, 1], [1, 0]]]


def test_temperature_zero_takes_the_first_of_equal_tokens():
    assert probabilities([[[1, 2, 2]]], SamplingParams(temperature=0)).tolist() == [[[0, 1, 0]]]


def test_a_temperature_just_above_greedy_rounds_to_argmax():
    assert probabilities([[[30, -40, 29.9]]], SamplingParams(temperature=1.1e-5)).tolist() == [[[1, 0, 0]]]


PADDED = [0, 0, 0, 0, 0, 1, 9, 9]


def test_padding_of_the_vocabulary_is_never_sampled():
    """Case 7: logits of width 8, a tokenizer of 6."""
    assert probabilities([[PADDED]], SamplingParams(temperature=0), vocab_size=6).tolist() == [[[0, 0, 0, 0, 0, 1, 0, 0]]]
    warm = probabilities([[PADDED]], SamplingParams(temperature=1.2), vocab_size=6)[0, 0]
    weights = np.exp(np.array(PADDED[:6]) / 1.2)
    np.testing.assert_allclose(warm[:6], weights / weights.sum(), rtol=1e-5)
    assert warm[6:].tolist() == [0, 0]


@pytest.mark.parametrize("rule", [Match(), Token()], ids=lambda rule: rule.name)
def test_padding_is_neither_accepted_nor_correction_nor_bonus(rule):
    """Case 7, 10,000 rows; the drafts 6 and 7 are padding themselves."""
    count = 10_000
    arrays = SamplingArrays.stack([SamplingParams(temperature=1.2)] * count, seeds=range(count))
    log_probs = to_log_probs(jnp.tile(jnp.array(PADDED, jnp.float32), (count, 3, 1)), arrays, 6)
    tokens = jnp.stack([5 + jnp.arange(count) % 3, 5 + jnp.arange(count) // 3 % 3], axis=1).astype(jnp.int32)
    draft = Draft(tokens, jnp.ones((count, 2), bool), None, DraftTree.chain(2), (Law.DETERMINISTIC,) * 2)
    verdict = jax.jit(rule.__call__)(KeyedChoices(arrays.seeds, arrays.completion, jnp.full((count,), 3)), draft, log_probs)
    assert set(np.unique(verdict.next_token)) == {0, 1, 2, 3, 4, 5}
    accepted = np.asarray(tokens)[np.arange(2)[None] < np.asarray(verdict.num_accepted)[:, None]]
    assert set(accepted) == {5}


def test_filters_of_both_sides():
    """Case 71: ids 2 and 3 are outside the target's top 2 and never come, whatever is drafted."""
    probs = probabilities([[np.log([0.4, 0.3, 0.2, 0.1])]], SamplingParams(top_k=2))[0, 0]
    np.testing.assert_allclose(probs, [4 / 7, 3 / 7, 0, 0], atol=1e-6)
    choices = KeyedChoices.from_seeds(range(5000), jnp.zeros((5000,), jnp.int32))
    drawn = choices.categorical(Stream.EMIT, 0, jnp.tile(jnp.log(jnp.asarray(probs)), (5000, 1)))
    assert set(np.unique(drawn)) == {0, 1}


MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(top_p=0.6),
    SamplingParams(temperature=1.5, min_p=0.2),
    SamplingParams(),
]


def test_mixed_rows_equal_rows_alone():
    """Invariant 3, row-independent: bit for bit."""
    logits = np.random.default_rng(1).normal(scale=3, size=(5, 2, 40)).astype(np.float32)
    together = probabilities(logits, *MIXED)
    for row, params in enumerate(MIXED):
        np.testing.assert_array_equal(together[row], probabilities(logits[row : row + 1], params)[0])


def test_settings_never_retrace():
    """Invariant 7, fixed traces."""
    traces = []

    @jax.jit
    def traced(logits, arrays):
        traces.append(None)
        return to_log_probs(logits, arrays, 40)

    logits = jnp.asarray(np.random.default_rng(2).normal(size=(2, 1, 40)), jnp.float32)
    for first in MIXED:
        for second in MIXED:
            traced(logits, SamplingArrays.stack([first, second], [0, 1]))
    assert len(traces) == 1


@pytest.mark.parametrize("params", [*MIXED, SamplingParams(temperature=1.1, top_k=2, top_p=0.5, min_p=0.1)])
def test_nan_stays_visible_and_in_its_row(params):
    """Case 104."""
    logits = np.random.default_rng(3).normal(size=(3, 2, 8)).astype(np.float32)
    healthy = probabilities(logits, *[params] * 3)
    logits[1, 1] = np.nan
    logits[2, 0, 3] = np.nan
    broken = probabilities(logits, *[params] * 3)
    np.testing.assert_array_equal(broken[0], healthy[0])
    np.testing.assert_array_equal(broken[1, 0], healthy[1, 0])
    np.testing.assert_array_equal(broken[2, 1], healthy[2, 1])
    assert np.isnan(broken[1, 1].max())
    assert np.isnan(broken[2, 0].max())


def test_float64_stays_float64():
    with jax.enable_x64(True):
        arrays = SamplingArrays.stack([SamplingParams(top_p=0.9)], [0])
        log_probs = to_log_probs(jnp.log(jnp.array([[[0.5, 0.45, 0.05]]], jnp.float64)), arrays, 3)
    assert log_probs.dtype == jnp.float64
    np.testing.assert_allclose(np.exp(log_probs), [[[10 / 19, 9 / 19, 0]]], rtol=1e-15)


@pytest.mark.parametrize("shape", [(1, 1, 49152), (1, 9, 49152), (16, 5, 52)])
def test_a_nan_is_seen_in_rows_of_any_length(shape):
    """The maximum of such rows does not show it on CPUs."""
    values = np.zeros(shape, np.float32)
    values[-1, -1, shape[-1] // 2] = np.nan
    expected = np.zeros(shape[:2], bool)
    expected[-1, -1] = True
    np.testing.assert_array_equal(jax.jit(has_nan)(values), expected)
    np.testing.assert_array_equal(jax.jit(has_nan)(np.full(shape, np.nan, np.float32)), np.ones(shape[:2], bool))
    for temperature in (0.0, 0.7):
        rows = SamplingArrays.stack([SamplingParams(temperature=temperature)] * shape[0], [0] * shape[0])
        log_probs = jax.jit(lambda x, rows=rows: to_log_probs(x, rows, shape[-1]))(values)
        np.testing.assert_array_equal(has_nan(log_probs), expected)
