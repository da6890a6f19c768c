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
import threading
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.certificates.comparison import Certificate, compare
from specjax.certificates.enumerator import CHUNK, Branches, EnumeratingChoices, branch_out, production_key
from specjax.certificates.tiny import table_model
from specjax.certificates.tiny_row_trees import row_tree_drafter
from specjax.choices import Stream
from specjax.decoding.prompts import check_allowed_tokens, check_processor, check_settings
from specjax.decoding.round import Round
from specjax.decoding.state import NO_TOKEN, Finish, Parameters
from specjax.drafters.base import BoundDrafter, NoDrafter, bind
from specjax.drafters.draft_model import draft_model
from specjax.models.loaded import Model
from specjax.numeric import is_whole
from specjax.row_trees import TreeBounds
from specjax.sampling.allowed_tokens import START, AllowedTokens, advance
from specjax.sampling.params import SamplingArrays, SamplingParams
from specjax.sampling.path import LogitsProcessor, PathDistribution
from specjax.tree import DraftTree, Law
from specjax.verification.base import Rule, check_fits, check_rule
from specjax.verification.match_walk import Greedy
from specjax.verification.rules import RULES

MAX_OUTPUTS = 200_000
"""Different outputs that a certificate may have to tell apart."""

MAX_BUDGETS = 16
"""Rows of the batch for each prompt."""

NUM_NOISE_ROWS = 8
"""Rows of shared Gumbel noise that a certificate by identity goes through, for every prompt."""

QUICKLY = {"xla_backend_optimization_level": 0}
"""Options of the compiler: what runs for milliseconds need not be fast, and compiling is most of the time."""

PROMPTS = ((1,), (0, 1))
"""Prompts of different lengths, in one batch."""


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
    law: Law | Sequence[Law] | None = None,
    tree: DraftTree | TreeBounds | None = None,
    drafter=None,
    target: Model | None = None,
    max_tokens: Sequence[int] | None = None,
    sampling: SamplingParams | None = None,
    logits_processor: LogitsProcessor | None = None,
    allowed_tokens: AllowedTokens | None = None,
    seed: int = 0,
    key: Callable[[Stream, int, int], Hashable] = production_key,
) -> Certificate:
    """Certifies a verification rule, or finds where it is wrong.

    Args:
      rule: a name, or a rule of your own.
      vocab_size: V of the tiny models; 2 hides mistakes that 3 shows.
      depth: length of the chain that the tiny draft model proposes; not used where ``tree`` or ``drafter`` says what to draft.
      rounds: rounds to go through; 1 hides mistakes that 2 show.
      law: how the draft model draws, or a law for each draft node of ``tree``; None is the first of the rule's laws that the
        drafter knows.
      tree: what the tiny draft model proposes instead of a chain; bounds: what a tiny drafter shapes for every row.
      drafter: another drafter than the tiny draft model.
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
      >>> print(certify("match", tree=DraftTree((-1, 0, 0)), vocab_size=2, rounds=1).counterexample)
      None
    """
    if isinstance(rule, str):
        if rule not in RULES:
            raise ValueError(f"certify: rule is {rule!r}; it must be one of {sorted(RULES)}, or a rule object")
        rule = RULES[rule]
    check_rule(rule)
    for name, value, least in (("vocab_size", vocab_size, 2), ("depth", depth, 0), ("rounds", rounds, 1), ("seed", seed, 0)):
        if not is_whole(value) or value < least:
            raise ValueError(f"certify: {name} is {value!r}; it must be a whole number of at least {least}")
    laws = law if isinstance(law, Sequence) and not isinstance(law, str) else (law,)
    if not all(each is None or isinstance(each, Law) for each in laws):
        raise ValueError(f"certify: law is {law!r}; it must be a specjax.tree.Law, or one for each draft node of a tree")
    kinds: dict[str, tuple[object, tuple[type, ...]]] = {
        "target": (target, (Model,)),
        "tree": (tree, (DraftTree, TreeBounds)),
        "sampling": (sampling, (SamplingParams,)),
    }
    for name, (given, wanted) in kinds.items():
        if given is not None and not isinstance(given, wanted):
            names = " or ".join(kind.__name__ for kind in wanted)
            raise ValueError(f"certify: {name} is {given!r:.200}; it must be None or a {names}")
    vocab_size, depth, rounds, seed = int(vocab_size), int(depth), int(rounds), int(seed)
    if target is None:
        target = table_model(vocab_size, seed)
    vocab_size = target.vocab_size
    drafter = _drafter(drafter, tree, depth, law, vocab_size, seed + 1)
    functions, laws = _with_laws(rule, drafter.functions, law)
    longest = check_size(vocab_size, functions.tree.depth, rounds)
    if sampling is None:
        sampling = SamplingParams(temperature=0.0 if isinstance(rule, Greedy) else 1.0)
    if isinstance(rule, Greedy) and not sampling.greedy:
        raise ValueError(f"certify: temperature is {sampling.temperature:g}; rule 'greedy' needs 0")
    check_settings(target, sampling, 0)
    if logits_processor is not None:
        check_processor(logits_processor, target)
    check_allowed_tokens(allowed_tokens, target)
    if max_tokens is not None and (not isinstance(max_tokens, Sequence) or not max_tokens):
        raise ValueError(f"certify: max_tokens is {max_tokens!r}; it must be None or a sequence of budgets")
    budgets = (longest,) if max_tokens is None else tuple(max_tokens)
    for budget in budgets:
        if not is_whole(budget) or not 1 <= budget <= longest:
            raise ValueError(f"certify: max_tokens is {max_tokens}; each must be from 1 to {longest}")
    if len(budgets) > MAX_BUDGETS:
        raise ValueError(f"certify: max_tokens holds {len(budgets)} budgets; at most {MAX_BUDGETS}")

    next_state = None if allowed_tokens is None else allowed_tokens.next_state
    starts = [_Start(prompt, budget) for prompt, budget in itertools.product(PROMPTS, budgets)]
    noise = None
    # What decides nothing in compiled code, or comes as an array.
    stops, sampling = sampling.stop_token_ids, dataclasses.replace(sampling, stop_token_ids=(), seed=None)
    if rule.seed_stable or Law.COUPLED in laws:
        starts = [start for start in starts for _ in range(NUM_NOISE_ROWS)]
        positions = max(map(len, PROMPTS)) + longest + 1
        noise = np.random.default_rng(seed).gumbel(size=(len(starts), positions, vocab_size))
    # On the host, wherever models run: float64, callbacks, and numbers too small to be worth a transfer.
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        program = Round(
            target=drafter.target_functions(target),
            drafter=functions,
            rule=rule,
            vocab_size=vocab_size,
            logits_width=vocab_size,
            logits_dtype=jnp.float64,
            prefill_width=2,
            logits_processor=logits_processor,
        )
        params = jax.tree.map(jnp.asarray, Parameters(target.params, drafter.params_for(target), next_state))
        branches = _all_branches(program, params, starts, sampling, stops, rounds, noise, key)
        # The same compiled code for all rules and drafters.
        plain = dataclasses.replace(program, rule=RULES["match"], drafter=NoDrafter())
        whole = _target_laws(plain, params.replace(drafter=()), longest, sampling, stops)
    of_target = {start: whole[start.prompt].cut(start.max_tokens) for start in starts}
    return compare(branches, starts, of_target, noise if rule.seed_stable else None, rounds, stops)


