"""A model whose every logit depends on every token and its position, in whole numbers: exact, and compiled in a moment.

The state after a sequence is ``sum((token + 1) * weight(position)) mod STATES``, and the logits are that row of a table. One
missing, stale or displaced cache entry leads to another row, and no order of summation matters, so tests can ask for equality.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.cache import KVBlock, KVCache
from specjax.choices import KeyedChoices
from specjax.decoding import prefill, run_rounds
from specjax.decoding.generate import Batch
from specjax.decoding.state import NO_TOKEN
from specjax.drafters import Context, NoDrafter
from specjax.models.base import ModelOutput
from specjax.sampling import PathDistribution, SamplingArrays
from specjax.tree import Law
from specjax.verification import RULES, SHAPES, why_not

STATES = 9973
WIDTH = 52
"""Width of the logits; two ids more than the vocabulary."""
VOCAB = 50


def weight(position):
    return (7 + 101 * position + 13 * position * position) % STATES


LETTERS = [b"ab"[i % 2 :][:1] * (i % 3 + 1) + (b"", b"c", b"\xe8", b"\xaa\x9e")[i % 4] for i in range(VOCAB)]
"""Texts of tokens that overlap in many ways; some end in half a character."""


class Pieces:
    """A tokenizer that only decodes."""

    size = VOCAB

    def __init__(self, parts=LETTERS):
        self.parts = parts

    def decode(self, ids):
        return b"".join(self.parts[index] for index in ids).decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class HashModel:
    """Parameters are ``{"table": [STATES, width]}``."""

    def apply(self, params, tokens, positions, cache, block_mask):
        size = tokens.shape[1]
        mask = jnp.tril(jnp.ones((size, size), bool)) if block_mask is None else block_mask
        keys, values = tokens[:, None, :, None] + 1, positions[:, None, :, None]
        own = (keys * weight(values))[:, 0, :, 0]
        committed = (cache.keys[0] * weight(cache.values[0]))[:, 0, :, 0]
        visible = jnp.arange(cache.capacity)[None, :] < cache.lengths[:, None]
        past = jnp.sum(jnp.where(visible, committed, 0), axis=1, keepdims=True)
        mask = jnp.broadcast_to(mask, (len(tokens), size, size))
        state = (past + jnp.sum(jnp.where(mask, own[:, None, :], 0), axis=2)) % STATES
        hidden = state[..., None].astype(params["table"].dtype)
        return ModelOutput(hidden, hidden[:, :, None], KVBlock((keys,), (values,)))

    def unembed(self, params, hidden):
        return params["table"][hidden[..., 0].astype(jnp.int32)]

    def init_cache(self, params, batch, capacity):
        return KVCache.zeros(1, batch, 1, capacity, 1, jnp.int32)


@flax.struct.dataclass
class Seen:
    """Everything a drafter was shown, and how much of it: [B, S + 1] each."""

    tokens: jax.Array
    features: jax.Array
    count: jax.Array


class Observer(NoDrafter):
    """A drafter that keeps what it observes."""

    def init(self, params, batch, capacity):
        return Seen(jnp.zeros((batch, capacity + 1), jnp.int32), jnp.zeros((batch, capacity + 1)), jnp.zeros(batch, jnp.int32))

    def observe(self, params, state, tokens, features, counts):
        slot = jnp.arange(tokens.shape[1])[None, :]
        place = jnp.where(slot < counts[:, None], state.count[:, None] + slot, state.tokens.shape[1])
        row = jnp.arange(len(tokens))[:, None]
        return Seen(
            state.tokens.at[row, place].set(tokens, mode="drop"),
            state.features.at[row, place].set(features[:, :, 0, 0], mode="drop"),
            state.count + counts,
        )


@dataclasses.dataclass(frozen=True)
class AllOf:
    """Asks several rules in one compiled round and decides what they agree on; where they do not, it emits a wrong token."""

    rules: tuple
    name, lossless, seed_stable, laws, shapes = "all of them", True, False, (Law.DETERMINISTIC,), frozenset(SHAPES)

    def __call__(self, choices, draft, target_log_probs):
        first, *others = [rule(choices, draft, target_log_probs) for rule in self.rules]
        same = jnp.ones(first.num_accepted.shape, bool)
        for other in others:
            same &= (other.next_token == first.next_token) & jnp.all(other.path == first.path, axis=1)
        return first.replace(next_token=jnp.where(same, first.next_token, (first.next_token + 1) % VOCAB))


def all_rules(shape):
    """All built-in rules that take deterministic drafts of this shape, as one."""
    return AllOf(tuple(rule for rule in RULES.values() if why_not(rule, shape, Law.DETERMINISTIC) is None))


def random_table(seed=0, width=WIDTH, scale=2.0):
    return (scale * np.random.default_rng(seed).normal(size=(STATES, width))).astype(np.float32)


def model(table, vocab_size=VOCAB, max_positions=64, **settings):
    params = {"table": jnp.asarray(table)}
    return specjax.Model(functions=HashModel(), params=params, vocab_size=vocab_size, max_positions=max_positions, **settings)


def states(tokens):
    """The state after every prefix."""
    tokens = np.asarray(tokens)
    return np.cumsum((tokens + 1) * weight(np.arange(len(tokens)))) % STATES


def entries(cache, row):
    """The (token, position) pairs in a row of a hash model's cache."""
    tokens, positions = (np.asarray(a)[row, 0, : int(cache.lengths[row]), 0].tolist() for a in (cache.keys[0], cache.values[0]))
    return [(token - 1, position) for token, position in zip(tokens, positions, strict=True)]


