"""The whole stack of transforms, at every node of a tree along the node's own path."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.sampling import PathDistribution, SamplingArrays, SamplingParams, TokenCounts, to_log_probs, tree_paths
from specjax.tree import DraftTree

VOCAB, WIDTH, CAPACITY = 7, 8, 12
TREE = DraftTree((-1, 0, 0, 1, 1, 3, 2))
PROMPTS = [[1, 2, 2, 5], [0], [3, 3, 3], [6, 0], [4]]
OUTPUTS = [[2, 0], [], [3, 1, 1, 1], [5], [4, 4]]
DRAFTS = [[2, 2, 0, 2, 0, 6], [0, 1, 2, 3, 4, 5], [3, 1, 3, 1, 3, 2], [5, 5, 5, 5, 5, 5], [1, 2, 4, 4, 1, 2]]
STOPS = [[6], [0, 1], [], [2], [5, 6]]
ROWS = [
    SamplingParams(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.3, logit_bias={2: 1.5}),
    SamplingParams(min_tokens=2, frequency_penalty=-1.0, top_k=4),
    SamplingParams(temperature=0, repetition_penalty=0.8, min_tokens=6, logit_bias={1: -math.inf, 3: 0.5}),
    SamplingParams(),
    SamplingParams(presence_penalty=2.0, min_tokens=3, min_p=0.1, top_p=0.9),
]


FILTERS = jax.jit(to_log_probs, static_argnums=2)


def processor(tokens, prompt_length, length, logits):
    """Likes the token after the newest one, and more so the longer the output and the more of id 2 it holds."""
    place = jnp.arange(tokens.shape[0])
    twos = jnp.sum((tokens == 2) & (place >= prompt_length) & (place < length))
    return logits.at[(tokens[length - 1] + 1) % VOCAB].add((0.1 * (length - prompt_length) + 0.2 * twos).astype(logits.dtype))


def distribution(rows, logits_processor=None, prompts=PROMPTS, outputs=OUTPUTS, stops=STOPS):
    tokens = np.full((len(rows), CAPACITY), 2, np.int32)  # behind the end stands something plausible
    for row, prompt, output in zip(tokens, prompts, outputs, strict=True):
        row[: len(prompt) + len(output)] = prompt + output
    ids = np.full((len(rows), 2), -1, np.int32)
    for row, stop in zip(ids, stops, strict=True):
        row[: len(stop)] = stop
    return PathDistribution.create(
        SamplingArrays.stack(rows, [0] * len(rows)),
        jnp.asarray(tokens),
        jnp.asarray([len(prompt) for prompt in prompts], jnp.int32),
        jnp.asarray([len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)], jnp.int32),
        jnp.asarray(ids),
        VOCAB,
        width=WIDTH,
        logits_processor=logits_processor,
    )


def reference(logits, params, prompt, output, stops, processed=False):
    """Logits [VOCAB] after everything but temperature and filters, in the order of the documentation, one id at a time."""
    logits = [float(x) for x in logits[:VOCAB]]
    for id in range(VOCAB):
        if len(output) < params.min_tokens and id in stops:
            logits[id] = -math.inf
        logits[id] += (params.logit_bias or {}).get(id, 0)
    if processed:
        logits[((prompt + output)[-1] + 1) % VOCAB] += 0.1 * len(output) + 0.2 * output.count(2)
    for id in range(VOCAB):
        if id in prompt + output:
            logits[id] = logits[id] / params.repetition_penalty if logits[id] > 0 else logits[id] * params.repetition_penalty
        logits[id] -= params.frequency_penalty * output.count(id) + params.presence_penalty * (id in output)
    return logits


def expected(logits, processed=False):
    """[B, T, V] log-probabilities: ``reference`` at every node, then temperature and filters, which have tests of their own."""
    transformed = np.full(logits.shape, -np.inf, np.float32)
    for row, params in enumerate(ROWS):
        for node, path in enumerate(TREE.paths):
            output = OUTPUTS[row] + [DRAFTS[row][index - 1] for index in path]
            transformed[row, node, :VOCAB] = reference(logits[row, node], params, PROMPTS[row], output, STOPS[row], processed)
    return FILTERS(jnp.asarray(transformed), SamplingArrays.stack(ROWS, [0] * len(ROWS)), VOCAB)


@pytest.mark.parametrize("processed", [False, True], ids=["", "processor"])
def test_every_node_equals_the_reference_along_its_own_path(processed):
    paths = tree_paths(TREE, jnp.asarray(DRAFTS))
    behind = distribution(ROWS, processor if processed else None)
    log_probs = jax.jit(lambda logits: behind.log_probs(logits, *paths))
    for seed in range(10):
        logits = np.random.default_rng(seed).normal(scale=2, size=(len(ROWS), TREE.size, WIDTH)).astype(np.float32)
        np.testing.assert_allclose(np.exp(log_probs(logits)), np.exp(expected(logits, processed)), atol=2e-6)


def test_paths_of_their_own_length_in_every_row():
    """What a draft model asks: T = 1, room for the whole chain, of which so much is there."""
    logits = np.random.default_rng(0).normal(size=(len(ROWS), TREE.size, WIDTH)).astype(np.float32)
    path_tokens, path_lengths = tree_paths(TREE, jnp.asarray(DRAFTS))
    nodes = jnp.asarray([0, 3, 5, 1, 6])
    rows = jnp.arange(len(ROWS))
    log_probs = distribution(ROWS).log_probs(
        logits[rows, nodes][:, None], path_tokens[rows, nodes][:, None], path_lengths[nodes, None]
    )
    np.testing.assert_allclose(np.exp(log_probs[:, 0]), np.exp(expected(logits)[rows, nodes]), atol=2e-6)


def test_settings_and_texts_never_retrace():
    traces = []

    @jax.jit
    def traced(behind, logits, tokens):
        traces.append(None)
        return behind.log_probs(logits, *tree_paths(TREE, tokens))

    logits = jnp.zeros((len(ROWS), TREE.size, WIDTH))
    for turn in range(len(ROWS)):
        behind = distribution(ROWS[turn:] + ROWS[:turn], processor, outputs=OUTPUTS[turn:] + OUTPUTS[:turn])
        traced(behind, logits, jnp.asarray(DRAFTS))
    assert len(traces) == 1


def alone(logits, params, prompt, output, draft=(), stops=()):
    """[nodes, V] probabilities of one row behind a chain."""
    behind = distribution([params], None, [prompt], [output], [list(stops)])
    tokens = jnp.asarray([list(draft)], jnp.int32).reshape(1, -1)
    logits = jnp.broadcast_to(
        jnp.pad(jnp.asarray(logits, jnp.float32), (0, WIDTH - len(logits)))[None, None], (1, len(draft) + 1, WIDTH)
    )
    return np.exp(behind.log_probs(logits, *tree_paths(DraftTree.chain(len(draft)), tokens)))[0]


def test_the_second_place_counts_the_first_draft_token():
    """Case 88: draft [5, 5]; each place has one more 5 before it."""
    probs = alone(np.zeros(VOCAB), SamplingParams(frequency_penalty=1.0), [1], [], [5, 5])
    np.testing.assert_allclose(probs[:, 5] / probs[:, 0], np.exp([0, -1, -2]), rtol=1e-5)


def test_negative_logits_are_multiplied():
    """Case 90: [2, -1, 0.5], ids 0 and 1 seen, penalty 1.5: [1.333, -1.5, 0.5]."""
    row = [2, -1, 0.5, *[-math.inf] * (VOCAB - 3)]
    (probs,) = alone(row, SamplingParams(repetition_penalty=1.5), [0, 1], [])
    wanted = np.exp([4 / 3, -1.5, 0.5])
    np.testing.assert_allclose(probs[:3], wanted / wanted.sum(), rtol=1e-5)


def test_presence_and_frequency_count_the_output_only():
    (probs,) = alone(np.zeros(VOCAB), SamplingParams(frequency_penalty=0.5, presence_penalty=1.0), [1, 1, 2], [2, 3, 3])
    np.testing.assert_allclose(probs[:5] / probs[0], np.exp([0, 0, -1.5, -2, 0]), rtol=1e-5)


def test_minimum_length_ends_inside_a_draft():
    probs = alone(np.zeros(VOCAB), SamplingParams(min_tokens=3, max_tokens=3), [1], [2], [2, 2, 2], stops=[4, 6])
    np.testing.assert_array_equal(probs[:, [4, 6]] > 0, [[False] * 2, [False] * 2, [True] * 2, [True] * 2])


@pytest.mark.parametrize("temperature", [0, 1])
def test_nothing_allowed_is_nan_and_no_plausible_token(temperature):
    params = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(VOCAB), -math.inf))
    assert np.isnan(alone(np.zeros(VOCAB), params, [1], [])).any()


def test_what_is_forbidden_stays_forbidden_behind_a_processor():
    behind = distribution(
        [SamplingParams(logit_bias={2: -math.inf})], lambda t, p, n, logits: jnp.zeros_like(logits), [[1]], [[]], [[]]
    )
    probs = np.exp(behind.log_probs(jnp.zeros((1, 1, WIDTH)), *tree_paths(DraftTree.chain(0), jnp.zeros((1, 0), jnp.int32))))[
        0, 0
    ]
    np.testing.assert_allclose(probs, [1 / 6, 1 / 6, 0, 1 / 6, 1 / 6, 1 / 6, 1 / 6, 0], rtol=1e-6)


def test_counts_of_ragged_rows():
    counts = TokenCounts.of_history(jnp.array([[1, 1, 0, 2], [2, 2, 2, 2]]), jnp.array([1, 3]), jnp.array([3, 3]), 4)
    assert counts.seen.tolist() == [[True, True, False, False], [False, False, True, False]]
    assert counts.output.tolist() == [[1, 1, 0, 0], [0, 0, 0, 0]]


def test_a_batch_without_penalties_counts_nothing():
    behind = distribution([SamplingParams()] * 5)
    assert not behind.counts.seen.any()


def test_settings_that_change_nothing_change_no_bit():
    logits = jnp.asarray(np.random.default_rng(3).normal(size=(5, TREE.size, WIDTH)), jnp.float32)
    rows = [SamplingParams(), ROWS[0], SamplingParams(temperature=0), SamplingParams(top_k=3), ROWS[4]]
    log_probs = distribution(rows).log_probs(logits, *tree_paths(TREE, jnp.asarray(DRAFTS)))
    plain = FILTERS(logits, SamplingArrays.stack(rows, [0] * 5), VOCAB)
    for row in (0, 2, 3):
        np.testing.assert_array_equal(log_probs[row], plain[row])
