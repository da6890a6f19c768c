"""Your own model and your own drafter in specjax's round, in plain JAX: no Flax, no inheritance, no registration.

Run it with ``python examples/own_model.py``. It prints what was generated with and without speculation (the same, token by
token) and how much of it the drafter guessed.

A model is four pure functions around parameters of any kind: ``apply``, ``unembed``, ``init_cache``, and the cache's own
``commit`` and ``roll_back``. A drafter is ``init``, ``observe``, ``propose`` and ``reset``.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

import specjax
from specjax.models.base import ModelOutput
from specjax.tree import Draft, DraftTree, Law

VOCAB_SIZE, WIDTH = 32, 16


# The model: the next token depends on the newest token, and a little on a fading memory of all tokens before it. What it has to
# remember of a token is its id, so that is what its cache holds. Letters in shapes: B rows, T tokens of a pass, S capacity.


@flax.struct.dataclass
class TokenCache:
    """Committed tokens [B, S], the first ``lengths`` [B] of each row valid. Any pytree serves that has these members."""

    tokens: jax.Array
    lengths: jax.Array

    @property
    def capacity(self):
        return self.tokens.shape[1]

    def commit(self, block, nodes, counts):
        """Appends ``block[b, nodes[b, i]]`` for the first ``counts[b]`` entries of ``nodes`` [B, C]."""
        slot = jnp.arange(nodes.shape[1])[None, :]
        # Places behind the end are dropped by the scatter: neither uncounted nodes nor an overflow displace anything.
        place = jnp.where(slot < counts[:, None], self.lengths[:, None] + slot, self.capacity)
        row = jnp.arange(len(self.lengths))[:, None]
        tokens = self.tokens.at[row, place].set(jnp.take_along_axis(block, nodes, axis=1), mode="drop")
        return TokenCache(tokens, jnp.minimum(self.lengths + counts, self.capacity))

    def roll_back(self, lengths):
        """Rejected drafts are forgotten by a smaller length."""
        return self.replace(lengths=jnp.minimum(self.lengths, lengths))


@dataclasses.dataclass(frozen=True)
class FadingMemory:
    """The functions; frozen, so hashable: they are a static part of the compiled round, and the parameters are not."""

    def apply(self, params, tokens, positions, cache, block_mask):
        if block_mask is None:  # Causal. A tree of drafts brings its own mask: a node sees its ancestors.
            block_mask = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
        memory = self._fading(params, positions, cache.tokens, jnp.arange(cache.capacity)[None, :])
        visible = jnp.arange(cache.capacity)[None, None, :] < cache.lengths[:, None, None]
        past = jnp.einsum("bts,bse->bte", jnp.where(visible, memory, 0), params["embedding"][cache.tokens])
        memory = self._fading(params, positions, tokens, positions)
        visible = jnp.broadcast_to(block_mask, memory.shape)
        recent = jnp.einsum("bts,bse->bte", jnp.where(visible, memory, 0), params["embedding"][tokens])
        hidden = params["embedding"][tokens] + 0.8 * (past + recent)
        # Features are for drafters that read the target's hidden states; this one's drafter does not. The block is what
        # ``commit`` will get: here, the tokens themselves.
        return ModelOutput(hidden=hidden, features=hidden[:, :, None], block=tokens)

    def _fading(self, params, positions, tokens, their_positions):
        """[B, T, S] how much of each token is left at each position."""
        age = positions[:, :, None] - their_positions[:, None, :]
        return params["weight"][tokens][:, None, :] * 0.7 ** jnp.maximum(age, 0)

    def unembed(self, params, hidden):
        return hidden @ params["out"]

    def init_cache(self, params, batch, capacity):
        return TokenCache(jnp.zeros((batch, capacity), jnp.int32), jnp.zeros(batch, jnp.int32))


def make_model() -> specjax.Model:
    """The model with random parameters."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "embedding": jax.random.normal(keys[0], (VOCAB_SIZE, WIDTH)),
        "weight": jax.random.uniform(keys[1], (VOCAB_SIZE,)),
        "out": jax.random.normal(keys[2], (WIDTH, VOCAB_SIZE)),
    }
    return specjax.Model(functions=FadingMemory(), params=params, vocab_size=VOCAB_SIZE, max_positions=256)


# The drafter: a table of the likeliest successor of every token, followed from the newest token on.


@dataclasses.dataclass(frozen=True)
class Bigrams:
    """Parameters are the table [V]. It needs no state: all it looks at is the newest token."""

    num_speculative_tokens: int
    # Drafts that are a function of the text, not drawn. Every built-in rule is exact for them, and needs no q.
    law_choices = (Law.DETERMINISTIC,)

    @property
    def tree(self):
        return DraftTree.chain(self.num_speculative_tokens)

    def with_law(self, law):
        return self

    def init(self, params, batch, capacity):
        return ()

    def observe(self, params, state, tokens, features, counts):
        return state

    def propose(self, params, state, context, choices, num_draft):
        token = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)[:, 0]
        drafted = []
        for _ in range(self.num_speculative_tokens):
            token = params[token]
            drafted.append(token)
        # Rows may be asked for fewer tokens than the tree holds: near the end of a budget, or none once they have finished.
        valid = jnp.arange(self.num_speculative_tokens)[None, :] < num_draft[:, None]
        laws = (Law.DETERMINISTIC,) * self.num_speculative_tokens
        return Draft(jnp.stack(drafted, axis=1), valid, parent_log_probs=None, tree=self.tree, laws=laws), state

    def reset(self, state, rows):
        return state


def make_drafter(model: specjax.Model, num_speculative_tokens: int = 4) -> specjax.drafters.BoundDrafter:
    """Asks the model for the likeliest successor of every token alone."""
    token = jnp.arange(VOCAB_SIZE)[:, None]
    output = model.apply(model.params, token, jnp.zeros_like(token), model.init_cache(VOCAB_SIZE, 1))
    table = jnp.argmax(model.unembed(model.params, output.hidden)[:, 0], axis=-1).astype(jnp.int32)
    return specjax.drafters.BoundDrafter(Bigrams(num_speculative_tokens), table, name="bigrams")


def main() -> None:
    model = make_model()
    drafter = make_drafter(model)
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [7]]
    for temperature in (0.0, 1.0):
        params = specjax.SamplingParams(temperature=temperature, max_tokens=24, seed=0)
        plain = specjax.generate(model, prompts, params)
        # The gumbel rule gives the very tokens of plain decoding also when sampling; "auto" would choose it here.
        speculative = specjax.generate(model, prompts, params, drafter=drafter, rule="gumbel")
        print(f"temperature {temperature}")
        for without, completion in zip(plain, speculative, strict=True):
            assert completion.token_ids == without.token_ids, (completion.token_ids, without.token_ids)
            stats = completion.stats
            print(f"  {completion.token_ids}")
            print(
                f"  {stats.num_accepted_tokens} of {stats.num_draft_tokens} drafted tokens accepted, "
                f"{stats.mean_acceptance_length:.2f} tokens per round"
            )
    print("The same tokens as plain decoding.")


if __name__ == "__main__":
    main()
