"""A round taken apart: what its parts cost, how many passes of the target it makes, and what memory would allow.

Letters in shapes: B rows, N draft nodes, T = N + 1, V vocabulary.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.benchmark.clock import Spread, in_turns
from specjax.choices import KeyedChoices
from specjax.decoding.costs import propose_once
from specjax.decoding.generate import Batch
from specjax.decoding.outcome import emitted_tokens, gather, path_nodes
from specjax.decoding.round import Round, run_rounds
from specjax.decoding.state import DecodingState, Parameters
from specjax.models.base import ModelFunctions
from specjax.models.loaded import Model
from specjax.sampling.params import SamplingParams
from specjax.sampling.path import tree_paths
from specjax.tree import Draft

PARTS = ("draft", "verify", "sampling", "cache", "other", "host")
"""Where the time of a round goes: proposing; the target's pass and its logits; from logits to a verdict; committing to the caches
and showing the drafter what was accepted; what is left of the compiled round; and the host's dispatch."""


@dataclasses.dataclass(frozen=True)
class RoundParts:
    """Seconds of a round that drafts all that its drafter drafts.

    Attributes:
      round: of the whole, dispatched alone.
      parts: medians of ``PARTS``, a dispatch of nothing taken off those that run alone; "other" is what the whole has beyond
        them, and below 0 where parts that are compiled alone cost more than within the round.
      plain_round: of a round of plain decoding, measured in turns with it.
      num_drafted: tokens that each row drafted.
      num_cached: entries of each row's target cache.
      target_passes: (least, most) passes of the target in a round, whatever its drafts are.
    """

    round: Spread
    parts: dict[str, float]
    plain_round: Spread
    num_drafted: float
    num_cached: int
    target_passes: tuple[float, float]


@functools.partial(jax.jit, static_argnames="program")
def target_pass(program: Round, params: Parameters, state: DecodingState, draft: Draft):
    """Logits [B, T, V], features and block of the root and all draft nodes: the verify pass, and nothing else of a round."""
    tree = draft.tree
    root = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
    positions = state.lengths[:, None] - 1 + jnp.atleast_2d(jnp.asarray(tree.depths, jnp.int32))
    mask = None if tree.is_chain else jnp.asarray(tree.ancestor_mask)
    output = program.target.apply(params.target, jnp.concatenate([root, draft.tokens], axis=1), positions, state.cache, mask)
    return program.target.unembed(params.target, output.hidden).astype(program.logits_dtype), output.features, output.block


@functools.partial(jax.jit, static_argnames="program")
def judge(program: Round, params: Parameters, state: DecodingState, draft: Draft, logits):
    """The verdict on a draft, from the target's logits [B, T, V], and nothing else of a round."""
    choices = KeyedChoices(state.sampling.seeds, state.sampling.completion, state.lengths)
    path_tokens, path_lengths = tree_paths(draft.tree, draft.tokens)
    log_probs = program.context(params, state).distribution.log_probs(logits, path_tokens, path_lengths)
    return program.rule(choices, draft, log_probs)


@functools.partial(jax.jit, static_argnames="program", donate_argnames=("cache", "drafter"))
def _commit(program: Round, params: Parameters, cache, drafter, block, features, draft: Draft, verdict):
    nodes, counts = path_nodes(verdict), verdict.num_accepted + 1
    shown = program.drafter.observe(params.drafter, drafter, emitted_tokens(draft, verdict), gather(features, nodes), counts)
    return cache.commit(block, nodes, counts), shown


def _copied(tree: Any) -> Any:
    return jax.block_until_ready(jax.tree.map(jnp.copy, tree))


