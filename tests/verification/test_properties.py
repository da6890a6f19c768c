"""What every rule promises, whatever its core: by name, for all of them, on trees where they take trees."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.choices import KeyedChoices
from specjax.row_trees import RowTrees
from specjax.tree import Draft, DraftTree, Law
from specjax.verification import ROW_TREE, RULES, TREE, Greedy, Gumbel, Match

V = 7
# Numbered in depth; nodes 1, 2 and 5 have children.
BUSHY = DraftTree((-1, 0, 1, 2, 1, 0, 5))
SEEDS = [11, 12, 2**40 + 13, 14, 15, 16, 17, 18]
COMMITTED = jnp.array([3, 9, 4, 6, 5, 8, 2, 7])
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
RATIO_RULES = [RULES[name] for name in ("token", "block", "multi_round", "without_replacement", "traversal", "kseq")]
ratio_rules = pytest.mark.parametrize("rule", RATIO_RULES, ids=lambda rule: rule.name)


def tree_of(rule):
    return BUSHY if TREE in rule.shapes else DraftTree.chain(3)


@functools.cache
def case(rule):
    """A draft of eight rows, each different, and log p [8, T, V]."""
    random, tree = np.random.default_rng(5), tree_of(rule)
    p, q = (random.dirichlet(np.ones(V), (8, size)) for size in (tree.size, len(tree.inner_nodes)))
    q = 0.5 * q + 0.5 * p[:, list(tree.inner_nodes)]  # not too far from p, so that some are accepted
    tokens = np.argsort(random.gumbel(size=(8, V)))[:, : tree.num_nodes]
    valid = np.arange(tree.num_nodes) < np.array([9, 9, 9, 9, 9, 0, 1, 2])[:, None]
    law = rule.laws[0]
    parent_log_probs = None if law is Law.DETERMINISTIC else jnp.log(jnp.asarray(q, jnp.float32))
    draft = Draft(jnp.asarray(tokens), jnp.asarray(valid), parent_log_probs, tree, (law,) * tree.num_nodes).checked()
    return draft, jnp.log(jnp.asarray(p, jnp.float32))


@functools.cache
def compiled(rule):
    return jax.jit(rule.__call__)


def verdicts(rule, draft, log_p, rows=tuple(range(8))):
    """(path, accepted, next token) of a batch of these eight rows, by the rule's one program."""
    rows = list(rows)
    draft, log_p, committed = jax.tree.map(lambda leaf: leaf[np.array(rows)], (draft, log_p, COMMITTED))
    verdict = compiled(rule)(KeyedChoices.from_seeds([SEEDS[row] for row in rows], committed), draft, log_p)
    return list(zip(*(leaf.tolist() for leaf in (verdict.path, verdict.num_accepted, verdict.next_token)), strict=True))


@every_rule
def test_rows_equal_rows_alone(rule):
    """Invariant 3, row-independent; case 104: rows of NaN, of p and of q, leave the others as they are."""
    draft, log_p = case(rule)
    whole = verdicts(rule, draft, log_p)
    assert len({next_token for _, _, next_token in whole}) > 1
    # Eight times the same row, and the rows in other places.
    for rows in ((0,) * 8, (3,) * 8, (6, 5, 6, 7, 0, 2, 4, 6)):
        assert verdicts(rule, draft, log_p, rows) == [whole[row] for row in rows]
    broken = log_p.at[1].set(jnp.nan).at[4, 1].set(jnp.nan)
    if draft.parent_log_probs is not None:
        draft = draft.replace(parent_log_probs=draft.parent_log_probs.at[2].set(jnp.nan))
    after = verdicts(rule, draft, broken)
    assert [after[row] for row in (0, 3, 5, 6, 7)] == [whole[row] for row in (0, 3, 5, 6, 7)]
    # One program, whatever is in the rows.
    assert compiled(rule)._cache_size() == 1


@every_rule
def test_a_row_of_nan_ends_where_the_nan_is(rule):
    """Case 104: the walk does not pass it by, so the round sees it; rules that do not emit a draw of the target's end there."""
    draft, log_p = case(rule)
    for node in (0, 1):
        # Every draft is as good as the target's own.
        likely = (
            draft if draft.parent_log_probs is None else draft.replace(parent_log_probs=log_p[:, list(draft.tree.inner_nodes)])
        )
        broken = log_p.at[:, node].set(jnp.nan)
        for path, accepted, _ in verdicts(rule, likely, broken):
            parents = [draft.tree.parents[child] for child in path[:accepted]]
            # The match walk takes whatever token comes out of the NaN; the round drops it.
            assert isinstance(rule, (Match, Gumbel, Greedy)) or node not in parents
    # All of p broken: the token comes from the root, which is broken.
    if not isinstance(rule, (Match, Gumbel, Greedy)):
        assert [accepted for _, accepted, _ in verdicts(rule, draft, jnp.full_like(log_p, jnp.nan))] == [0] * 8


