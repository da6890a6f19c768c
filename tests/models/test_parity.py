"""Parity with transformers: golden values in float64, made by scripts/golden_values.py.

The yardstick is the reference's own rounding. Float32 here may be off by at most twice what float32 is off there: by the root
mean square of each quantity, and by the largest error of a real model's logits. The tiny models are also run in float64, where
both must agree to 1e-9, so that no small mistake can hide behind rounding.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.models.decoder import Decoder

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TINY = ("tiny-llama", "tiny-llama3", "tiny-qwen2")
KINDS = ("logits", "log_sum_exp", "hidden_norm")
LUCK = 4
"""Times the reference's largest error that a tiny model's may be; 2.5 is the most that was seen, on a CPU with AVX-512."""


def read_golden(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())["sequences"]


def measure(model, params, sequences, compiler_options=None):
    """The golden quantities of all sequences from one pass, each sequence a row, padded behind."""
    longest = max(len(sequence["token_ids"]) for sequence in sequences)
    tokens = np.stack([np.pad(sequence["token_ids"], (0, longest - len(sequence["token_ids"]))) for sequence in sequences])
    positions = np.broadcast_to(np.arange(longest), tokens.shape)
    cache = model.functions.init_cache(params, len(sequences), longest)
    apply, unembed = (jax.jit(function, compiler_options=compiler_options) for function in (model.apply, model.unembed))
    rows = apply(params, jnp.asarray(tokens), jnp.asarray(positions), cache).hidden
    results = []
    for sequence, row in zip(sequences, rows, strict=True):
        hidden = row[jnp.asarray(sequence["positions"])]
        logits = unembed(params, hidden[None])[0]
        results.append(
            {
                "logits": np.take_along_axis(np.asarray(logits), np.asarray(sequence["ids"]), axis=1),
                "log_sum_exp": np.asarray(jax.nn.logsumexp(logits, axis=-1)),
                "hidden_norm": np.asarray(jnp.linalg.norm(hidden, axis=-1)),
                "top": np.asarray(jnp.argmax(logits, axis=-1)),
            }
        )
    return results


def worst_difference(results, sequences, kind):
    return max(
        np.abs(result[kind].astype(np.float64) - sequence[kind]).max()
        for result, sequence in zip(results, sequences, strict=True)
    )


def mean_square_differences(results, sequences, kind):
    """Ours and the reference's, over all places."""
    ours = [result[kind].astype(np.float64) - sequence[kind] for result, sequence in zip(results, sequences, strict=True)]
    theirs = [np.full(d.shape, s["float32_mean_square"][kind]) for d, s in zip(ours, sequences, strict=True)]
    return np.mean(np.square(np.concatenate([d.ravel() for d in ours]))), np.mean(np.concatenate([d.ravel() for d in theirs]))


def assert_float32_parity(results, sequences, mean=2, largest=2):
    """Errors' root mean square is at most ``mean`` times the reference's, the largest of a logit at most ``largest`` times.

    Of a few dozen norms and sums the largest error is luck, and another on each kind of CPU; so it is of a tiny model's logits.
    """
    for kind in KINDS:
        ours, theirs = mean_square_differences(results, sequences, kind)
        assert np.sqrt(ours) <= mean * np.sqrt(theirs), kind
    allowed = largest * max(sequence["float32_error"]["logits"] for sequence in sequences)
    assert worst_difference(results, sequences, "logits") <= allowed
    for result, sequence in zip(results, sequences, strict=True):
        ids, logits = np.array(sequence["ids"]), np.array(sequence["logits"])
        # The ids are in the order of their logits; a smaller gap than two errors is a tie, which rounding may break.
        clear = logits[:, 0] - logits[:, 1] > 2 * allowed
        assert clear.sum() >= len(clear) - 1
        np.testing.assert_array_equal(result["top"][clear], ids[clear, 0])


@pytest.fixture(scope="module", params=TINY)
def tiny(request):
    return specjax.load_model(GOLDEN / request.param, dtype="float32"), read_golden(request.param)


@pytest.fixture
def tiny64(tiny):
    """The model with float64 parameters; float64 is on during the test."""
    model, sequences = tiny
    with jax.enable_x64(True):
        yield model, jax.tree.map(lambda leaf: leaf.astype(jnp.float64), model.params), sequences


def test_tiny_float32(tiny):
    model, sequences = tiny
    assert model.dtype == jnp.float32
    assert_float32_parity(measure(model, model.params, sequences), sequences, largest=LUCK)


def test_tiny_float64(tiny64):
    model, params, sequences = tiny64
    results = measure(model, params, sequences)
    assert results[0]["logits"].dtype == np.float64
    for kind in KINDS:
        assert worst_difference(results, sequences, kind) <= 1e-9


@pytest.mark.default_model
def test_smollm2(smollm2):
    sequences = read_golden("smollm2-135m-instruct")
    assert smollm2.dtype == jnp.float32
    assert_float32_parity(measure(smollm2, smollm2.params, sequences), sequences)


