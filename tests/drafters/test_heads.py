"""Trained heads as drafters, on a tiny decoder; the heads' parameters are random, so that drafts are right now and then."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import SamplingParams
from specjax.decoding import run_rounds
from specjax.drafters import StopAtEntropy, draft_model, eagle, medusa
from specjax.training.states import forced
from specjax.tree import DraftTree
from tests import hash_model, heads

PROMPTS = [[1, 2, 3], [5], [7, 8, 9, 10, 11, 7, 8]]
MIXED = [
    SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, seed=5, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, max_tokens=20),
    SamplingParams(temperature=0.7, max_tokens=24, seed=8),
]
TREE = DraftTree((-1, 0, 0, 1, 1, 2, 3))
KINDS = {"eagle": (eagle, heads.eagle_head), "medusa": (medusa, heads.medusa_heads)}


def drafter(kind, head=None, **shape):
    bind, make = KINDS[kind]
    return bind(make() if head is None else head, **shape)


def tokens_of(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def plain():
    return tokens_of(specjax.generate(heads.target(), PROMPTS, MIXED))


@pytest.mark.parametrize("kind", KINDS)
def test_invariant_2_the_tokens_of_plain_decoding(plain, kind):
    completions = specjax.generate(heads.target(), PROMPTS, MIXED, drafter(kind, tree=TREE), rule="gumbel")
    assert tokens_of(completions) == plain
    assert sum(c.stats.num_accepted_tokens for c in completions) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_that_of_the_committed_text(kind):
    """After rounds that accepted none, some and all of a draft: cache and state are those of the text fed at once."""
    model, bound = heads.target(), drafter(kind, tree=TREE)
    batch, state = hash_model.start(model, PROMPTS, MIXED, bound)
    emitted = set()
    for _ in range(8):
        before = np.asarray(state.lengths)
        state, _ = run_rounds(batch.program, batch.params, state, jnp.int32(1))
        emitted |= set((np.asarray(state.lengths) - before).tolist())
    assert len(emitted) > 1
    head, functions, tokens = bound.head, bound.head.functions, state.tokens
    shared = head.shared(model)

    @jax.jit
    def fed_at_once():
        features = forced(model.functions.with_features(head.feature_layers), model.params, tokens)
        if kind == "medusa":
            return features[:, :, -1], None
        before = jnp.concatenate([jnp.zeros_like(features[:, :1]), features[:, :-1]], axis=1)
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        cache = functions.init_cache(head.params, 3, 1)
        joined = functions.joined(head.params, before)
        states, block = functions.apply(head.params, shared, tokens, joined, places, cache)
        return states, block.keys[0]

    states, keys = jax.device_get(fed_at_once())
    if kind == "eagle":
        followed = batch.program.drafter.caught_up(batch.params.drafter, state.drafter)
    for row, length in enumerate(np.asarray(state.lengths).tolist()):
        if kind == "medusa":
            # The root is the last token; what the heads read is the state of the one before it.
            np.testing.assert_allclose(state.drafter.hidden[row], states[row, length - 2], atol=1e-4)
        else:
            assert int(followed.cache.lengths[row]) == length
            np.testing.assert_allclose(followed.root_state[row], states[row, length - 1], atol=2e-4)
            np.testing.assert_allclose(followed.cache.keys[0][row, :, :length], keys[row, :, :length], atol=2e-4)


def test_tokens_wait_until_there_are_many_or_a_draft_is_asked_for():
    functions = drafter("eagle", num_speculative_tokens=2).functions
    params = drafter("eagle").params_for(heads.target())
    features = jax.random.normal(jax.random.key(0), (2, 16, len(functions.feature_layers), 16))
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 23)
    observe, seen = jax.jit(functions.observe), np.zeros(2, int)
    state = functions.observe(params, functions.init(params, 2, 16), tokens[:, :4], features[:, :4], jnp.array([4, 2]))
    assert (state.cache.lengths.tolist(), state.num_waiting.tolist()) == ([4, 2], [0, 0])  # a chunk of a prompt
    seen += [4, 2]
    waiting = []
    for counts in ([1, 3], [1, 3], [1, 2], [3, 0], [3, 1]):
        places = seen[:, None] + np.arange(3)[None, :]
        some = np.take_along_axis(tokens, places, 1), jnp.take_along_axis(features, places[..., None, None], 1)
        state = observe(params, state, *some, jnp.array(counts))
        seen += counts
        waiting.append(state.num_waiting.tolist())
        assert (state.cache.lengths + state.num_waiting).tolist() == seen.tolist()
    # Nothing is fed until a ninth would have to wait.
    assert waiting == [[1, 3], [2, 6], [3, 8], [6, 8], [3, 1]]
    followed = jax.jit(functions.caught_up)(params, state)
    assert (followed.cache.lengths.tolist(), followed.num_waiting.tolist()) == (seen.tolist(), [0, 0])
    at_once = functions.observe(params, functions.init(params, 2, 16), tokens, features, jnp.array(seen))
    np.testing.assert_allclose(followed.root_state, at_once.root_state, atol=1e-5)
    for row, length in enumerate(seen):
        kept = followed.cache.keys[0][row, :, :length], followed.cache.values[0][row, :, :length]
        wanted = at_once.cache.keys[0][row, :, :length], at_once.cache.values[0][row, :, :length]
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), kept, wanted)
    assert functions.reset(state, jnp.array([False, True])).num_waiting.tolist() == [3, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_row_drafts_as_a_new_one(kind):
    functions = drafter(kind, num_speculative_tokens=2).functions
    params = drafter(kind).params_for(heads.target())
    features = jax.random.normal(jax.random.key(0), (2, 4, len(functions.feature_layers), 16))
    tokens = jnp.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    used = functions.observe(params, functions.init(params, 2, 8), tokens, features, jnp.array([4, 3]))
    again = functions.observe(params, functions.reset(used, jnp.array([False, True])), tokens, features, jnp.array([0, 2]))
    fresh = functions.observe(params, functions.init(params, 2, 8), tokens, features, jnp.array([0, 2]))

    def row(state, index):
        newest = state.hidden if kind == "medusa" else state.root_state
        length = 0 if kind == "medusa" else int(state.cache.lengths[index])
        kept = () if kind == "medusa" else state.cache.keys[0][index, :, :length]
        return jax.device_get((newest[index], length, kept))

    jax.tree.map(np.testing.assert_array_equal, row(again, 1), row(fresh, 1))
    jax.tree.map(np.testing.assert_array_equal, row(again, 0), row(used, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_only_tokens_of_the_reduced_vocabulary_are_drafted(kind):
    """And every token of the target can still come: as a correction."""
    params = [SamplingParams(temperature=1.5, max_tokens=60, seed=seed) for seed in range(3)]
    batch, state = hash_model.start(heads.target(), PROMPTS, params, drafter(kind, num_speculative_tokens=3), rule="block")
    bound = drafter(kind, num_speculative_tokens=3)
    assert batch.params.drafter["shared"]["output"].shape == (len(heads.IDS), 16)
    context = batch.program.context(batch.params, state)
    propose = jax.jit(lambda *given: batch.program.drafter.propose(*given, hash_model.keys(given[2]), jnp.full((3,), 3))[0])
    draft = propose(batch.params.drafter, state.drafter, context)
    assert np.isin(np.asarray(draft.tokens), heads.IDS).all()
    outside = np.setdiff1d(np.arange(23), heads.IDS)
    assert np.all(np.asarray(draft.parent_log_probs)[..., outside] == -np.inf)
    np.testing.assert_allclose(np.sum(np.exp(draft.parent_log_probs), axis=-1), 1, rtol=1e-5)
    completions = specjax.generate(heads.target(), PROMPTS, params, bound, rule="block")
    assert np.isin([token for tokens in tokens_of(completions) for token in tokens], outside).any()


def test_one_trace_for_all_lengths_and_rows():
    from specjax.decoding.round import run_rounds as compiled

    before = compiled._cache_size()
    for prompts in (PROMPTS, PROMPTS[::-1]):
        specjax.generate(heads.target(), prompts, MIXED, drafter("eagle", num_speculative_tokens=3), rule="gumbel")
    assert compiled._cache_size() <= before + 1


def test_what_a_distilled_draft_model_drafts():
    """Its card's tree, unless something else is asked for; a chain is drafted as one."""
    trained = heads.draft_layers()
    shaped = dataclasses.replace(trained, tree=TREE)
    assert draft_model(shaped).functions.tree == TREE
    assert draft_model(shaped, 2).functions.tree == DraftTree.chain(2)
    assert draft_model(shaped, stop=StopAtEntropy()).functions.tree == DraftTree.chain(4)
    chain = draft_model(dataclasses.replace(trained, tree=DraftTree.chain(3))).functions
    assert (type(chain).__name__, chain.num_speculative_tokens) == ("DraftModel", 3)


