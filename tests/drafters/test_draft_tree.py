import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import SamplingParams
from specjax.choices import Stream
from specjax.drafters import DraftTreeModel, draft_model
from specjax.sampling import to_log_probs
from specjax.tree import DraftTree, Law
from tests import hash_model as tiny

I, W, D, C = Law.INDEPENDENT, Law.WITHOUT_REPLACEMENT, Law.DETERMINISTIC, Law.COUPLED
TABLE = tiny.random_table(0)
MODEL = tiny.model(TABLE)
#      0                      numbered in depth
#    / | \
#   1  6  9
#  / \   \
# 2   4   7
# |   |   |
# 3   5   8
DEEP = DraftTree((-1, 0, 1, 2, 1, 4, 0, 6, 7, 0))
HISTORIES = [[1, 2, 3], [*range(4, 44)], [7], [9, 9], [5, 1, 4, 8]]
PARAMS = [
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.7, top_k=2, seed=2**40 + 6),  # fewer tokens than children
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.5, top_p=0.9, seed=8),
    SamplingParams(temperature=1.0, seed=9),
]


@dataclasses.dataclass(frozen=True)
class Driver:
    """A tree drafter's functions, compiled one by one."""

    laws: tuple[Law, ...]
    tree: DraftTree = DEEP
    model: specjax.Model = MODEL

    @functools.cached_property
    def functions(self):
        bound = draft_model(self.model, tree=self.tree)
        return dataclasses.replace(bound.functions, laws=self.laws)

    def fresh(self, histories):
        """Rows that were shown their histories and have fed nothing of them."""
        state = self.functions.init(self.model.params, len(histories), 64)
        return state.replace(observed=jnp.array([len(history) for history in histories]))

    @functools.cached_property
    def _propose(self):
        @jax.jit
        def propose(params, state, context, asked):
            return self.functions.propose(params, state, context, tiny.keys(context), asked)

        return propose

    def propose(self, state, histories, asked, params=PARAMS):
        return self._propose(self.model.params, state, tiny.context(histories, params), jnp.asarray(asked, jnp.int32))

    @functools.cached_property
    def _observe(self):
        return jax.jit(self.functions.observe)

    def observe(self, state, emitted):
        width = self.tree.depth + 1
        tokens = jnp.array([row + [0] * (width - len(row)) for row in emitted])
        counts = jnp.array([len(row) for row in emitted])
        return self._observe(self.model.params, state, tokens, jnp.zeros((*tokens.shape, 0, 1)), counts)


driver_of = functools.cache(Driver)


@functools.cache
def proposal(laws):
    driver = driver_of(laws)
    draft, after = driver.propose(driver.fresh(HISTORIES), HISTORIES, [9] * 5)
    return jax.device_get(draft), after


def path_tokens(draft, row, node):
    return [int(draft.tokens[row, step - 1]) for step in draft.tree.paths[node]]


def entries(cache, row):
    tokens, positions = (np.asarray(a)[row, 0, : int(cache.lengths[row]), 0].tolist() for a in (cache.keys[0], cache.values[0]))
    return [(token - 1, position) for token, position in zip(tokens, positions, strict=True)]


MIXED = (I, C, D, C, I, D, C, W, W)


@pytest.mark.parametrize("laws", [(W,) * 9, MIXED], ids=["without", "mixed"])
def test_q_is_what_the_model_says_after_that_path(laws):
    """Invariant 5, (p, q) contract; case 117: at every inner node, as a run over the path alone would have it."""
    draft, after = proposal(laws)
    to_q = jax.jit(to_log_probs, static_argnums=2)
    context = tiny.context(HISTORIES, PARAMS)
    for place, node in enumerate(DEEP.inner_nodes):
        states = [tiny.states([*history, *path_tokens(draft, row, node)])[-1] for row, history in enumerate(HISTORIES)]
        q = np.exp(to_q(TABLE[np.array(states)][:, None], context.sampling, tiny.VOCAB)[:, 0])
        children = DEEP.children[node]
        if len(children) > 1 and {I, W} & {laws[child - 1] for child in children}:
            # The greedy row takes the best of the ranking; a one-hot q would leave nothing to the second child.
            q[2] = 0
            q[2, draft.tokens[2, np.array(children) - 1]] = 1 / len(children)
        for row in range(5):
            if node == 0 or draft.valid[row, node - 1]:
                np.testing.assert_allclose(np.exp(draft.parent_log_probs[row, place]), q[row], atol=1e-6)
    # Drafts never enter the cache.
    for row, history in enumerate(HISTORIES):
        assert entries(after.cache, row) == [(token, position) for position, token in enumerate(history)]