@ratio_rules
@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["nan", "inf"])
def test_a_q_that_is_no_distribution_counts_as_rejected(rule, value):
    """Case 106: the correction comes from p, and is not the token that was just rejected where p excludes it."""
    draft, log_p = case(rule)
    excluded = draft.tokens[:, 0]
    p = jnp.exp(log_p).at[jnp.arange(8), 0, excluded].set(0)
    log_p = jnp.log(p / p.sum(-1, keepdims=True))
    whole = draft.replace(parent_log_probs=draft.parent_log_probs.at[:, 0, 3].set(value))
    assert [accepted for _, accepted, _ in verdicts(rule, whole, log_p)] == [0] * 8
    # As if nothing had been drafted.
    nothing = draft.replace(valid=jnp.zeros_like(draft.valid))
    assert verdicts(rule, whole, log_p) == verdicts(rule, nothing, log_p)
    # Broken deeper down, it counts there only.
    deeper = draft.replace(parent_log_probs=draft.parent_log_probs.at[:, 1, 3].set(value))
    children = [node for node, parent in enumerate(draft.tree.parents) if parent == draft.tree.inner_nodes[1]]
    without = draft.replace(valid=draft.valid.at[:, jnp.array(children) - 1].set(False)).checked()
    assert verdicts(rule, deeper, log_p) == verdicts(rule, without, log_p)


@every_rule
def test_greedy_rows_come_out_greedy(rule):
    """One-hot p: the tokens are those of the argmax, whatever was drafted."""
    draft, log_p = case(rule)
    best = jnp.argmax(log_p, axis=-1)
    # The rows' first child is right, the second, none, ...
    tree = draft.tree
    tokens = np.array(draft.tokens)
    for row in range(8):
        for node in range(1, tree.size):
            right = int(best[row, tree.parents[node]])
            tokens[row, node - 1] = right if (row + node) % 3 else (right + node) % V
    one_hot = jnp.log(jax.nn.one_hot(best, V))
    greedy = draft.replace(tokens=jnp.asarray(tokens))
    lengths = set()
    for row, (path, accepted, next_token) in enumerate(verdicts(rule, greedy, one_hot)):
        end = 0
        for child in path[:accepted]:
            assert tree.parents[child] == end
            assert tokens[row, child - 1] == best[row, end]
            end = child
        assert next_token == best[row, end]
        lengths.add(accepted)
    assert len(lengths) > 2


@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if ROW_TREE in rule.shapes], ids=lambda rule: rule.name)
def test_a_row_s_own_tree_decides_as_a_static_one(rule):
    """Every second row has another tree, in one program; the verdicts are those of programs that know the tree."""
    trees, depth = (BUSHY, DraftTree((-1, 0, 0, 0, 2, 2, 4))), 3
    parents = jnp.array([trees[row % 2].parents for row in range(8)])
    draft, log_p = case(RULES["membership"])
    # A surer target, and tokens that it likes, so that much is accepted.
    log_p = jax.nn.log_softmax(2.5 * log_p, axis=-1)
    best = jnp.argsort(-log_p, axis=-1)[jnp.arange(8)[:, None], parents[:, 1:], jnp.arange(6)[None] % 3]
    draft = draft.replace(tokens=best.astype(jnp.int32))
    of_rows = draft.replace(tree=RowTrees.from_parents(parents, depth)).checked()
    found = verdicts(rule, of_rows, log_p)
    for place, tree in enumerate(trees):
        static = verdicts(rule, draft.replace(tree=tree).checked(), log_p)
        assert found[place::2] == static[place::2]
    assert len({tuple(path) for path, _, _ in found}) > 2


@dataclasses.dataclass(frozen=True)
class Fixed:
    """All coins are the same number; tokens are the most likely. Keeps what the next token is drawn from, and all dtypes."""

    coin: jax.Array | float = 0.0
    emitted: list = dataclasses.field(default_factory=list)
    dtypes: set = dataclasses.field(default_factory=set)

    def bernoulli(self, stream, node, probability):
        self.dtypes.add(probability.dtype)
        return self.coin < probability

    def categorical(self, stream, node, log_probs):
        self.dtypes.add(log_probs.dtype)
        self.emitted.append(log_probs)
        return jnp.argmax(log_probs, axis=-1).astype(jnp.int32)

    def gumbel(self, offset, vocab_size, dtype):
        self.dtypes.add(jnp.dtype(dtype))
        return jnp.zeros((8, vocab_size), dtype)


