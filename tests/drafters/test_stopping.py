import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import SamplingParams
from specjax.drafters import DraftStep, StopAfterUnlikely, StopAtConfidence, StopAtEntropy, draft_model
from specjax.tree import Law
from tests import hash_model as tiny

TABLE = tiny.random_table(0)
TARGET = tiny.model(TABLE)
CLOSE = tiny.model(TABLE + 0.7 * tiny.random_table(1))
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [7], [9, 9]]
PARAMS = [
    SamplingParams(temperature=1.0, max_tokens=20, seed=5),
    SamplingParams(temperature=0.6, max_tokens=17, seed=6),
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(temperature=1.0, top_k=3, max_tokens=20, seed=8),
]


def asks(hook, q, newest=(0.0,)):
    """Whether the hook ends drafts of rows with these q and newest tokens of these probabilities."""
    q = jnp.asarray(q, jnp.float32)
    newest = jnp.broadcast_to(jnp.log(jnp.asarray(newest, jnp.float32)), q.shape[:1])
    return hook(DraftStep(jnp.log(q), jnp.zeros((len(q), 2), jnp.int32), jnp.int32(1), newest)).tolist()


def test_confidence():
    q = [[0.41, 0.39, 0.2], [0.39, 0.39, 0.22], [0, 1, 0], [0.4, 0.3, 0.3]]
    assert asks(StopAtConfidence(), q) == [False, True, False, False]
    assert asks(StopAtConfidence(least=0.405), q) == [False, True, False, True]
    assert asks(StopAtConfidence(least=0.0), q) == [False] * 4
    assert asks(StopAtConfidence(least=1.0), q) == [True, True, False, True]


def test_after_an_unlikely_token():
    q = [[0.5, 0.5]] * 4
    assert asks(StopAfterUnlikely(), q, [0.41, 0.39, 1.0, 0.0]) == [False, True, False, True]
    assert asks(StopAfterUnlikely(least=0.0), q, [0.41, 0.39, 1.0, 0.0]) == [False] * 4


def test_entropy():
    """1 - sqrt(.25 H) of uniform rows over 1, 2, 4 and 8 tokens: 1, .584, .411 and .279."""
    q = np.zeros((4, 8))
    for row, size in enumerate((1, 2, 4, 8)):
        q[row, :size] = 1 / size
    assert asks(StopAtEntropy(), q) == [False, False, False, True]
    assert asks(StopAtEntropy(least=0.42), q) == [False, False, True, True]
    assert asks(StopAtEntropy(least=0.42, scale=0.2), q) == [False, False, False, True]
    bound = 1 - math.sqrt(0.25 * math.log(8))
    assert [asks(StopAtEntropy(least=bound + step), q)[3] for step in (-1e-4, 1e-4)] == [False, True]


@pytest.mark.parametrize("hook", [StopAtEntropy, StopAtConfidence, StopAfterUnlikely])
@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
def test_wrong_settings(hook, value):
    with pytest.raises(ValueError, match=rf"{hook.__name__}: least is {value}; it must be from 0 to 1"):
        hook(least=value)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_wrong_scale(value):
    with pytest.raises(ValueError, match=f"StopAtEntropy: scale is {value}; it must be a number above 0"):
        StopAtEntropy(scale=value)


@dataclasses.dataclass(frozen=True)
class StopAt:
    """Ends row b's draft before token ``places[b]``; keeps what it was shown."""

    places: tuple[int, ...]
    seen: list = dataclasses.field(default_factory=list, compare=False)

    def __call__(self, step):
        jax.debug.callback(lambda *shown: self.seen.append(jax.tree.map(np.array, shown)), *vars(step).values(), ordered=True)
        return step.index == jnp.array(self.places)


def proposed(hook, law, asked=(4, 4, 4, 4)):
    bound = draft_model(CLOSE, 4, stop=hook)
    functions, context = bound.functions.with_law(law), tiny.context(PROMPTS, PARAMS)
    state = functions.init(bound.params, 4, 64).replace(observed=context.lengths)
    propose = jax.jit(lambda *inputs: functions.propose(bound.params, *inputs))
    draft, _ = propose(state, context, tiny.keys(context), jnp.array(asked, jnp.int32))
    jax.effects_barrier()
    return jax.device_get(draft)


def test_a_draft_ends_where_its_hook_says_and_the_hook_sees_no_token_before_it_is_drawn():
    """Invariant 6, non-anticipating."""
    hook = StopAt((2, 0, 9, 3))
    draft = proposed(hook, Law.INDEPENDENT, (4, 4, 3, 4))
    assert draft.valid.sum(axis=1).tolist() == [2, 0, 3, 3]
    whole = proposed(None, Law.INDEPENDENT, (4, 4, 3, 4))
    assert whole.valid.sum(axis=1).tolist() == [4, 4, 3, 4]
    # What is drafted is what would have been without a hook.
    np.testing.assert_array_equal(draft.tokens[draft.valid], whole.tokens[draft.valid])
    np.testing.assert_array_equal(draft.parent_log_probs[draft.valid], whole.parent_log_probs[draft.valid])
    # Row 3 is the last to go on; nobody is asked when all have stopped.
    assert [int(index) for _, _, index, _ in hook.seen] == [0, 1, 2, 3]
    for log_probs, tokens, index, newest in hook.seen:
        for row in np.flatnonzero(whole.valid[:, index] & (draft.valid.sum(axis=1) >= index)):
            if PARAMS[row].greedy:
                # How sure the model is, of which the one-hot q says nothing.
                assert np.isfinite(log_probs[row, : tiny.VOCAB]).all()
                assert np.argmax(log_probs[row]) == np.argmax(whole.parent_log_probs[row, index])
                continue
            np.testing.assert_array_equal(log_probs[row], whole.parent_log_probs[row, index])
            assert tokens[row].tolist() == [*whole.tokens[row, :index], *[0] * (4 - index)]
            last = whole.parent_log_probs[row, index - 1, whole.tokens[row, index - 1]] if index else 0
            assert newest[row] == last


def test_tokens_are_those_of_plain_decoding():
    """Invariant 2, seed-stable: whatever the hook says."""
    plain = [c.token_ids for c in specjax.generate(TARGET, PROMPTS, PARAMS)]
    drafter = draft_model(CLOSE, 4, stop=StopAfterUnlikely(least=0.5))
    out = specjax.generate(TARGET, PROMPTS, PARAMS, drafter=drafter, rule="gumbel")
    assert [c.token_ids for c in out] == plain
    # They keep the unlikely token and stop, the greedy row as well.
    drafted = [c.stats.num_draft_tokens / c.stats.num_drafts for c in out]
    assert all(1 <= mean < 3 for mean in drafted), drafted
    assert all(c.stats.num_accepted_tokens + c.stats.num_drafts == len(c.token_ids) for c in out)