@pytest.mark.parametrize("laws", [(W,) * 9, MIXED], ids=["without", "mixed"])
def test_children_are_drawn_by_their_laws(laws):
    draft, _ = proposal(laws)
    choices = tiny.keys(tiny.context(HISTORIES, PARAMS))
    for place, parent in enumerate(DEEP.inner_nodes):
        q = jnp.asarray(draft.parent_log_probs[:, place])
        # One noise row for each position, the same at all nodes of a depth.
        # The q of the greedy row says nothing about what comes second: the logits do, without noise.
        state = tiny.states([*HISTORIES[2], *path_tokens(draft, 2, parent)])[-1]
        logits = jnp.where(jnp.arange(tiny.WIDTH) < tiny.VOCAB, TABLE[state], -jnp.inf)
        ranking = q.at[2].set(logits)
        noisy = ranking + choices.gumbel(DEEP.depths[parent], tiny.WIDTH, jnp.float32).at[2].set(0)
        taken = np.zeros(q.shape, bool)
        for node in DEEP.children[parent]:
            left = jnp.where(taken, -jnp.inf, q)
            ranked = jnp.where(taken, -jnp.inf, ranking)
            scores = left if laws[node - 1] is W else ranked
            exhausted = np.asarray(jnp.max(scores.at[2].set(ranked[2]), axis=-1) == -jnp.inf)
            drawn = {
                I: lambda node=node, q=q: choices.categorical(Stream.DRAFT, node, q),
                W: lambda node=node, left=left: choices.categorical(Stream.DRAFT, node, jax.nn.log_softmax(left, axis=-1)),
                D: lambda ranked=ranked: jnp.argmax(ranked, axis=-1),
                C: lambda taken=taken, noisy=noisy: jnp.argmax(jnp.where(taken, -jnp.inf, noisy), axis=-1),
            }[laws[node - 1]]()
            drawn = drawn.at[2].set(jnp.argmax(ranked[2]))
            available = ~exhausted | (laws[node - 1] is I)
            for row in range(5):
                drafted = draft.valid[row, parent - 1] if parent else True
                assert draft.valid[row, node - 1] == (drafted and available[row]), (row, node)
                if draft.valid[row, node - 1]:
                    assert draft.tokens[row, node - 1] == drawn[row], (row, node)
                    taken[row, drawn[row]] = True


def test_siblings_that_are_drawn_without_replacement_differ():
    whole, _ = proposal((W,) * 9)
    mixed, _ = proposal(MIXED)
    for draft, parents in ((whole, range(10)), (mixed, (1,))):  # node 1 has two coupled children
        for row in range(5):
            for parent in parents:
                drafted = [int(draft.tokens[row, child - 1]) for child in DEEP.children[parent] if draft.valid[row, child - 1]]
                assert len(drafted) == len(set(drafted))
        assert draft.valid[[0, 2, 3, 4]].all()
    # Two tokens for three children.
    assert whole.valid[1].tolist() == [True] * 8 + [False]


def test_budgets_cut_the_tree_in_node_order():
    driver = driver_of((W,) * 9)
    whole, _ = proposal((W,) * 9)
    asked = [0, 3, 1, 5, 8]
    draft, after = driver.propose(driver.fresh(HISTORIES), HISTORIES, asked)
    np.testing.assert_array_equal(draft.valid, whole.valid & (np.arange(9)[None] < np.array(asked)[:, None]))
    np.testing.assert_array_equal(np.where(draft.valid, draft.tokens, 0), np.where(draft.valid, whole.tokens, 0))
    # A row that drafts nothing is not even fed.
    assert after.cache.lengths.tolist() == [0, 40, 1, 2, 4]


@dataclasses.dataclass(frozen=True)
class Watched(tiny.HashModel):
    """Reports the positions of every pass that is really made."""

    seen: list = dataclasses.field(default_factory=list, compare=False)

    def apply(self, params, tokens, positions, cache, block_mask):
        jax.debug.callback(lambda shown: self.seen.append(np.asarray(shown)[0].tolist()), positions)
        return super().apply(params, tokens, positions, cache, block_mask)


def test_passes_and_their_positions():
    """Case 117: positions are depths, not places; case 23: no pass for a level that no row may draft."""
    watched = Watched()
    driver = Driver((D,) * 9, model=dataclasses.replace(MODEL, functions=watched))
    history = [5, 6, 7, 8]
    state = driver.fresh([history])
    state = state.replace(cache=state.cache.replace(lengths=jnp.array([3])))
    root, first, second = [3, 4, 5, 6], [4, 4], [4, 5, 5, 4, 5]
    for asked, passes in ((9, [root, first, second]), (2, [root, first]), (1, [root]), (0, [])):
        watched.seen.clear()
        jax.block_until_ready(driver.propose(state, [history], [asked], PARAMS[:1]))
        jax.effects_barrier()
        assert watched.seen == passes, asked
    # Three nodes go through with their ancestors: 2 and 4 below 1, 7 below 6.
    assert [DEEP.depths[node] + 3 for node in (1, 2, 4, 6, 7)] == second


