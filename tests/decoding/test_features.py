"""What a drafter observes: every committed token once, with the target's features of the position before it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.decoding.generate import Batch
from specjax.decoding.round import prefill, run_rounds
from specjax.drafters.prompt_lookup import PromptLookup
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder

CONFIG = DecoderConfig(
    vocab_size=12, num_layers=1, width=8, num_query_heads=2, num_kv_heads=1, head_dim=4, mlp_width=8, max_positions=200
)


@dataclasses.dataclass(frozen=True)
class Recorder(PromptLookup):
    """Prompt lookup that writes down what it observes: (tokens [B, S], features [B, S, F, E], counts [B])."""

    capacity: int = 160

    def init(self, params, batch, capacity):
        features = jnp.full((batch, self.capacity, 2, CONFIG.width), jnp.nan)
        return jnp.full((batch, self.capacity), -1), features, jnp.zeros((batch,), jnp.int32)

    def observe(self, params, state, tokens, features, counts):
        seen_tokens, seen_features, seen = state
        place = jnp.arange(tokens.shape[1])[None, :]
        place = jnp.where(place < counts[:, None], seen[:, None] + place, self.capacity)
        row = jnp.arange(tokens.shape[0])[:, None]
        return (
            seen_tokens.at[row, place].set(tokens, mode="drop"),
            seen_features.at[row, place].set(features, mode="drop"),
            seen + counts,
        )


def test_observed_tokens_and_features():
    decoder = Decoder(CONFIG, feature_layers=(0, 1))
    params = decoder.init(jax.random.key(3), scale=0.6)
    model = specjax.Model(functions=decoder, params=params, vocab_size=12, max_positions=200)
    # One token, one chunk, several chunks; the second row loops, so that drafts are accepted.
    prompts = [[5], [1, 2, 3] * 4, list(np.arange(70) % 12)]
    settings = specjax.SamplingParams(temperature=0, max_tokens=30)
    batch = Batch.prepare(model, prompts, settings, Recorder(3, 2, 1), "auto", False)
    batch.program = dataclasses.replace(batch.program, prefill_width=16)
    state = prefill(batch.program, batch.params, batch.initial_state(), jnp.int32(100))
    while jnp.any(state.running):
        state, _ = run_rounds(batch.program, batch.params, state, jnp.int32(8))

    assert int(state.counters.num_accepted_tokens_per_pos.sum()) > 10
    tokens, features, counts = jax.device_get(state.drafter)
    for row, prompt in enumerate(prompts):
        length = int(state.lengths[row])
        assert length == len(prompt) + 30
        assert counts[row] == length
        np.testing.assert_array_equal(tokens[row, :length], state.tokens[row, :length])
        assert not features[row, 0].any()
        # Layer 0 is the embedding; the last one is what one linear pass over the finished text shows.
        text = tokens[row : row + 1, :length]
        whole = decoder.apply(params, text, jnp.arange(length)[None], decoder.init_cache(params, 1, 1)).features[0]
        np.testing.assert_allclose(features[row, 1:length], whole[:-1], atol=1e-5)