def assert_large_parity(path, name):
    """With the compiler's usual options.

    What XLA multiplies float32 matrices with on CPUs by default (YNNPACK) adds hundreds or thousands of products one after
    another, and so rounds up to twice as much as the reference's library. Sums in eight parts stay within twice the reference's.
    """
    sequences, usual = read_golden(name), {"xla_backend_optimization_level": 3}
    model = specjax.load_model(path, dtype="float32", product_parts=8)
    assert model.dtype == jnp.float32
    assert_float32_parity(measure(model, model.params, sequences, usual), sequences)
    whole = dataclasses.replace(model, functions=Decoder(dataclasses.replace(model.config, product_parts=1)))
    assert_float32_parity(measure(whole, model.params, sequences, usual), sequences, mean=3, largest=3)


def test_qwen(qwen_path):
    assert_large_parity(qwen_path, "qwen2.5-coder-0.5b-instruct")


def test_large_qwen(large_qwen_path):
    if not (GOLDEN / "qwen2.5-coder-1.5b-instruct.json").exists():
        pytest.skip("its golden values are not stored: make them with scripts/golden_values.py --qwen-1.5b, in 15 GB of memory")
    assert_large_parity(large_qwen_path, "qwen2.5-coder-1.5b-instruct")


def test_gemma(gemma_path):
    """One of the texts is longer than the window of the local layers."""
    assert max(len(sequence["token_ids"]) for sequence in read_golden("gemma-3-270m")) > 512
    assert_large_parity(gemma_path, "gemma-3-270m")


def linear(apply, model, params, tokens, size=40):
    """Hidden states [T, E] of one sequence in one causal pass over an empty cache; always of one size, to compile once."""
    padded = jnp.asarray(np.pad(tokens, (0, size - len(tokens))))
    return apply(params, padded[None], jnp.arange(size)[None], model.functions.init_cache(params, 1, 1)).hidden[0, : len(tokens)]


def prefilled(apply, model, params, prompts, capacity=48):
    """A cache that holds prompts of different lengths, all fed by one pass."""
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = np.stack([np.pad(prompt, (0, lengths.max() - len(prompt))) for prompt in prompts])
    positions = np.broadcast_to(np.arange(lengths.max()), tokens.shape)
    cache = model.functions.init_cache(params, len(prompts), capacity)
    block = apply(params, jnp.asarray(tokens), jnp.asarray(positions), cache).block
    return cache.commit(block, jnp.asarray(positions), jnp.asarray(lengths))


def close(actual, desired):
    np.testing.assert_allclose(actual, desired, rtol=0, atol=1e-12)


def test_single_steps_equal_one_pass(tiny64):
    model, params, sequences = tiny64
    # Two rows at different places: row 1 is always five tokens behind row 0.
    rows = [np.array(sequence["token_ids"][:40]) for sequence in sequences]
    apply = jax.jit(model.apply)
    expected = [linear(apply, model, params, row) for row in rows]
    cache = prefilled(apply, model, params, [rows[0][:8], rows[1][:3]])
    for step in range(30):
        places = cache.lengths
        assert places.tolist() == [8 + step, 3 + step]
        tokens = jnp.array([[row[place]] for row, place in zip(rows, places, strict=True)])
        output = apply(params, tokens, places[:, None], cache)
        for row in range(2):
            close(output.hidden[row, 0], expected[row][places[row]])
        cache = cache.commit(output.block, jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32))


def test_tree_equals_its_paths(tiny64):
    model, params, sequences = tiny64
    prompts = [np.array(sequences[0]["token_ids"][:9]), np.array(sequences[1]["token_ids"][:6])]
    apply = jax.jit(model.apply)
    cache = prefilled(apply, model, params, prompts)
    # Node 0 is the root, 1 and 2 are its children, 3 is a child of 2: a fork, and one branch that goes on.
    #          0
    #        1   2
    #            3
    paths = {1: [0, 1], 3: [0, 2, 3]}
    depths = jnp.array([0, 1, 1, 2])
    mask = jnp.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
    nodes = jnp.array([[17, 4, 99, 5], [8, 33, 2, 71]])

    for size in (3, 4):
        positions = cache.lengths[:, None] + depths[None, :size]
        output = apply(params, nodes[:, :size], positions, cache, mask[:size, :size])
        per_row = apply(params, nodes[:, :size], positions, cache, jnp.stack([mask[:size, :size]] * 2))
        np.testing.assert_array_equal(output.hidden, per_row.hidden)
        for row, prompt in enumerate(prompts):
            for path in paths.values():
                path = [node for node in path if node < size]
                expected = linear(apply, model, params, np.concatenate([prompt, nodes[row, np.array(path)]]))
                close(output.hidden[row, np.array(path)], expected[len(prompt) :])

    # Commit the longer branch in row 0 and the other in row 1; the next token sees that path and nothing else.
    cache = cache.commit(output.block, jnp.array([[0, 2, 3], [0, 1, 0]]), jnp.array([3, 2]))
    output = apply(params, jnp.array([[50], [51]]), cache.lengths[:, None], cache)
    for row, (path, token) in enumerate([([0, 2, 3], 50), ([0, 1], 51)]):
        expected = linear(apply, model, params, np.concatenate([prompts[row], nodes[row, np.array(path)], [token]]))
        close(output.hidden[row, 0], expected[-1])