def test_a_branch_that_is_not_first_is_accepted():
    """Cases 121 and 38: the text goes on with that branch, and the next proposal is that of a fresh drafter."""
    driver, histories, params = driver_of((W,) * 9), [*HISTORIES[:1], [4, 5], *HISTORIES[2:]], [PARAMS[0]] * 5

    def follow(state, histories, emitted):
        return driver.observe(state, emitted), [history + new for history, new in zip(histories, emitted, strict=True)]

    def check(state, histories):
        draft, state = driver.propose(state, histories, [9] * 5, params)
        fresh, _ = driver.propose(driver.fresh(histories), histories, [9] * 5, params)
        np.testing.assert_array_equal(draft.tokens, fresh.tokens)
        np.testing.assert_array_equal(draft.parent_log_probs, fresh.parent_log_probs)
        return draft, state

    draft, state = check(driver.fresh(histories), histories)
    # Paths 6 7 8, 1 4, none, 9 and 1 2 3, each with a token of the target's.
    emitted = [[*path_tokens(draft, row, node), 49 - row] for row, node in enumerate((8, 4, 0, 9, 3))]
    state, histories = follow(state, histories, emitted)
    assert state.cache.lengths.tolist() == [3, 2, 1, 2, 4]
    draft, state = check(state, histories)
    # Nothing is drafted for a while: more has to be caught up with than one pass takes in.
    for _ in range(40):
        state, histories = follow(state, histories, [[11], [12], [13], [14], [15]])
    # A new request in row 0.
    state = driver.functions.reset(state, jnp.array([True, False, False, False, False]))
    histories[0] = []
    state, histories = follow(state, histories, [[31, 32], [], [], [], []])
    assert state.observed.tolist() == [len(history) for history in histories]
    assert state.cache.lengths.tolist() == [0, 5, 2, 4, 8]
    _, state = check(state, histories)
    assert state.cache.lengths.tolist() == [len(history) for history in histories]
    # One program all along.
    assert driver._propose._cache_size() == 1


def test_a_draft_model_with_fewer_positions():
    """Case 33: the last level is drawn from the last position that the model was made for."""
    tree = DraftTree((-1, 0, 1, 2, 0))
    driver = Driver((D,) * 4, tree, tiny.model(TABLE, max_positions=16))
    lengths = [13, 14, 15, 16, 17]
    histories = [list(range(length)) for length in lengths]
    draft, after = driver.propose(driver.fresh(histories), histories, [4] * 5, [PARAMS[0]] * 5)
    assert draft.valid.tolist() == [[True] * 4, [True] * 4, [True, True, False, True], [True, False, False, True], [False] * 4]
    assert after.cache.lengths.tolist() == [13, 14, 15, 16, 0]


def test_greedy_rows_make_no_noise(monkeypatch):
    made = []

    class Counted(type(tiny.keys(tiny.context(HISTORIES[:1], PARAMS[:1])))):
        def gumbel(self, offset, vocab_size, dtype):
            jax.debug.callback(lambda: made.append(offset))
            return super().gumbel(offset, vocab_size, dtype)

    monkeypatch.setattr(tiny, "KeyedChoices", Counted)
    driver = Driver((C,) * 3, tree=DraftTree((-1, 0, 0, 1)))
    for params, levels in ((PARAMS[2:3], 0), (PARAMS[:1], 2)):
        made.clear()
        jax.block_until_ready(driver.propose(driver.fresh([[1, 2]]), [[1, 2]], [3], params))
        jax.effects_barrier()
        assert sorted(made) == list(range(levels))


def test_laws_that_a_rule_does_not_take():
    fixed = dataclasses.replace(draft_model(MODEL, tree=DEEP).functions, laws=MIXED)
    assert fixed.law_choices == (I, C, D, W)
    assert fixed.with_law(C).laws == MIXED
    # A run notices although it only knows that the tree can be drawn by laws that the rule takes.
    bound = dataclasses.replace(draft_model(MODEL, tree=DEEP), functions=fixed)
    with pytest.raises(ValueError, match=r"rule 'multi_round' .* draws 'coupled': coupled drafts share the noise"):
        specjax.generate(MODEL, [[1, 2]], SamplingParams(max_tokens=4), drafter=bound, rule="multi_round")


def always(step):
    return jnp.ones(step.index.shape, bool)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("num_speculative_tokens is 3 beside a tree; give one of them", {"num_speculative_tokens": 3, "tree": DEEP}),
        ("stop is <function always .*> beside a tree; only chains can stop early", {"stop": always, "tree": DEEP}),
        ("stop is 0.4; it must be a hook", {"stop": 0.4}),
        (r"tree is \(-1, 0, 0\); it must be a DraftTree of at least one draft node", {"tree": (-1, 0, 0)}),
        (r"tree is DraftTree\(parents=\(-1,\)\); it must be a DraftTree of at least one", {"tree": DraftTree.chain(0)}),
        ("num_speculative_tokens is 33; it must be a whole number from 0 to 32", {"num_speculative_tokens": 33}),
        ("num_speculative_tokens is 2.0; it must be", {"num_speculative_tokens": 2.0}),
        ("num_speculative_tokens is True; it must be", {"num_speculative_tokens": True}),
    ],
)
def test_wrong_arguments(message, arguments):
    with pytest.raises(ValueError, match=message):
        draft_model(MODEL, **arguments)


def test_defaults():
    assert draft_model(MODEL).functions.tree == DraftTree.chain(4)
    functions = draft_model(MODEL, tree=DEEP).functions
    assert isinstance(functions, DraftTreeModel)
    assert functions.law_choices == (W, I, C, D)
