"""A drafter of your own that learns while it runs and draws its tokens from a q, and a mistake that is easily made with it.

Run it with ``python examples/own_drafter.py``. The drafter counts which token followed which in each row's own text and draws
from these counts. A rule can only be as right as the q that it is told: the first try draws more boldly than it says, and the
certificate names an output whose probability is wrong; the second is exact. Then the drafter works for a small model.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

import specjax
from specjax.choices import Stream
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.tree import Draft, DraftTree, Law


# Letters in shapes: B rows, C tokens of one call, K draft tokens, V vocabulary.
@flax.struct.dataclass
class Seen:
    """What a row remembers. Arrays have rows as their first axis, so that requests can move in and out of an engine's slots.

    Attributes:
      counts: [B, V, V] float32, how often one token followed another.
      newest: [B] int32, the last token that was committed; -1 before the first.
    """

    counts: jax.Array
    newest: jax.Array


@dataclasses.dataclass(frozen=True)
class Habits:
    """The functions. The parameter is a number: what a pair of tokens counts that was never seen."""

    num_speculative_tokens: int
    vocab_size: int
    says_what_it_draws: bool = True
    # Drawn from q, each token on its own: a rule may test against q.
    law_choices = (Law.INDEPENDENT,)

    @property
    def tree(self):
        return DraftTree.chain(self.num_speculative_tokens)

    def with_law(self, law):
        return self

    def init(self, params, batch, capacity):
        return Seen(jnp.zeros((batch, self.vocab_size, self.vocab_size)), jnp.full((batch,), -1, jnp.int32))

    def observe(self, params, state, tokens, features, counts):
        """Only committed tokens come here, so there is nothing that would have to be taken back."""
        before = jnp.concatenate([state.newest[:, None], tokens[:, :-1]], axis=1)
        is_there = (jnp.arange(tokens.shape[1])[None, :] < counts[:, None]) & (before >= 0)
        row = jnp.arange(len(counts))[:, None]
        # Places behind the end are dropped by the scatter.
        seen = state.counts.at[row, jnp.where(is_there, before, self.vocab_size), tokens].add(1, mode="drop")
        last = jnp.take_along_axis(tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
        return Seen(seen, jnp.where(counts > 0, last, state.newest))

    def propose(self, params, state, context, choices, num_draft):
        row, length = jnp.arange(len(num_draft)), self.num_speculative_tokens
        newest = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)[:, 0]

        def draft_one(carry, place):
            token, drafted = carry
            guess = jnp.log(state.counts[row, token] + params).astype(context.logits_dtype)
            # The model's logits may be wider than its vocabulary; what is there cannot be emitted.
            guess = jnp.pad(guess, ((0, 0), (0, context.logits_width - self.vocab_size)), constant_values=-jnp.inf)
            # The request's own temperature, filters and penalties, behind the draft tokens so far.
            log_q = context.distribution.log_probs(guess[:, None], drafted[:, None], place[None])[:, 0]
            drawn_from = log_q if self.says_what_it_draws else jax.nn.log_softmax(2 * log_q)
            # Every draw of a round has its own number, that of the node.
            token = choices.categorical(Stream.DRAFT, place + 1, drawn_from)
            return (token, drafted.at[:, place].set(token)), log_q

        start = newest, jnp.zeros((len(num_draft), length), jnp.int32)
        (_, drafted), log_q = jax.lax.scan(draft_one, start, jnp.arange(length, dtype=jnp.int32))
        valid = jnp.arange(length)[None, :] < num_draft[:, None]
        laws = (Law.INDEPENDENT,) * length
        return Draft(drafted, valid, jnp.swapaxes(log_q, 0, 1), tree=self.tree, laws=laws), state

    def reset(self, state, rows):
        return Seen(jnp.where(rows[:, None, None], 0, state.counts), jnp.where(rows, -1, state.newest))


def make_drafter(vocab_size: int, num_speculative_tokens: int = 4, **settings) -> specjax.drafters.BoundDrafter:
    """The drafter with its parameter."""
    return specjax.drafters.BoundDrafter(Habits(num_speculative_tokens, vocab_size, **settings), 0.2, name="habits")


def make_model() -> specjax.Model:
    """A small decoder with random weights, which has habits too."""
    config = DecoderConfig(
        vocab_size=32, num_layers=1, width=16, num_query_heads=2, num_kv_heads=1, head_dim=8, mlp_width=32, max_positions=256
    )
    decoder = Decoder(config)
    return specjax.Model(functions=decoder, params=decoder.init(jax.random.key(0), scale=0.5), vocab_size=32, max_positions=256)


def main() -> None:
    for says_what_it_draws in (False, True):
        drafter = make_drafter(2, 1, says_what_it_draws=says_what_it_draws)
        certificate = specjax.certify("token", vocab_size=2, drafter=drafter)
        print(f"{drafter.functions}: lossless {certificate.lossless}, error {certificate.max_error:.0e}")
        if not certificate.lossless:
            print(f"  {certificate.counterexample}")

    model = make_model()
    params = specjax.SamplingParams(temperature=0.5, max_tokens=120, seed=0)
    for completion in specjax.generate(model, [[3, 1, 4], [1, 5, 9, 2, 6]], params, make_drafter(32), rule="token"):
        stats = completion.stats
        print(
            f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} drafted tokens accepted, "
            f"{stats.mean_acceptance_length:.2f} tokens per round"
        )


if __name__ == "__main__":
    main()
