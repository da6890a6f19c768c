import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.choices import KeyedChoices, Stream

ACCEPT, DRAFT, EMIT, MATCH = Stream.ACCEPT, Stream.DRAFT, Stream.EMIT, Stream.MATCH


def one(seed=3, committed=7, completion=0):
    """Choices of a single row."""
    return KeyedChoices.from_seeds([seed], jnp.array([committed]), jnp.array([completion]))


def many(count, seed=0):
    """Choices of ``count`` rows of different seeds."""
    return KeyedChoices.from_seeds(range(seed, seed + count), jnp.full((count,), 4))


def noise_of(choices, stream, node):
    """What a key draws from very many tokens: different keys draw different ones."""
    return int(choices.categorical(stream, node, jnp.zeros((1, 2**20)))[0])


def test_the_streams_have_fixed_numbers():
    """Renumbering would change every seeded result."""
    assert {stream.name: int(stream) for stream in Stream} == {"SHARED_GUMBEL": 0, "DRAFT": 1, "ACCEPT": 2, "EMIT": 3, "MATCH": 4}


def test_seeded_draws_stay_what_they_are():
    choices = KeyedChoices.from_seeds([0, 1, 2**64 - 1], jnp.array([5, 6, 7]), jnp.array([0, 1, 2]))
    uniform = jnp.zeros((3, 1000))
    assert choices.categorical(EMIT, 0, uniform).tolist() == [85, 901, 415]
    noise = [[3.666687, 0.686988], [-0.016580, 0.369415], [-0.266225, 0.140560]]
    np.testing.assert_allclose(choices.gumbel(1, 2, jnp.float32), noise, atol=2e-6)


def test_a_seed_draws_the_same_in_every_place_of_a_batch():
    """Invariant 3, row-independent."""
    seeds, committed, completion = [5, 2**64 - 1, 9], [3, 8, 2], [0, 2, 1]
    batch = KeyedChoices.from_seeds(seeds, jnp.array(committed), jnp.array(completion))
    log_probs = jax.nn.log_softmax(jnp.array(np.random.default_rng(0).normal(size=(3, 50)), jnp.float32))
    nodes = jnp.array([[1, 2], [4, 1], [1, 1]])
    probability = jnp.array([[0.3, 0.5], [0.5, 0.7], [0.4, 0.4]])
    for row in range(3):
        alone = KeyedChoices.from_seeds([seeds[row]], jnp.array(committed[row : row + 1]), jnp.array(completion[row : row + 1]))
        assert (
            batch.categorical(EMIT, nodes[:, 0], log_probs)[row]
            == alone.categorical(EMIT, nodes[row, 0], log_probs[row : row + 1])[0]
        )
        np.testing.assert_array_equal(
            batch.bernoulli(ACCEPT, nodes, probability)[row],
            alone.bernoulli(ACCEPT, nodes[row : row + 1], probability[row : row + 1])[0],
        )
        np.testing.assert_array_equal(
            batch.gumbel(jnp.array([0, 1, 2]), 7, jnp.float32)[row], alone.gumbel(row, 7, jnp.float32)[0]
        )


def test_keys_depend_on_all_they_are_made_of():
    """Case 103: draft, acceptance and correction do not share noise. Nor do nodes, rounds, completions or seeds."""
    drawn = {
        "as it is": noise_of(one(), EMIT, 1),
        "draft": noise_of(one(), DRAFT, 1),
        "accept": noise_of(one(), ACCEPT, 1),
        "match": noise_of(one(), MATCH, 1),
        "node": noise_of(one(), EMIT, 2),
        "round": noise_of(one(committed=8), EMIT, 1),
        "completion": noise_of(one(completion=1), EMIT, 1),
        "seed": noise_of(one(seed=4), EMIT, 1),
        "high word": noise_of(one(seed=3 + 2**32), EMIT, 1),
        "words swapped": noise_of(one(seed=3 * 2**32), EMIT, 1),
        # A sum of round and node would be the same for these two.
        "sum": noise_of(one(committed=6), EMIT, 2),
    }
    assert len(set(drawn.values())) == len(drawn)
    assert drawn["as it is"] == noise_of(one(), EMIT, 1)


