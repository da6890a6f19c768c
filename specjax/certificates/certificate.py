"""Whether a rule, a drafter and the round around them leave the target's distribution unchanged: by enumeration.

A tiny target and a tiny drafter run through the shipped round in float64, over several rounds (noise that is used again in the
next round shows in no single one). Every outcome of every draw is gone through. Each output is then completed to
one length by the target itself, exactly, and the distribution of completed outputs is compared with the target's.

Rules that promise the same tokens for the same seed draw shared Gumbel noise, which cannot be enumerated. They are
certified by identity: over a finite set of noise, whatever else is drawn, the output must be that of plain decoding.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.certificates.enumerator import CHUNK, Branches, EnumeratingChoices, branch_out, production_key
from specjax.certificates.tiny import table_model
from specjax.decoding.round import Round
from specjax.decoding.state import NO_TOKEN, Finish, Parameters
from specjax.drafters.base import bind
from specjax.drafters.draft_model import draft_model
from specjax.models.loaded import Model
from specjax.sampling.allowed_tokens import START, AllowedTokens, advance
from specjax.sampling.params import SamplingArrays, SamplingParams
from specjax.sampling.path import LogitsProcessor, PathDistribution
from specjax.tree import Law
from specjax.verification.base import Rule, check_fits
from specjax.verification.match_walk import Greedy
from specjax.verification.rules import RULES

TOLERANCE = 1e-12
"""Largest error of a lossless rule: what remains is float64's rounding."""

MAX_OUTPUTS = 200_000
"""Different outputs that a certificate may have to tell apart."""

MAX_BUDGETS = 16
"""Rows of the batch for each prompt."""

NUM_NOISE_ROWS = 8
"""Rows of shared Gumbel noise that a certificate by identity goes through, for every prompt."""