def test_bad_heads_trees_and_targets():
    head, many = heads.eagle_head(), heads.medusa_heads()
    for call, message in (
        (lambda: eagle(many), r"eagle: head is .*; it must be a trained autoregressive head"),
        (lambda: medusa(head), r"medusa: heads is .*; it must be trained Medusa heads"),
        (lambda: medusa("heads"), r"medusa: heads is 'heads'"),
        (lambda: draft_model(head), r"model is a trained head of kind eagle; .*specjax.drafters.eagle takes this head"),
        (lambda: eagle(heads.draft_layers()), r"eagle: head is .*; it must be a trained autoregressive head"),
        (lambda: heads.draft_layers(width=8), r"draft of 'tiny': made for width 8 and 23 tokens, its target has width 16"),
        # Case 125.
        (lambda: medusa(many, tree=DraftTree.chain(5)), r"the tree is 5 deep; there are 3 heads, one for each depth"),
        (lambda: medusa(many, 4), r"the tree is 4 deep; there are 3 heads"),
        (lambda: eagle(head, 2, tree=TREE), r"eagle: num_speculative_tokens is 2 beside a tree; give one of them"),
        (lambda: eagle(head, 40), r"num_speculative_tokens is 40; it must be a whole number from 0 to 32"),
        (lambda: eagle(head, tree=[0, 1]), r"eagle: tree is \[0, 1\]; it must be a DraftTree"),
        (lambda: dataclasses.replace(head, ids=heads.IDS[:-1]), r"the vocabulary map has shape \(12,\)"),
        (lambda: dataclasses.replace(head, ids=heads.IDS[::-1].copy()), r"its ids must rise"),
        (
            lambda: dataclasses.replace(head, ids=np.append(heads.IDS[:-1], 23)),
            r"runs from 0 to 23; .* at most 22, the target's last",
        ),
        (lambda: dataclasses.replace(head, ids=None), r"draft_vocab_size is 13, and the vocabulary map is None"),
        (lambda: dataclasses.replace(head, params=many.params), r"the parameters' names are not those"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    others = {
        "width 16; the target 'tiny' has width 8": dataclasses.replace(heads.CONFIG, width=8),
        "num_layers 2; the target 'tiny' has num_layers 3": dataclasses.replace(heads.CONFIG, num_layers=3),
    }
    for message, config in others.items():
        with pytest.raises(ValueError, match=rf"eagle\(tiny\) was made for 'tiny' with {message}"):
            specjax.generate(heads.target(config=config), [[1]], drafter=eagle(head))
    with pytest.raises(
        ValueError, match=r"draft_model\(1 layers for tiny\) was made for 'tiny'; the target 'tiny' has .* other weights"
    ):
        specjax.generate(heads.target(seed=1), [[1]], drafter=draft_model(heads.draft_layers()))
    with pytest.raises(ValueError, match=r"has the same sizes and other weights"):
        specjax.generate(heads.target(seed=1), [[1]], drafter=medusa(many))
    with pytest.raises(ValueError, match=r"is a HashModel without embedding_matrix"):
        specjax.generate(hash_model.model(hash_model.random_table(0)), [[1]], drafter=medusa(many))
