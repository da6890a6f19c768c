"""Every family by its tiny model: parity with transformers, windows in passes and trees, and speculation that changes no token.

One program for each model and dtype does it all: a pass over twelve tokens of two rows behind their caches, committed or not. So
texts are fed in pieces, and every window of a local layer, from 7 to 11 tokens, has its edge in the cache and in the pass.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.drafters import draft_model, medusa, prompt_lookup
from specjax.models.shallow import keep_layers
from specjax.tree import DraftTree
from tests import heads
from tests.models.test_parity import GOLDEN, KINDS, LUCK, assert_float32_parity, read_golden, worst_difference

FAMILIES = ("tiny-qwen3", "tiny-mistral", "tiny-gemma2", "tiny-gemma3", "tiny-phi3", "tiny-qwen3-moe", "tiny-mixtral")
ROWS, SIZE, CAPACITY = 2, 12, 64
PLACES = np.arange(SIZE)
CAUSAL = np.tril(np.ones((SIZE, SIZE), bool))


@functools.cache
def model_of(name):
    return specjax.load_model(GOLDEN / name, dtype="float32")


@functools.partial(jax.jit, static_argnums=0)
def run(functions, params, cache, tokens, offsets, mask, counts):
    """Hidden states and logits of a pass, and the cache with the first ``counts`` of its tokens."""
    output = functions.apply(params, tokens, cache.lengths[:, None] + offsets, cache, mask)
    nodes = jnp.broadcast_to(jnp.arange(SIZE), tokens.shape)
    return output.hidden, functions.unembed(params, output.hidden), cache.commit(output.block, nodes, counts)


class Rows:
    """Two rows that are fed in pieces."""

    def __init__(self, model, params=None):
        self.model, self.params = model, model.params if params is None else params
        self.cache = model.functions.init_cache(self.params, ROWS, CAPACITY)

    def feed(self, tokens, counts, offsets=PLACES, mask=CAUSAL):
        """Commits the first ``counts`` tokens of each row; returns what all of them see."""
        padded = np.zeros((ROWS, SIZE), np.int32)
        for row, some in enumerate(tokens):
            padded[row, : len(some)] = some
        offsets = np.broadcast_to(offsets, (ROWS, SIZE)).astype(np.int32)
        mask, counts = np.broadcast_to(mask, (ROWS, SIZE, SIZE)), np.asarray(counts, np.int32)
        hidden, logits, self.cache = run(
            self.model.functions, self.params, self.cache, *map(jnp.asarray, (padded, offsets, mask, counts))
        )
        return np.asarray(hidden), np.asarray(logits)

    def read(self, texts, first=(SIZE, SIZE)):
        """Commits whole texts; hidden states [length, E] and logits of each. ``first`` are the lengths of the first pieces."""
        done, results, counts = [0] * ROWS, [([], []) for _ in texts], list(first)
        while any(place < len(text) for place, text in zip(done, texts, strict=True)):
            pieces = [text[place : place + count] for text, place, count in zip(texts, done, counts, strict=True)]
            outputs = self.feed(pieces, [len(piece) for piece in pieces])
            for row, piece in enumerate(pieces):
                done[row] += len(piece)
                for kept, output in zip(results[row], outputs, strict=True):
                    kept.append(output[row, : len(piece)])
            counts = [SIZE] * ROWS
        return [tuple(map(np.concatenate, result)) for result in results]


def golden(name, params=None):
    """The golden quantities, of sequences fed in pieces, and the sequences."""
    sequences = read_golden(name)
    results = []
    read = Rows(model_of(name), params).read([sequence["token_ids"] for sequence in sequences], first=(SIZE, 7))
    for (hidden, logits), sequence in zip(read, sequences, strict=True):
        hidden, logits = hidden[np.array(sequence["positions"])], logits[np.array(sequence["positions"])]
        results.append(
            {
                "logits": np.take_along_axis(logits, np.array(sequence["ids"]), axis=1),
                "log_sum_exp": np.log(np.sum(np.exp(logits.astype(np.float64)), axis=-1)),
                "hidden_norm": np.linalg.norm(hidden, axis=-1),
                "top": np.argmax(logits, axis=-1),
            }
        )
    return results, sequences


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield lambda model: jax.tree.map(lambda leaf: leaf.astype(jnp.float64), model.params)


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_parity(name):
    results, sequences = golden(name)
    assert_float32_parity(results, sequences, largest=LUCK)


@pytest.mark.parametrize("name", FAMILIES)
def test_float64_parity(name, float64):
    results, sequences = golden(name, float64(model_of(name)))
    assert results[0]["logits"].dtype == np.float64
    for kind in KINDS:
        assert worst_difference(results, sequences, kind) <= 1e-9, kind


# A branch that is longer than every window, and short ones from its places; in the other row it forks at the root.
PARENTS = (
    [-1, 0, 1, 2, 3, 4, 5, 6, 7, 2, 9, 8],
    [-1, 0, 0, 1, 2, 4, 5, 6, 7, 8, 9, 5],
)


@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_and_trees_equal_single_steps(name, float64):
    """Behind 13 and 5 tokens: the windows of a tree's first nodes begin in the cache, those of its last in the tree."""
    model = model_of(name)
    params = float64(model)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 72, length) for length in (13, 5)]
    nodes = rng.integers(0, 72, (ROWS, SIZE))
    offsets, mask = np.zeros((ROWS, SIZE), int), np.zeros((ROWS, SIZE, SIZE), bool)
    paths = []
    for row, parents in enumerate(PARENTS):
        of_row = []
        for node, parent in enumerate(parents):
            of_row.append([*(of_row[parent] if node else []), node])
            offsets[row, node] = len(of_row[-1]) - 1
            mask[row, node, of_row[-1]] = True
        paths.append(of_row)
    rows = Rows(model, params)
    rows.read(prompts)
    before = rows.cache
    hidden, _ = rows.feed(nodes, [0, 0], offsets, mask)
    # The longest path and another, token by token.
    for leaves in ((11, 10), (10, 11)):
        rows.cache = before
        branches = [nodes[row, paths[row][leaf]] for row, leaf in enumerate(leaves)]
        for step in range(SIZE):
            there = [step < len(branch) for branch in branches]
            alone, _ = rows.feed([branch[step : step + 1] for branch in branches], there)
            for row, leaf in enumerate(leaves):
                if there[row]:
                    np.testing.assert_allclose(hidden[row, paths[row][leaf][step]], alone[row, 0], rtol=0, atol=1e-12)