PROMPTS = ((1,), (0, 1))
"""Prompts of different lengths, in one batch."""


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What an enumeration found.

    Attributes:
      lossless: whether ``max_error`` is at most 1e-12.
      max_error: the largest difference between the probability of an output, of any length, and the target's; for rules certified
        by identity, the share of outputs that differ from plain decoding's.
      expected_tokens: mean number of tokens that a round emits.
      counterexample: in words, the smallest output that is wrong; None if there is none.
    """

    lossless: bool
    max_error: float
    expected_tokens: float
    counterexample: str | None


@dataclasses.dataclass(frozen=True)
class _Start:
    """One row of the batch that is started from: a prompt, and how many tokens may follow it."""

    prompt: tuple[int, ...]
    max_tokens: int


def certify(
    rule: str | Rule,
    *,
    vocab_size: int = 3,
    depth: int = 2,
    rounds: int = 2,
    law: Law | None = None,
    drafter=None,
    target: Model | None = None,
    max_tokens: Sequence[int] | None = None,
    sampling: SamplingParams | None = None,
    logits_processor: LogitsProcessor | None = None,
    allowed_tokens: AllowedTokens | None = None,
    seed: int = 0,
    key: Callable[[object, int, int], Hashable] = production_key,
) -> Certificate:
    """Certifies a verification rule, or finds where it is wrong.

    Args:
      rule: a name, or a rule of your own.
      vocab_size: V of the tiny models; 2 hides mistakes that 3 shows.
      depth: draft tokens of the tiny draft model.
      rounds: rounds to go through; 1 hides mistakes that 2 show.
      law: how the draft model draws; None is the first of the rule's laws that it knows.
      drafter: another drafter than the tiny draft model; ``depth`` is then that of its tree.
      target: another target than the tiny table of random distributions.
      max_tokens: budgets of new tokens; a row of the batch for each. None: as many as the rounds may emit.
      sampling: settings of target and drafter, stop ids included; None is temperature 1 (0 for ``greedy``).
      logits_processor, allowed_tokens: as for ``specjax.generate``.
      seed: of the random distributions.
      key: what the keys of draws are derived from, to see what other keys would do.

    Raises:
      ValueError: names the argument, its value and the range; or the rule does not take this law or shape.
      specjax.certificates.ReusedKeyError: two draws would not be independent.

    Example:
      >>> certify("token", vocab_size=2, depth=1, rounds=1).lossless
      True
    """
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(f"certify: rule is {rule!r}; it must be one of {sorted(RULES)}, or a rule object")
        rule = RULES[rule]
    for name, value, least in (("vocab_size", vocab_size, 2), ("depth", depth, 0), ("rounds", rounds, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"certify: {name} is {value!r}; it must be a whole number of at least {least}")
    if target is None:
        target = table_model(vocab_size, seed)
    vocab_size = target.vocab_size
    drafter = draft_model(table_model(vocab_size, seed + 1), depth) if drafter is None else bind(drafter)
    functions = drafter.functions
    if law is None:
        law = next((law for law in rule.laws if law in functions.law_choices), None)
    if law is not None:
        functions = functions.with_law(law)
        check_fits(rule, functions.tree, (law,) * functions.tree.num_nodes)
    longest = rounds * (functions.tree.depth + 1)
    if vocab_size**longest > MAX_OUTPUTS:
        raise ValueError(
            f"certify: vocab_size {vocab_size}, depth {functions.tree.depth} and rounds {rounds} make {vocab_size**longest} "
            f"outputs; at most {MAX_OUTPUTS} can be gone through"
        )
    if sampling is None:
        sampling = SamplingParams(temperature=0.0 if isinstance(rule, Greedy) else 1.0)
    budgets = (longest,) if max_tokens is None else tuple(max_tokens)
    for budget in budgets:
        if not 1 <= budget <= longest:
            raise ValueError(f"certify: max_tokens is {max_tokens}; each must be from 1 to {longest}")
    if len(budgets) > MAX_BUDGETS:
        raise ValueError(f"certify: max_tokens holds {len(budgets)} budgets; at most {MAX_BUDGETS}")

    next_state = None if allowed_tokens is None else allowed_tokens.next_state
    starts = [_Start(prompt, budget) for prompt, budget in itertools.product(PROMPTS, budgets)]
    noise = None
    if rule.seed_stable or law is Law.COUPLED:
        starts = [start for start in starts for _ in range(NUM_NOISE_ROWS)]
        positions = max(map(len, PROMPTS)) + longest + 1
        noise = np.random.default_rng(seed).gumbel(size=(len(starts), positions, vocab_size))
    with jax.enable_x64(True):
        program = Round(
            target=target.functions,
            drafter=functions,
            rule=rule,
            vocab_size=vocab_size,
            logits_width=vocab_size,
            logits_dtype=jnp.float64,
            prefill_width=2,
            logits_processor=logits_processor,
        )
        params = jax.tree.map(jnp.asarray, Parameters(target.params, drafter.params, next_state))
        branches = _all_branches(program, params, starts, sampling, rounds, noise, key)
        whole = _target_laws(program, params, longest, sampling)
    laws = {start: whole[start.prompt].cut(start.max_tokens) for start in starts}
    return _compare(branches, starts, laws, noise if rule.seed_stable else None, rounds)


def _all_branches(program: Round, params, starts, sampling, rounds, noise, key) -> Branches:
    """Every state that ``rounds`` rounds can lead to from ``starts``."""
    # As wide as every later batch.
    padded = starts + [starts[-1]] * (CHUNK - len(starts))
    capacity = max(len(start.prompt) + start.max_tokens for start in starts)
    tokens = np.zeros((CHUNK, capacity + 1), np.int32)
    for row, start in enumerate(padded):
        tokens[row, : len(start.prompt)] = start.prompt
    lengths = np.array([len(start.prompt) for start in padded], np.int32)
    limits = lengths + np.array([start.max_tokens for start in padded], np.int32)
    choices = _choices(key)
    state = _begin(program, sampling, params, tokens, lengths, limits)
    branches = Branches.start(state, len(starts))
    step = functools.partial(_step, program, sampling, choices, params)
    for _ in range(rounds):
        running = branches.state.finish == Finish.RUNNING
        branches = branch_out(step, choices, branches, branches.state.lengths, running, noise)
    return branches


@functools.lru_cache(maxsize=8)
def _choices(key) -> EnumeratingChoices:
    """One object for each way to derive keys: what is compiled calls back to it, and is compiled once."""
    return EnumeratingChoices(key)


def _settings(sampling: SamplingParams, rows: int = CHUNK) -> SamplingArrays:
    """Constants of what is compiled: XLA leaves out the filters that nobody asks for."""
    return SamplingArrays.stack([sampling] * rows, [0] * rows)


def _stop_ids(sampling: SamplingParams, rows: int = CHUNK) -> jax.Array:
    ids = np.array(sampling.stop_token_ids or (NO_TOKEN,), np.int32)
    return jnp.asarray(np.tile(ids, (rows, 1)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _begin(program: Round, sampling, params, tokens, lengths, limits):
    state = program.init(params, tokens, lengths, limits, _stop_ids(sampling), _settings(sampling))
    for _ in range(-(-max(map(len, PROMPTS)) // program.prefill_width)):
        state = program.prefill_chunk(params, state)
    return state.replace(sampling=None)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _step(program: Round, sampling, choices, params, state):
    after, _ = program.step(params, state.replace(sampling=_settings(sampling)), choices)
    # Statistics decide nothing: without them more branches are equal.
    return after.replace(sampling=None, counters=state.counters)


@dataclasses.dataclass(frozen=True)
class _TargetLaw:
    """The target's distribution of the outputs of one prompt.

    Attributes:
      conditional: [outputs, length], probability of each token of each output given those before it; outputs in
        lexicographic order.
      log_probs: [outputs, length, V], of the token at each place.
    """

    conditional: np.ndarray
    log_probs: np.ndarray

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.log_probs.shape[-1]

    @property
    def length(self) -> int:
        """Tokens of an output."""
        return self.log_probs.shape[1]

    def cut(self, length: int) -> "_TargetLaw":
        """The law of the first ``length`` tokens."""
        stride = self.vocab_size ** (self.length - length)
        return _TargetLaw(self.conditional[::stride, :length], self.log_probs[::stride, :length])

    def completed(self, output: tuple[int, ...]) -> tuple[slice, np.ndarray]:
        """The completions of ``output`` to full length, and the probability of each."""
        number = int(sum(token * self.vocab_size**place for place, token in enumerate(reversed(output))))
        width = self.vocab_size ** (self.length - len(output))
        places = slice(number * width, (number + 1) * width)
        return places, np.prod(self.conditional[places, len(output) :], axis=1)

    def plain(self, noise: np.ndarray) -> tuple[int, ...]:
        """What plain decoding emits with ``noise`` [length, V]."""
        output = ()
        for place in range(self.length):
            first = self.completed(output)[0].start
            output += (int(np.argmax(self.log_probs[first, place] + noise[place])),)
        return output


def _target_laws(program: Round, params: Parameters, length: int, sampling: SamplingParams) -> dict[tuple[int, ...], _TargetLaw]:
    """The law of outputs of ``length`` tokens for every prompt, from one pass over whole sequences, without a cache.

    The tokens before each place count as committed: what the settings make of drafted ones is not taken for granted. Outputs
    go on behind a stop id; those of a row that ended there are completed in the same way.
    """
    vocab_size = program.vocab_size
    outputs = np.array(list(itertools.product(range(vocab_size), repeat=length)), np.int32)
    width = max(map(len, PROMPTS)) + length
    tokens = np.zeros((len(PROMPTS), len(outputs), width), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, :, : len(prompt)] = prompt
        tokens[row, :, len(prompt) : len(prompt) + length] = outputs
    tokens = tokens.reshape(-1, width)
    prompt_lengths = np.repeat(np.array([len(prompt) for prompt in PROMPTS], np.int32), len(outputs))
    emitted = np.tile(outputs, (len(PROMPTS), 1))
    log_probs = np.asarray(_teacher_forced(program, sampling, length, params, tokens, prompt_lengths, emitted))
    log_probs = log_probs.reshape(len(PROMPTS), len(outputs), length, vocab_size)
    laws = {}
    for row, prompt in enumerate(PROMPTS):
        after = log_probs[row]
        laws[prompt] = _TargetLaw(np.exp(np.take_along_axis(after, outputs[..., None], axis=-1)[..., 0]), after)
    return laws


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _teacher_forced(program: Round, sampling, length: int, params, tokens, prompt_lengths, emitted):
    """[rows, length, V] log-probabilities of every place behind the prompts of whole sequences ``tokens`` [rows, width]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    cache = program.target.init_cache(params.target, len(tokens), 1)
    output = program.target.apply(params.target, tokens, positions, cache, None)
    logits = program.target.unembed(params.target, output.hidden)
    settings, stop_ids = _settings(sampling, len(tokens)), _stop_ids(sampling, len(tokens))
    no_path, no_drafts = jnp.zeros((len(tokens), 1, 0), jnp.int32), jnp.zeros((1,), jnp.int32)

    def at(place):
        lengths, states = prompt_lengths + place, None
        if params.next_state is not None:
            states = jnp.full((len(tokens),), START, jnp.int32)
            states = advance(params.next_state, states, emitted, jnp.full_like(states, place))
        distribution = PathDistribution.create(
            settings,
            tokens,
            prompt_lengths,
            lengths,
            stop_ids,
            program.vocab_size,
            states=states,
            next_state=params.next_state,
            logits_processor=program.logits_processor,
        )
        newest = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)
        return distribution.log_probs(newest, no_path, no_drafts)

    return jnp.concatenate([at(place) for place in range(length)], axis=1)


