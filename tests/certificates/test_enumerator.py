import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.certificates import Branches, EnumeratingChoices, ReusedKeyError, branch_out
from specjax.choices import Stream


def all_outcomes(draws, num_rows=1, active=None, noise=None, compiled=True):
    """(origin, state): probability, of every path through ``draws(choices, state)``; the state is [B, 2] int32."""
    choices = EnumeratingChoices()
    start = Branches.start(jnp.zeros((num_rows, 2), jnp.int32), num_rows)
    active = np.ones(num_rows, bool) if active is None else np.array(active)

    def step(state):
        return draws(choices, state)

    with jax.enable_x64(True):
        end = branch_out(jax.jit(step) if compiled else step, choices, start, np.arange(num_rows), active, noise)
    return {
        (int(origin), *map(int, state)): float(probability)
        for origin, state, probability in zip(end.origins, end.state, end.probabilities, strict=True)
    }


def tokens(state, *probabilities):
    return jnp.broadcast_to(jnp.log(jnp.asarray(probabilities, jnp.float64))[None], (state.shape[0], len(probabilities)))


@pytest.mark.parametrize("compiled", [True, False])
def test_all_outcomes_and_no_impossible_one(compiled):
    def draws(choices, state):
        first = choices.categorical(Stream.DRAFT, 1, tokens(state, 0.5, 0.0, 0.5))
        # The second draw depends on the first.
        coin = choices.bernoulli(Stream.ACCEPT, 1, jnp.where(first == 0, 0.25, 1.0))
        return jnp.stack([first, coin.astype(jnp.int32)], axis=1)

    assert all_outcomes(draws, compiled=compiled) == {(0, 0, 0): 0.375, (0, 0, 1): 0.125, (0, 2, 1): 0.5}


def test_coins_of_several_nodes_and_rows():
    def draws(choices, state):
        probability = jnp.where(jnp.arange(2)[None, :] == 0, 0.25, jnp.nan)
        return choices.bernoulli(Stream.ACCEPT, jnp.array([1, 2]), jnp.broadcast_to(probability, state.shape)).astype(jnp.int32)

    assert all_outcomes(draws, num_rows=2) == {(0, 0, 0): 0.75, (0, 1, 0): 0.25, (1, 0, 0): 0.75, (1, 1, 0): 0.25}


def test_draws_within_loops_and_conditions():
    def draws(choices, state):
        def flip(carry):
            index, state = carry
            coin = choices.bernoulli(Stream.ACCEPT, index, jnp.full(state.shape[:1], 0.5)).astype(jnp.int32)
            return index + 1, jnp.where(jnp.arange(2)[None, :] == index, coin[:, None], state)

        state = jax.lax.while_loop(lambda carry: carry[0] < 2, flip, (0, state))[1]
        # All rows of the batch that are still open follow the one path; only one of them may draw.
        return jax.lax.cond(
            jnp.all(state[:, 0] == 1),
            lambda state: state.at[:, 0].set(choices.categorical(Stream.EMIT, 0, tokens(state, 0.0, 0.0, 1.0))),
            lambda state: state,
            state,
        )

    outcomes = all_outcomes(draws)
    assert sum(outcomes.values()) == 1
    assert {second for _, _, second in outcomes} == {0, 1}


def test_rows_that_are_not_active_take_one_path():
    def draws(choices, state):
        return jnp.stack([choices.categorical(Stream.EMIT, 0, tokens(state, 0.25, 0.75))] * 2, axis=1)

    assert all_outcomes(draws, num_rows=2, active=[True, False]) == {(0, 0, 0): 0.25, (0, 1, 1): 0.75, (1, 1, 1): 1.0}


def test_noise_comes_by_position():
    noise = np.arange(2 * 3 * 2.0).reshape(2, 3, 2) + 2.0**-40

    def draws(choices, state):
        # Row b has b committed tokens.
        return jnp.round((choices.gumbel(1, 2, jnp.float64) - jnp.arange(2)[None, :]) * 2.0**40).astype(jnp.int64) % 2**40

    # In float64: the last bit of every entry arrives.
    assert all_outcomes(draws, num_rows=2, noise=noise) == {(0, 1, 1): 1.0, (1, 1, 1): 1.0}


def test_the_same_draw_twice_is_one_draw():
    def draws(choices, state):
        return jnp.stack([choices.categorical(Stream.EMIT, 0, tokens(state, 0.25, 0.75)) for _ in range(2)], axis=1)

    assert all_outcomes(draws) == {(0, 0, 0): 0.25, (0, 1, 1): 0.75}


def test_a_key_for_two_distributions():
    def draws(choices, state):
        choices.categorical(Stream.EMIT, 0, tokens(state, 0.25, 0.75))
        choices.categorical(Stream.EMIT, 0, tokens(state, 0.5, 0.5))
        return state

    with pytest.raises(ReusedKeyError, match=r"with the key \(<Stream.EMIT: 3>, 0, 0\)"):
        all_outcomes(draws)


def test_a_key_in_two_rounds():
    choices = EnumeratingChoices()

    def step(state):
        return state + choices.bernoulli(Stream.ACCEPT, 1, jnp.full(state.shape[:1], 0.5))[:, None]

    start = Branches.start(jnp.zeros((1, 2), jnp.int32), 1)
    once = branch_out(step, choices, start, np.array([4]), np.array([True]))
    with pytest.raises(ReusedKeyError, match="in two rounds"):
        branch_out(step, choices, once, np.array([4, 4]), np.array([True, True]))
    again = branch_out(step, choices, once, np.array([5, 5]), np.array([True, True]))
    assert dict(zip(again.state[:, 0].tolist(), again.probabilities.tolist(), strict=True)) == {0: 0.25, 1: 0.5, 2: 0.25}


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda choices, state: choices.categorical(Stream.EMIT, 0, tokens(state, 0.5, 0.4)), "they must add up to 1"),
        (lambda choices, state: choices.categorical(Stream.EMIT, 0, tokens(state, 0.5, jnp.nan)), "they must add up to 1"),
        (lambda choices, state: choices.gumbel(0, 3, jnp.float64), "noise for 3 tokens is asked for"),
    ],
)
def test_errors_leave_compiled_code(draw, message):
    def draws(choices, state):
        draw(choices, state)
        return state

    with pytest.raises(ValueError, match=message):
        all_outcomes(draws)