@functools.cache
def with_coins(rule):
    def decide(coin, draft, log_p):
        choices = Fixed(coin)
        verdict = rule(choices, draft, log_p)
        (emitted,) = choices.emitted
        return verdict, jnp.exp(emitted)

    return jax.jit(decide)


@ratio_rules
@pytest.mark.parametrize("q", ["q", 0.0, np.nan])
def test_what_the_target_excludes_is_never_accepted(rule, q):
    """Not with a coin of 0, the smallest number that can be drawn, and whatever q is."""
    draft, log_p = case(rule)
    tree, parents = draft.tree, jnp.array(draft.tree.parents[1:])
    row = jnp.arange(8)[:, None]
    # Rows 0 to 3: none of the draft is possible; the others: only the first child is.
    excluded = jnp.exp(log_p).at[row, parents[None], draft.tokens].set(0)
    excluded = excluded.at[4:, 0, :].set(0).at[jnp.arange(4, 8), 0, draft.tokens[4:, 0]].set(1)
    target = jnp.log(excluded / excluded.sum(-1, keepdims=True))
    if q != "q":
        at = jnp.asarray(tree.inner_index)[parents]
        draft = draft.replace(parent_log_probs=draft.parent_log_probs.at[row, at[None], draft.tokens].set(jnp.log(q)))
    verdict, emitted = with_coins(rule)(0.0, draft, target)
    accepts = 0 if q != "q" and np.isnan(q) else 1
    assert verdict.num_accepted.tolist() == [0] * 4 + [accepts, 0, accepts, accepts]  # row 5 drafted nothing
    # Nor drawn afterwards.
    end = verdict.path[:, 0]
    assert np.all(np.asarray(emitted)[np.isneginf(target[jnp.arange(8), end])] == 0)
    np.testing.assert_allclose(emitted.sum(-1), 1, atol=1e-5)


@ratio_rules
def test_an_empty_residual_falls_back_to_p(rule):
    """p = q, and coins that say no all the same: rounding may leave nothing, and then the token comes from p."""
    draft, log_p = case(rule)
    same = draft.replace(parent_log_probs=log_p[:, list(draft.tree.inner_nodes)])
    verdict, emitted = with_coins(rule)(2.0, same, log_p)
    assert verdict.num_accepted.tolist() == [0] * 8
    np.testing.assert_allclose(emitted.sum(-1), 1, atol=1e-5)
    if rule.name in ("token", "block"):
        np.testing.assert_allclose(emitted, np.exp(log_p[:, 0]), atol=1e-5)


@every_rule
@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
def test_dtypes(rule, x64):
    """Everything happens in the dtype of the target's log-probabilities, and whole numbers are int32, wherever 64 bits are on."""
    with jax.enable_x64(x64):
        dtype = jnp.float64 if x64 else jnp.float32
        for draft, log_p in (case(rule), (Draft.empty(8), jnp.zeros((8, 1, V)))):
            choices = Fixed()
            if draft.parent_log_probs is not None:
                draft = draft.replace(parent_log_probs=draft.parent_log_probs.astype(dtype))
            verdict = jax.eval_shape(functools.partial(rule, choices), draft, log_p.astype(dtype))
            assert choices.dtypes <= {jnp.dtype(dtype)}
            assert [leaf.dtype for leaf in jax.tree.leaves(verdict)] == [jnp.int32] * 3
            assert [leaf.shape for leaf in jax.tree.leaves(verdict)] == [(8, draft.tree.depth), (8,), (8,)]


@every_rule
def test_nothing_drafted(rule):
    """Depth 0: one token from p, and rows whose whole draft is not valid get the same one, however few nodes stand for it."""
    draft, log_p = case(rule)
    verdict = rule(KeyedChoices.from_seeds(SEEDS, COMMITTED), Draft.empty(8), log_p[:, :1])
    assert verdict.path.shape == (8, 0)
    empty = list(zip(verdict.num_accepted.tolist(), verdict.next_token.tolist(), strict=True))
    nothing = draft.replace(valid=jnp.zeros_like(draft.valid))
    for invalid in (verdicts(rule, nothing, log_p), verdicts(rule, nothing.with_one_node(), log_p[:, :2])):
        assert [(accepted, token) for _, accepted, token in invalid] == empty
    assert len({token for _, token in empty}) > 1