def check_size(vocab_size: int, depth: int, rounds: int) -> int:
    """The most tokens that so many rounds can emit.

    Raises:
      ValueError: there are too many different outputs to go through.

    Example:
      >>> check_size(vocab_size=3, depth=2, rounds=2)
      6
    """
    longest = rounds * (depth + 1)
    if longest * math.log(vocab_size) > math.log(MAX_OUTPUTS):
        raise ValueError(
            f"certify: vocab_size {vocab_size}, depth {depth} and rounds {rounds} make {vocab_size}**{longest} outputs; "
            f"at most {MAX_OUTPUTS} can be gone through"
        )
    return longest


def _drafter(drafter, tree, depth: int, law, vocab_size: int, seed: int) -> BoundDrafter:
    """What was asked for: a drafter, or a tiny one of trees or chains."""
    if drafter is not None:
        if tree is not None:
            raise ValueError(f"certify: tree is {tree!r} beside a drafter, which has a tree of its own; give one of them")
        return bind(drafter)
    if isinstance(tree, TreeBounds):
        return row_tree_drafter(tree, vocab_size=vocab_size, seed=seed)
    model = table_model(vocab_size, seed)
    # The drafter of chains knows fewer laws.
    if tree is None and depth > 0 and law is Law.WITHOUT_REPLACEMENT:
        tree = DraftTree.chain(depth)
    return draft_model(model, depth) if tree is None else draft_model(model, tree=tree)


def _with_laws(rule: Rule, functions, law):
    """The drafter's functions with their laws fixed, and the laws of all draft nodes."""
    tree, choosable = functions.tree, hasattr(functions, "laws")
    fixed = getattr(functions, "laws", None)
    if fixed is not None and law is not None:
        raise ValueError(f"certify: law is {law!r}; this drafter has its laws already: {fixed}")
    if isinstance(law, Sequence):
        if not choosable or len(law) != tree.num_nodes:
            wanted = f"one for each of {tree.num_nodes} draft nodes" if choosable else "one for the whole draft of this drafter"
            raise ValueError(f"certify: law is {law!r}; it must be {wanted}")
        laws = tuple(law)
        functions = dataclasses.replace(functions, laws=laws)
    elif fixed is not None:
        laws = fixed
    else:
        known = functions.law_choices
        if law is None:
            law = next((law for law in rule.laws if law in known), next(iter(known), None))
        laws = () if law is None else (law,) * tree.num_nodes
        functions = functions if law is None else functions.with_law(law)
    check_fits(rule, tree, laws)
    return functions, laws