def _compare(branches: Branches, starts, laws, noise, rounds) -> Certificate:
    outputs = [
        tuple(int(token) for token in branches.state.tokens[row, len(starts[origin].prompt) : branches.state.lengths[row]])
        for row, origin in enumerate(branches.origins)
    ]
    emitted = sum(probability * len(output) for probability, output in zip(branches.probabilities, outputs, strict=True))
    errors, counterexamples = [], []
    for origin, start in enumerate(starts):
        found = [
            (output, probability)
            for output, probability, its_origin in zip(outputs, branches.probabilities, branches.origins, strict=True)
            if its_origin == origin
        ]
        if noise is not None:
            error, counterexample = _differs(found, laws[start].plain(noise[origin, len(start.prompt) :]))
        else:
            error, counterexample = _deviates(found, laws[start])
        errors.append(error)
        if counterexample is not None:
            length, words = counterexample
            counterexamples.append((length, origin, f"after the prompt {start.prompt}, {words}"))
    max_error = float(np.mean(errors) if noise is not None else np.max(errors))
    return Certificate(
        lossless=max_error <= TOLERANCE,
        max_error=max_error,
        expected_tokens=float(emitted / len(starts) / rounds),
        counterexample=min(counterexamples)[2] if counterexamples else None,
    )


def _differs(found, plain: tuple[int, ...]):
    """Probability of an output that plain decoding does not emit, and the shortest such."""
    wrong = [(output, probability) for output, probability in found if output != plain[: len(output)]]
    share = float(sum(probability for _, probability in wrong))
    if not wrong:
        return share, None
    output, probability = min(wrong, key=lambda pair: (len(pair[0]), pair[0]))
    words = f"{output} comes with probability {probability:.6g}; with the same noise plain decoding emits {plain[: len(output)]}"
    return share, (len(output), words)


def _deviates(found, law: _TargetLaw):
    """Largest difference in the probability of an output of any length, and the shortest that differs."""
    actual = np.zeros(law.vocab_size**law.length)
    for output, probability in found:
        places, completions = law.completed(output)
        actual[places] += probability * completions
    expected = np.prod(law.conditional, axis=1)
    error, counterexample = 0.0, None
    for length in range(law.length + 1):
        has = actual.reshape(law.vocab_size**length, -1).sum(axis=1)
        wants = expected.reshape(law.vocab_size**length, -1).sum(axis=1)
        differences = np.abs(has - wants)
        # A NaN is an error, not a comparison that is false.
        error = max(error, math.inf if np.isnan(differences).any() else float(differences.max()))
        wrong = np.flatnonzero(~(differences <= TOLERANCE))
        if counterexample is None and len(wrong):
            number = int(wrong[0])
            output = tuple(int(digit) for digit in np.unravel_index(number, (law.vocab_size,) * length)) if length else ()
            words = f"{output} has probability {has[number]:.6g} instead of {wants[number]:.6g}"
            counterexample = (length, words)
    return error, counterexample
