import jax
import jax.numpy as jnp
import numpy as np

from specjax.certificates.tiny import NUM_DISTRIBUTIONS, constant_model, counting_tree, table_drafter, table_model
from specjax.certificates.tiny_row_trees import row_tree_drafter
from specjax.choices import KeyedChoices
from specjax.drafters import Context
from specjax.row_trees import TreeBounds
from specjax.tree import DraftTree, Law


def expected(params, context):
    row = sum(int(params["numbers"][position, token]) for position, token in enumerate(context)) % NUM_DISTRIBUTIONS
    return params["table"][row]


def test_the_whole_context_counts_through_cache_and_block():
    model = table_model(vocab_size=3, seed=4)
    params = jax.tree.map(jnp.asarray, model.params)
    cache = model.functions.init_cache(params, 2, 5)
    prompts = jnp.array([[0, 2], [1, 0]])
    positions = jnp.array([[0, 1], [0, 1]])
    output = model.apply(params, prompts, positions, cache)
    cache = cache.commit(output.block, jnp.array([[0, 1], [0, 1]]), jnp.array([2, 1]))
    # A fork behind contexts of different length; the last node is a child of the first one.
    mask = jnp.array([[True, False, False], [False, True, False], [True, False, True]])
    tokens, depths = jnp.array([[0, 1, 2], [2, 1, 0]]), jnp.array([[0, 0, 1]])
    output = model.apply(params, tokens, cache.lengths[:, None] + depths, cache, mask)
    logits = model.unembed(params, output.hidden)
    contexts = [[[0, 2, 0], [0, 2, 1], [0, 2, 0, 2]], [[1, 2], [1, 1], [1, 2, 0]]]
    np.testing.assert_allclose(logits, [[expected(model.params, c) for c in row] for row in contexts], rtol=1e-6)


def test_a_constant_model():
    model = constant_model([0.25, 0.75])
    params = jax.tree.map(jnp.asarray, model.params)
    cache = model.functions.init_cache(params, 1, 4)
    output = model.apply(params, jnp.array([[1, 0]]), jnp.array([[0, 1]]), cache)
    np.testing.assert_allclose(jnp.exp(model.unembed(params, output.hidden)), [[[0.25, 0.75]] * 2], rtol=1e-6)


def context_of(tokens, lengths, vocab_size):
    return Context(
        tokens=tokens,
        lengths=lengths,
        room=jnp.full_like(lengths, 9),
        sampling=None,
        distribution=None,
        target_params=None,
        target_cache=None,
        vocab_size=vocab_size,
        logits_width=vocab_size,
        logits_dtype=jnp.float32,
    )


def test_the_counting_tree():
    functions = counting_tree(DraftTree((-1, 0, 0, 1, 1))).functions
    context = context_of(jnp.array([[0, 1, 9], [4, 9, 9]]), jnp.array([2, 1]), 5)
    draft, _ = functions.propose((), (), context, None, jnp.array([4, 1]))
    assert draft.tokens.tolist() == [[2, 3, 3, 4], [0, 1, 1, 2]]
    assert draft.valid.tolist() == [[True] * 4, [True, False, False, False]]


def test_the_row_tree_drafter():
    """Shapes and sizes follow text, log-probabilities and, coupled, the noise."""
    drafter = row_tree_drafter(TreeBounds(num_nodes=3, depth=2), seed=1)
    lengths = jnp.arange(64) % 4 + 1
    context = context_of(jnp.asarray(np.random.default_rng(0).integers(0, 3, (64, 5))), lengths, 3)
    choices = KeyedChoices.from_seeds(range(64), lengths)
    for law in drafter.functions.law_choices:
        propose = jax.jit(drafter.functions.with_law(law).propose)
        draft, _ = propose(drafter.params, (), context, choices, jnp.full(64, 3))
        assert len({tuple(parents) for parents in draft.tree.parents.tolist()}) >= 3
        assert len(set(jnp.sum(draft.valid, axis=1).tolist())) >= 2
        assert set(draft.laws) == {law}
        for tokens, parents in zip(draft.tokens.tolist(), draft.tree.parents.tolist(), strict=True):
            # Siblings are distinct tokens.
            assert len({*zip(parents[1:], tokens, strict=True)}) == 3
        nothing, _ = propose(drafter.params, (), context, choices, jnp.zeros(64, int))
        assert not nothing.valid.any()


def test_the_table_drafter_with_a_reduced_vocabulary():
    """Its ids 0 and 1 are the target's 0 and 2; q depends on the path, and is 0 for what it does not know."""
    tree = DraftTree((-1, 0, 0, 1))
    drafter = table_drafter(tree, vocab_size=2, offsets=(0, 1))
    lengths = jnp.array([2, 1, 3])
    context = context_of(jnp.array([[0, 1, 0], [2, 0, 0], [1, 1, 2]]), lengths, 3)
    choices = KeyedChoices.from_seeds([1, 2, 3], lengths)
    functions = drafter.functions.with_law(Law.WITHOUT_REPLACEMENT)
    draft, _ = functions.propose(drafter.params, (), context, choices, jnp.array([3, 1, 2]))
    assert draft.valid.tolist() == [[True] * 3, [True, False, False], [True, True, False]]
    assert set(draft.tokens.ravel().tolist()) == {0, 2}
    assert sorted(draft.tokens[0, :2].tolist()) == [0, 2]
    q = np.exp(draft.parent_log_probs)
    np.testing.assert_allclose(q.sum(axis=-1), 1, rtol=1e-6)
    assert (q[..., 1] == 0).all()
    # Root and first child have distributions of their own.
    assert np.abs(q[0, 0] - q[0, 1]).max() > 0.01