def repeating(ids: list[int], most: int) -> list[int]:
    """A text of at most ``most`` tokens that repeats its beginning, so that every drafter has something to propose.

    Example:
      >>> repeating([1, 2, 3, 4], 100), repeating([1, 2, 3, 4], 5)
      ([1, 2, 3, 4, 1, 2, 3], [1, 2, 3, 1, 2])
    """
    size = max(1, min(len(ids), most * 2 // 3))
    return (ids[:size] + ids[: size - 1])[:most]


def measure_parts(
    model: Model,
    plain: Model,
    ids: list[int],
    drafter: Any,
    rule: str,
    temperature: float,
    rows: int = 1,
    capacity: int = 64,
    prefill_width: int = 64,
    repeats: int = 5,
    allow_lossy: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> RoundParts:
    """Times a round and its parts, in turns, each from the same state.

    Args:
      model: the target.
      plain: the same model in the dtype whose plain round is the measure.
      ids: a prompt; its beginning is repeated.
      drafter: from ``specjax.drafters``, or None.
      rule: name of the rule.
      temperature: of all rows.
      rows: B.
      capacity: S of the caches.
      prefill_width: prompt tokens per pass.
      repeats: at least 1.
      allow_lossy: whether the rule may change the distribution.
      clock: seconds.
    """

    def started(model, drafter, rule):
        params = SamplingParams(temperature=temperature, max_tokens=capacity, seed=0, ignore_eos=True)
        text = repeating(ids, max(1, capacity - 40))
        batch = Batch.prepare(model, [text] * rows, params, drafter, rule, allow_lossy)
        batch = dataclasses.replace(batch, capacity=capacity, prefill_width=prefill_width)
        return batch, batch.read_prompts()

    batch, state = started(model, drafter, rule)
    program, params = batch.program, batch.params
    plain_batch, plain_state = started(plain, None, "auto")
    draft = propose_once(program, params, state)
    logits, features, block = target_pass(program, params, state, draft)
    verdict = judge(program, params, state, draft, logits)

    def whole(batch, state, num_rounds):
        def prepare():
            copy = _copied(state)
            # A round ends when the host has its tokens.
            return lambda: jax.device_get(run_rounds(batch.program, batch.params, copy, jnp.int32(num_rounds))[1])

        return prepare

    def commit():
        cache, shown = _copied((state.cache, state.drafter))
        return lambda: _commit(program, params, cache, shown, block, features, draft, verdict)

    runs = {
        "round": whole(batch, state, 1),
        "host": whole(batch, state, 0),
        "plain": whole(plain_batch, plain_state, 1),
        "draft": lambda: lambda: propose_once(program, params, state),
        "verify": lambda: lambda: target_pass(program, params, state, draft),
        "sampling": lambda: lambda: judge(program, params, state, draft, logits),
        "cache": commit,
    }
    if not program.drafter.tree.num_nodes:
        del runs["draft"]
    seconds = {name: Spread.of(values) for name, values in in_turns(runs, repeats, clock).items()}
    host = seconds["host"].median
    # A part that runs alone pays a dispatch too, which within the round is paid once.
    parts = {name: max(0.0, seconds[name].median - host) if name in seconds else 0.0 for name in PARTS} | {"host": host}
    parts["other"] = seconds["round"].median - sum(parts.values())
    return RoundParts(
        round=seconds["round"],
        parts=parts,
        plain_round=seconds["plain"],
        num_drafted=float(jnp.mean(jnp.sum(draft.valid, axis=1))),
        num_cached=int(state.cache.lengths[0]),
        target_passes=passes_per_round(program, params, state),
    )


# ---------------------------------------------------------------- passes of the target


@dataclasses.dataclass(frozen=True)
class _Marked:
    """A model whose passes can be found in a traced program by their name."""

    functions: ModelFunctions

    def apply(self, *arguments):
        def target_pass_of_the_round(*arguments):
            return self.functions.apply(*arguments)

        return jax.jit(target_pass_of_the_round)(*arguments)

    def __getattr__(self, name):
        return getattr(self.functions, name)


def passes_per_round(program: Round, params: Parameters, state: DecodingState) -> tuple[float, float]:
    """(least, most) passes of the target that a round makes, counted in the traced round; nothing is computed.

    They differ where branches make different numbers of passes; a loop whose length is not known counts as any number.

    Args:
      program: the round.
      params: of target and drafter; shapes do.
      state: of a batch; shapes do.
    """
    marked = dataclasses.replace(program, target=_Marked(program.target))
    return _count(jax.make_jaxpr(marked.step)(params, state).jaxpr)


def _count(jaxpr) -> tuple[float, float]:
    least, most = 0.0, 0.0
    for equation in jaxpr.eqns:
        if equation.params.get("name") == "target_pass_of_the_round":
            low = high = 1.0
        else:
            inner = [_count(each) for each in _inner(equation.params)]
            if equation.primitive.name == "cond":
                low, high = min(each[0] for each in inner), max(each[1] for each in inner)
            else:
                low, high = (float(sum(each[place] for each in inner)) for place in (0, 1))
            if equation.primitive.name == "scan":
                low, high = low * equation.params["length"], high * equation.params["length"]
            elif equation.primitive.name == "while" and high:
                low, high = 0.0, math.inf
        least, most = least + low, most + high
    return least, most


def _inner(params: dict) -> list:
    """The programs within an equation."""
    values = [each for value in params.values() for each in (value if isinstance(value, tuple | list) else (value,))]
    return [getattr(value, "jaxpr", value) for value in values if hasattr(value, "eqns") or hasattr(value, "jaxpr")]


# ---------------------------------------------------------------- memory


def pass_bytes(model: Model, cached: int, rows: int = 1, tokens: int = 1) -> int:
    """Bytes that a pass must read: the weights it multiplies with, and the used part of the cache.

    Of an embedding that is not the output matrix too, only the rows of the tokens are read; of a mixture of experts, at most
    those that the tokens are sent to.

    Args:
      model: the target.
      cached: entries of each row's cache that are used.
      rows: B.
      tokens: T of each row.
    """
    config, fed = model.config, rows * tokens
    experts = getattr(config, "experts", None)
    read = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        names = [str(getattr(key, "key", getattr(key, "name", key))) for key in path]
        share = 1.0
        if names[0] == "embedding" and getattr(config, "tied_embedding", True) is False:
            share = min(1.0, fed / leaf.shape[0])
        elif experts is not None and {"gate_up", "down"} & set(names):
            share = min(1.0, fed * experts.num_active / experts.num_experts)
        read += round(leaf.nbytes * share)
    cache = jax.eval_shape(lambda: model.init_cache(1, 1))
    entry = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache) if leaf.ndim > 1)
    return read + rows * cached * entry


def memory_bandwidth(
    num_bytes: int | None = None, repeats: int = 5, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Bytes per second that this device moves, the best of some repeats: ``copy`` (read and written) and ``sum`` (read).

    Args:
      num_bytes: of the array; None: 256 MiB on a CPU and 1 GiB elsewhere, more than a cache holds.
      repeats: at least 1.
      clock: seconds.
    """
    if num_bytes is None:
        num_bytes = 2**28 if jax.default_backend() == "cpu" else 2**30
    columns = 2**14
    array = jnp.ones((num_bytes // 4 // columns, columns), jnp.float32)
    copy, add_up = jax.jit(lambda values: values + 1.0), jax.jit(lambda values: jnp.sum(values, axis=1))
    runs = {"copy": lambda: lambda: copy(array), "sum": lambda: lambda: add_up(array)}
    moved = {"copy": 2 * array.nbytes, "sum": array.nbytes}
    return {name: moved[name] / min(values) for name, values in in_turns(runs, repeats, clock).items()}