def greedy(table, prompt, num_tokens, vocab_size=VOCAB):
    """Plain greedy decoding in NumPy."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(np.argmax(table[states(tokens)[-1], :vocab_size])))
    return tokens[len(prompt) :]


def rejected_at(table, prompt, tokens, wrong):
    """A draft's table: that of the target, but sure of another token where ``tokens[i]`` with i in ``wrong`` is next."""
    table = table.copy()
    before = states([*prompt, *tokens])[len(prompt) - 1 :]
    for index in wrong:
        table[before[index], (tokens[index] + 1) % VOCAB] += 1000
    return table


def start(target, prompts, params, drafter=None, rule="gumbel"):
    """A batch whose prompts are in, and its state, to be driven by hand."""
    batch = Batch.prepare(target, prompts, params, drafter, rule, allow_lossy=False)
    program = dataclasses.replace(batch.program, prefill_width=batch.prefill_width)
    return batch, prefill(program, batch.params, batch.initial_state(), jnp.int32(batch.capacity))


def one_round(batch, state):
    """The next round of ``start``'s batch, by the program that ``generate`` runs."""
    return run_rounds(batch.program, batch.params, state, jnp.int32(1))


def context(histories, params, vocab_size=VOCAB, width=WIDTH, capacity=64):
    """What a drafter is shown of rows with these committed tokens."""
    tokens = np.full((len(histories), capacity + 1), 7, np.int32)  # behind the end stands something plausible
    for row, history in zip(tokens, histories, strict=True):
        row[: len(history)] = history
    tokens, lengths = jnp.asarray(tokens), jnp.asarray([len(history) for history in histories], jnp.int32)
    sampling = SamplingArrays.stack(params, [p.seed or 0 for p in params])
    no_stops = jnp.full((len(histories), 1), NO_TOKEN, jnp.int32)
    return Context(
        tokens=tokens,
        lengths=lengths,
        room=capacity - lengths,
        sampling=sampling,
        distribution=PathDistribution.create(sampling, tokens, lengths, lengths, no_stops, vocab_size, width=width),
        target_params=(),
        target_cache=None,
        vocab_size=vocab_size,
        logits_width=width,
        logits_dtype=jnp.dtype(jnp.float32),
    )


def keys(context):
    """The choices of a round on ``context``."""
    return KeyedChoices(context.sampling.seeds, context.sampling.completion, context.lengths)
