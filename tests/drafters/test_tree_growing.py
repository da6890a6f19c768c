"""Trees that are shaped while they are drafted, against the same written out in loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import SamplingParams
from specjax.certificates import certify
from specjax.certificates.tiny import table_model
from specjax.drafters import draft_model, eagle
from specjax.row_trees import TreeBounds
from tests import hash_model as tiny
from tests import heads

TABLE = tiny.random_table(0)
TARGET = tiny.model(TABLE)
CLOSE = tiny.model(TABLE + 0.7 * tiny.random_table(1))
BOUNDS = TreeBounds(num_nodes=9, depth=3)
HISTORIES = [[1, 2, 3], [*range(4, 30)], [7], [9, 9]]
PARAMS = [SamplingParams(temperature=temperature, seed=3) for temperature in (1.0, 0.0, 0.6, 1.0)]


def grown(table, history, temperature, k):
    """The draft of one row: (path, score) of the best nodes overall, in the order of candidates."""
    frontier, candidates = [((), 0.0)], []
    for _ in range(BOUNDS.depth):
        new = []
        for path, score in frontier:
            logits = table[tiny.states([*history, *path])[-1], : tiny.VOCAB].astype(np.float64) / temperature
            log_q = logits - np.log(np.sum(np.exp(logits)))
            new += [((*path, int(token)), score + log_q[token]) for token in np.argsort(-log_q)[:k]]
        candidates += new
        frontier = sorted(new, key=lambda node: -node[1])[:k]
    best = sorted(candidates, key=lambda node: -node[1])[: BOUNDS.num_nodes]
    return [path for path, _ in candidates if any(path == chosen for chosen, _ in best)]


@pytest.mark.parametrize("k", [2, 4])
def test_the_best_nodes_of_all(k):
    bound = draft_model(CLOSE, tree=BOUNDS, branching=k)
    state = bound.functions.init(bound.params, len(HISTORIES), 64)
    state = state.replace(observed=jnp.array([len(history) for history in HISTORIES]))
    propose = jax.jit(functools.partial(bound.functions.propose, choices=None))
    context = tiny.context(HISTORIES, PARAMS)
    draft, state = jax.device_get(propose(bound.params, state, context=context, num_draft=jnp.array([9, 9, 9, 0])))
    assert draft.valid.all(axis=1).tolist() == [True, True, True, False]
    shapes = set()
    for row, history in enumerate(HISTORIES[:3]):
        paths = [tuple(draft.tokens[row][path[path > 0] - 1].tolist()) for path in draft.tree.path_table[row][1:]]
        # Greedy rows are ordered as at temperature 1.
        assert paths == grown(np.asarray(CLOSE.params["table"]), history, PARAMS[row].temperature or 1.0, k)
        shapes.add(tuple(draft.tree.parents[row].tolist()))
    assert len(shapes) > 1
    assert not draft.valid[3].any()


PROMPTS = [[1, 2, 3], [5], [7, 8, 9, 10, 11, 7, 8]]
MIXED = [
    SamplingParams(temperature=0.9, top_p=0.95, max_tokens=18, seed=5, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, max_tokens=20),
    SamplingParams(temperature=0.7, max_tokens=7, seed=8),
]


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        (TARGET, draft_model(CLOSE, tree=BOUNDS, branching=3)),
        (heads.target(), eagle(heads.eagle_head(), tree=BOUNDS, branching=3)),
    ],
    ids=["draft model", "eagle"],
)
def test_the_tokens_are_those_of_plain_decoding(target, drafter):
    plain = specjax.generate(target, PROMPTS, MIXED)
    completions = specjax.generate(target, PROMPTS, MIXED, drafter)
    assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
    assert sum(c.stats.num_accepted_tokens for c in completions) > 0


def test_certificates():
    drafter = draft_model(table_model(3, seed=1), tree=TreeBounds(num_nodes=3, depth=2), branching=2)
    for rule in ("membership", "gumbel"):
        certificate = certify(rule, drafter=drafter)
        assert certificate.lossless, certificate.counterexample
        assert certificate.expected_tokens > 1.5


def test_bad_input():
    for call, message in (
        (lambda: draft_model(CLOSE, tree=BOUNDS, branching=0), r"draft_model: branching is 0; it must be a whole number"),
        (lambda: draft_model(CLOSE, tree=BOUNDS, branching=1), r"branching 1 and depth 3 make 3 candidates; a tree of 9 nodes"),
        (lambda: draft_model(CLOSE, 3, branching=2), r"draft_model: branching is 2; it is for trees within bounds"),
        (lambda: eagle(heads.eagle_head(), 3, branching=2), r"eagle: branching is 2; it is for trees within bounds"),
        (lambda: eagle(heads.eagle_head(), 3, tree=BOUNDS), r"eagle: num_speculative_tokens is 3 beside a tree"),
        (lambda: draft_model(CLOSE, 3, tree=BOUNDS), r"draft_model: num_speculative_tokens is 3 beside a tree"),
        (
            lambda: specjax.generate(TARGET, [[1]], drafter=draft_model(CLOSE, tree=BOUNDS), rule="traversal"),
            r"rule 'traversal' takes drafts of shape",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
