"""What heads are trained on is what they meet in use."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.draft_layers import layers_of
from specjax.training.batches import TrainingBatch
from specjax.training.draft import DraftObjective
from specjax.training.eagle import EagleObjective
from specjax.training.losses import NO_RANK
from specjax.training.medusa import MedusaObjective
from specjax.training.states import forced
from tests import heads

TOKENS = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]])


def batch_of(head, weights=None):
    model = heads.target()
    features = forced(model.functions.with_features((1, 2)), model.params, TOKENS)
    weights = jnp.ones(TOKENS.shape) if weights is None else weights
    return TrainingBatch(TOKENS, features, weights)


def test_the_unroll_gives_the_states_of_drafting():
    """At every root: the text fed with the target's states, then the tokens that follow with the head's own."""
    head = heads.eagle_head()
    functions, shared = head.functions, head.shared(heads.target())
    batch = batch_of(head)
    steps = EagleObjective(functions, depth=4).unroll(head.params, shared, batch)
    before = jnp.concatenate([jnp.zeros_like(batch.features[:, :1]), batch.features[:, :-1]], axis=1)

    @jax.jit
    def feed(cache, tokens, states, positions):
        states, block = functions.apply(head.params, shared, tokens, states, positions, cache)
        nodes = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        return states, cache.commit(block, nodes, jnp.full((2,), tokens.shape[1]))

    for root in (0, 3, 6):
        places = jnp.broadcast_to(jnp.arange(root + 1)[None], (2, root + 1))
        joined = functions.joined(head.params, before[:, : root + 1])
        states, cache = feed(functions.init_cache(head.params, 2, 16), TOKENS[:, : root + 1], joined, places)
        np.testing.assert_allclose(states[:, -1], steps[0][:, root], atol=2e-5)
        for step in range(1, 4):
            place = root + step
            position = jnp.full((2, 1), place)
            states, cache = feed(cache, TOKENS[:, place : place + 1], states[:, -1:], position)
            np.testing.assert_allclose(states[:, 0], steps[step][:, place], atol=2e-5)


def test_a_perfect_medusa_head_has_no_loss():
    """Head k beside state i is compared with the target's output at i + k: the token k places after the root i + 1."""
    head = heads.medusa_heads(ids=None)
    objective = MedusaObjective(head.functions)
    batch = batch_of(head)
    shared = head.shared(heads.target())
    target = objective.target_logits(shared, batch)

    class Perfect(type(head.functions)):
        def logits(self, params, shared, hidden):
            return jnp.stack([jnp.roll(target, -k, axis=1) for k in (1, 2, 3)], axis=2)

    perfect = dataclasses.replace(objective, functions=Perfect(head.functions.config))
    loss, metrics = perfect(head.params, shared, batch)
    assert abs(float(loss)) < 1e-6
    assert metrics["top_1"].tolist() == [1.0, 1.0, 1.0]
    assert float(objective(head.params, shared, batch)[0]) > 0.1
    ranks = perfect.ranks(head.params, shared, batch)
    # Token t seen from root t - d - 1: the rank in the target's own output at t - 1.
    own = np.sum(
        np.asarray(target[:, :-1]) > np.take_along_axis(np.asarray(target[:, :-1]), np.asarray(TOKENS)[:, 1:, None], 2), 2
    )
    for d in range(3):
        assert ranks[:, d, d + 2 :].tolist() == own[:, d + 1 :].tolist()


def test_a_draft_model_that_is_its_target_has_no_loss():
    """All layers of the target: the same logits at every place, and the target's own ranks at every depth."""
    target = heads.target(config=dataclasses.replace(heads.CONFIG, logit_soft_cap=1.5))
    functions, params = layers_of(target, [0, 1], len(heads.IDS))
    shared = {"embedding": target.params["embedding"], "output": target.params["embedding"][heads.IDS], "ids": heads.IDS}
    shared = jax.tree.map(jnp.asarray, shared | {"soft_cap": 1.5})
    batch = batch_of(None)
    objective = DraftObjective(functions, depth=3)
    loss, metrics = objective(params, shared, batch)
    assert abs(float(loss)) < 1e-5
    assert metrics["top_1"].tolist() == [1.0]
    ranks = np.asarray(objective.ranks(params, shared, batch))
    own = np.asarray(objective.target_logits(shared, batch))
    for row, tokens in enumerate(np.asarray(TOKENS)):
        for place in range(1, len(tokens)):
            known = np.flatnonzero(tokens[place] == heads.IDS)
            rank = np.sum(own[row, place - 1] > own[row, place - 1, known]) if len(known) else NO_RANK
            assert ranks[row, :, place].tolist() == [rank] * 3


def test_weights_choose_the_tokens_that_count():
    for head, objective in (
        (heads.eagle_head(), EagleObjective(heads.eagle_head().functions, depth=2)),
        (heads.medusa_heads(), MedusaObjective(heads.medusa_heads().functions)),
        (heads.draft_layers(), DraftObjective(heads.draft_layers().functions)),
    ):
        shared = head.shared(heads.target())
        only = jnp.zeros(TOKENS.shape).at[1, 7].set(1.0)
        loss, _ = objective(head.params, shared, batch_of(head, only))
        other = batch_of(head, only)
        # Another text behind the token, and another row, change nothing.
        other = other.replace(tokens=other.tokens.at[1, 8:].set(0).at[0].set(3), features=other.features.at[1, 7:].set(0.5))
        np.testing.assert_allclose(objective(head.params, shared, other)[0], loss, rtol=1e-5)
        assert float(loss) > 0


def test_bad_arguments():
    functions = heads.eagle_head().functions
    with pytest.raises(ValueError, match=r"EagleObjective: loss is 'mse'; it must be one of kl, ce, tv"):
        EagleObjective(functions, loss="mse")
    with pytest.raises(ValueError, match=r"EagleObjective: depth is 0"):
        EagleObjective(functions, depth=0)
    with pytest.raises(ValueError, match=r"DraftObjective: depth is 1.5"):
        DraftObjective(heads.draft_layers().functions, depth=1.5)