def _all_branches(program: Round, params, starts, sampling, stops, rounds, noise, key) -> Branches:
    """Every state that ``rounds`` rounds can lead to from ``starts``."""
    # As wide as every later batch.
    padded = starts + [starts[-1]] * (CHUNK - len(starts))
    capacity = max(len(start.prompt) + start.max_tokens for start in starts)
    tokens = np.zeros((CHUNK, capacity + 1), np.int32)
    for row, start in enumerate(padded):
        tokens[row, : len(start.prompt)] = start.prompt
    lengths = np.array([len(start.prompt) for start in padded], np.int32)
    limits = lengths + np.array([start.max_tokens for start in padded], np.int32)
    choices = _OF_THREAD.choices(key)
    # The rule decides nothing before the first round.
    state = _begin(dataclasses.replace(program, rule=RULES["match"]), sampling, params, tokens, lengths, limits, _stop_ids(stops))
    branches = Branches.start(state, len(starts))
    step = functools.partial(_step, program, sampling, choices, params)
    for _ in range(rounds):
        running = branches.state.finish == Finish.RUNNING
        branches = branch_out(step, choices, branches, branches.state.lengths, running, noise)
    return branches


class _OfThread(threading.local):
    """One object for each way to derive keys, and for each thread: what is compiled calls back to it, and is compiled once."""

    def __init__(self):
        self.choices = functools.lru_cache(maxsize=8)(EnumeratingChoices)


_OF_THREAD = _OfThread()


def _settings(sampling: SamplingParams, rows: int = CHUNK) -> SamplingArrays:
    """Constants of what is compiled: XLA leaves out the filters that nobody asks for."""
    return SamplingArrays.stack([sampling] * rows, [0] * rows)


def _stop_ids(stops: tuple[int, ...], rows: int = CHUNK) -> np.ndarray:
    """[rows, M] the ids that end a row."""
    return np.tile(np.array(stops or (NO_TOKEN,), np.int32), (rows, 1))


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICKLY)
def _begin(program: Round, sampling, params, tokens, lengths, limits, stop_token_ids):
    state = program.init(params, tokens, lengths, limits, stop_token_ids, _settings(sampling))
    for _ in range(-(-max(map(len, PROMPTS)) // program.prefill_width)):
        state = program.prefill_chunk(params, state)
    return state.replace(sampling=None)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=QUICKLY)
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
        output: tuple[int, ...] = ()
        for place in range(self.length):
            first = self.completed(output)[0].start
            output += (int(np.argmax(self.log_probs[first, place] + noise[place])),)
        return output


def _target_laws(program: Round, params: Parameters, length: int, sampling, stops) -> dict[tuple[int, ...], _TargetLaw]:
    """The law of outputs of ``length`` tokens for every prompt, from one pass over whole sequences, without a cache.

    The tokens before each place count as committed: what the settings make of drafted ones is not taken for granted. Outputs
    go on behind a stop id; those of a row that ended there are completed in the same way.
    """
    vocab_size = program.vocab_size
    outputs = np.array(list(itertools.product(range(vocab_size), repeat=length)), np.int32)
    width = max(map(len, PROMPTS)) + length
    tokens: np.ndarray = np.zeros((len(PROMPTS), len(outputs), width), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, :, : len(prompt)] = prompt
        tokens[row, :, len(prompt) : len(prompt) + length] = outputs
    tokens = tokens.reshape(-1, width)
    prompt_lengths = np.repeat(np.array([len(prompt) for prompt in PROMPTS], np.int32), len(outputs))
    emitted = np.tile(outputs, (len(PROMPTS), 1))
    log_probs = np.asarray(
        _teacher_forced(program, sampling, length, params, tokens, prompt_lengths, emitted, _stop_ids(stops, len(tokens)))
    )
    log_probs = np.asarray(log_probs).reshape(len(PROMPTS), len(outputs), length, vocab_size)
    laws = {}
    for row, prompt in enumerate(PROMPTS):
        after = log_probs[row]
        laws[prompt] = _TargetLaw(np.exp(np.take_along_axis(after, outputs[..., None], axis=-1)[..., 0]), after)
    return laws


@functools.partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=QUICKLY)
def _teacher_forced(program: Round, sampling, length: int, params, tokens, prompt_lengths, emitted, stop_token_ids):
    """[rows, length, V] log-probabilities of every place behind the prompts of whole sequences ``tokens`` [rows, width]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    cache = program.target.init_cache(params.target, len(tokens), 1)
    output = program.target.apply(params.target, tokens, positions, cache, None)
    logits = program.target.unembed(params.target, output.hidden)
    settings = _settings(sampling, len(tokens))
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
            stop_token_ids,
            program.vocab_size,
            states=states,
            next_state=params.next_state,
            logits_processor=program.logits_processor,
        )
        newest = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)
        return distribution.log_probs(newest, no_path, no_drafts)

    return jnp.concatenate([at(place) for place in range(length)], axis=1)