def test_coins_and_tokens_of_one_round_are_independent():
    """Over many seeds the coin of a node tells nothing about its token or about the next node's coin."""
    choices = many(4000)
    half = jnp.full((4000, 2), 0.5)
    coins = np.asarray(choices.bernoulli(ACCEPT, jnp.array([1, 2]), half))
    token = np.asarray(choices.categorical(EMIT, 1, jnp.zeros((4000, 2))))
    for pair in ((coins[:, 0], coins[:, 1]), (coins[:, 0], token), (coins[:, 1], token)):
        assert abs(np.corrcoef(*pair)[0, 1]) < 0.06


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_seeds_of_64_bits(seed):
    choices = KeyedChoices.from_seeds([seed], jnp.array([1]))
    assert choices.seeds.tolist() == [[seed >> 32, seed % 2**32]]
    assert 0 <= choices.categorical(EMIT, 0, jnp.zeros((1, 11)))[0] < 11


def test_coins_that_are_certain():
    count = 100_000
    probability = jnp.stack([jnp.zeros(count), jnp.full(count, jnp.nan), jnp.ones(count), jnp.full(count, 2.0)], axis=1)
    coins = many(count).bernoulli(ACCEPT, jnp.arange(4), probability)
    assert jnp.sum(coins, axis=0).tolist() == [0, 0, count, count]


def test_coins_have_their_probability():
    count = 20_000
    share = jnp.mean(many(count).bernoulli(ACCEPT, 1, jnp.full(count, 0.3)))
    assert abs(share - 0.3) < 4 * np.sqrt(0.3 * 0.7 / count)


def test_tokens_have_their_probability_and_impossible_ones_never_come():
    count, probs = 20_000, np.array([0.0, 0.5, 1e-30, 0.3, 0.2, 0.0])
    log_probs = jnp.broadcast_to(jnp.log(jnp.asarray(probs, jnp.float32))[None], (count, 6))
    counts = np.bincount(many(count).categorical(EMIT, 0, log_probs), minlength=6)
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
    assert np.all(np.abs(counts / count - probs) < 4 * np.sqrt(0.25 / count))


def test_tokens_are_drawn_from_the_very_array_that_is_given():
    """Case 73: many entries that half precision rounds; a chi-square test with 999 degrees of freedom."""
    size, count = 1000, 20_000
    logits = jnp.asarray(np.random.default_rng(0).normal(scale=0.01, size=size), jnp.bfloat16)
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    counts = np.zeros(size)
    for seed in range(0, count, 4000):
        rows = jnp.broadcast_to(log_probs[None], (4000, size))
        counts += np.bincount(many(4000, seed).categorical(DRAFT, 1, rows), minlength=size)
    expected = np.exp(np.asarray(log_probs, np.float64)) * count
    chi_square = np.sum((counts - expected) ** 2 / expected)
    assert 800 < chi_square < 1200


def test_shared_noise_belongs_to_a_position():
    """Invariant 2, seed-stable: position 9 has the same noise whichever round reaches it."""
    direct, ahead = one(committed=9), one(committed=7)
    np.testing.assert_array_equal(direct.gumbel(0, 5, jnp.float32), ahead.gumbel(2, 5, jnp.float32))
    np.testing.assert_array_equal(direct.gumbel(0, 5, jnp.float32), ahead.gumbel(jnp.array([2]), 5, jnp.float32))
    for other in (one(committed=8), one(committed=9, seed=4), one(committed=9, completion=1)):
        assert not np.array_equal(direct.gumbel(0, 5, jnp.float32), other.gumbel(0, 5, jnp.float32))


def test_shared_noise_is_gumbel_noise():
    noise = np.asarray(many(2000).gumbel(0, 10, jnp.float32))
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.04)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.1)
    tokens = np.argmax(noise + np.log(np.arange(1, 11)), axis=1)
    np.testing.assert_allclose(np.bincount(tokens, minlength=10) / 2000, np.arange(1, 11) / 55, atol=0.03)