def greedy(model, prompts, count):
    """Plain decoding, token by token."""
    rows = Rows(model)
    logits = [logits[-1] for _, logits in rows.read(prompts)]
    texts = [[int(np.argmax(row))] for row in logits]
    for _ in range(count - 1):
        _, logits = rows.feed([text[-1:] for text in texts], [1, 1])
        for text, row in zip(texts, logits, strict=True):
            text.append(int(np.argmax(row[0])))
    return texts


DRAFTERS = {
    "draft_model": lambda model: draft_model(keep_layers(model, range(model.config.num_layers - 1)), 3),
    "prompt_lookup": lambda model: prompt_lookup(3, prompt_lookup_min=1),
    "medusa_tree": lambda model: medusa(heads.medusa_heads(model, ids=None, num_heads=2), tree=DraftTree((-1, 0, 0, 1, 1, 2))),
}

# Local layers between global ones, and nothing but local layers.
ALWAYS = {("tiny-gemma3", "medusa_tree"), ("tiny-mistral", "prompt_lookup")}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_speculation_changes_no_token(name, drafter, request):
    """Behind prompts that are longer than some windows, over more tokens than all."""
    if (name, drafter) not in ALWAYS and not request.config.getoption("--all-families"):
        pytest.skip("a round is compiled for each: two of them unless --all-families is given")
    model = model_of(name)
    prompts = [[5, 9, 11, 5, 9, 11, 5, 9, 30, 31, 5], [40, 41, 40, 41, 2, 40]]
    params = specjax.SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True)
    completions = specjax.generate(model, prompts, params, drafter=DRAFTERS[drafter](model))
    assert [completion.token_ids for completion in completions] == greedy(model, prompts, 18)
