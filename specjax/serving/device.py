"""What the engine runs on the device: requests move into slots, prompts go in, rounds run.

Three programs over one state of fixed shape, whose buffers each of them reuses. None depends on which slots are taken: rows of a
call are named by their index, and an index behind the last slot means "no row"; a gather clips it and a scatter drops it.

On a mesh every device runs them on the slots that it has.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.layout import Place
from specjax.decoding.round import Round
from specjax.decoding.state import NO_TOKEN, Counters, DecodingState, DispatchInfo, Finish, Parameters
from specjax.sampling.allowed_tokens import START
from specjax.sampling.params import SamplingArrays, SamplingParams


@flax.struct.dataclass
class Arrivals:
    """Requests that move into slots; A of them at once, the same number in every call.

    Attributes:
      slots: [A] int32, where each moves in; the number of slots for none.
      tokens: [A, S + 1] int32, prompts.
      lengths: [A] int32, prompt lengths.
      limits: [A] int32, lengths at which the rows end.
      stop_token_ids: [A, M] int32.
      sampling: settings.
    """

    slots: jax.Array
    tokens: jax.Array
    lengths: jax.Array
    limits: jax.Array
    stop_token_ids: jax.Array
    sampling: SamplingArrays


def empty_state(program: Round, params: Parameters, slots: int, capacity: int, stop_ids: int, biases: int) -> DecodingState:
    """All slots free. Traced or under ``jax.eval_shape`` it costs nothing."""

    def free(params, *rows):
        state = program.init(params, *rows)
        return state.replace(observed=state.lengths)

    rows = jnp.ones((slots,), jnp.int32)
    return program.layout.spread(program, free, (Place.PARAMS, *[Place.ROWS] * 5), Place.STATE)(
        params,
        jnp.zeros((slots, capacity + 1), jnp.int32),
        rows,
        rows,
        jnp.full((slots, stop_ids), NO_TOKEN, jnp.int32),
        SamplingArrays.stack([SamplingParams(temperature=0.0)] * slots, [0] * slots, num_biases=biases),
    )


@functools.partial(jax.jit, donate_argnames="state", static_argnames="program")
def admit(program: Round, state: DecodingState, arrivals: Arrivals) -> DecodingState:
    """Moves requests into slots; whatever was in them is forgotten."""
    move_in = functools.partial(_move_in, program)
    return program.layout.spread(program, move_in, (Place.STATE, Place.SAME), Place.STATE)(state, arrivals)


def _move_in(program: Round, state: DecodingState, arrivals: Arrivals) -> DecodingState:
    num_slots = state.lengths.shape[0]
    slots = program.layout.own_places(arrivals.slots, num_slots)

    def moved_in(old, new):
        return old.at[slots].set(new, mode="drop")

    def cleared(old, value=0):
        return old.at[slots].set(jnp.asarray(value, old.dtype), mode="drop")

    taken = jnp.zeros((num_slots,), bool).at[slots].set(True, mode="drop")
    running = jnp.where(arrivals.lengths < arrivals.limits, Finish.RUNNING, Finish.LENGTH)
    return state.replace(
        tokens=moved_in(state.tokens, arrivals.tokens),
        prompt_lengths=moved_in(state.prompt_lengths, arrivals.lengths),
        lengths=moved_in(state.lengths, arrivals.lengths),
        limits=moved_in(state.limits, arrivals.limits),
        finish=moved_in(state.finish, running.astype(jnp.int32)),
        stop_token_ids=moved_in(state.stop_token_ids, arrivals.stop_token_ids),
        sampling=jax.tree.map(moved_in, state.sampling, arrivals.sampling),
        states=cleared(state.states, START),
        cache=state.cache.roll_back(jnp.where(taken, 0, state.cache.lengths)),
        observed=cleared(state.observed),
        drafter=program.drafter.reset(state.drafter, taken),
        counters=jax.tree.map(cleared, state.counters),
        acceptance=None if state.acceptance is None else state.acceptance.of_new_rows(taken),
    )


@functools.partial(jax.jit, static_argnames="program", donate_argnames="state")
def prefill_rows(program: Round, params: Parameters, state: DecodingState, rows) -> DecodingState:
    """The next ``program.prefill_width`` prompt tokens of some rows, through the code that reads any prompt.

    Args:
      program: the round.
      params: of target and drafter.
      state: the slots.
      rows: [R] int32; over a mesh one after the other for each part of the batch, as indices within the part.
    """
    read = functools.partial(_read, program)
    return program.layout.spread(program, read, (Place.PARAMS, Place.STATE, Place.ROWS), Place.STATE)(params, state, rows)


def _read(program: Round, params: Parameters, state: DecodingState, rows) -> DecodingState:
    chosen = jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0, mode="clip"), state)
    after = program.prefill_chunk(params, chosen)
    # What was gathered is read before it is written to: the compiler needs no copy of all rows.
    after, state = jax.lax.optimization_barrier((after, state))

    def put_back(old, new):
        return old.at[rows].set(new, mode="drop")

    changed = ("cache", "drafter", "observed")
    return state.replace(**{name: jax.tree.map(put_back, getattr(state, name), getattr(after, name)) for name in changed})


@functools.partial(jax.jit, static_argnames="program", donate_argnames="state")
def run_slots(
    program: Round, params: Parameters, state: DecodingState, ended, max_depth, num_rounds
) -> tuple[DecodingState, DispatchInfo, Counters]:
    """Up to ``num_rounds`` rounds of all slots whose prompt is in.

    Args:
      program: the round.
      params: of target and drafter.
      state: the slots.
      ended: [B] bool, rows that the host has ended (a stop string, a cancelled request).
      max_depth: int32, how deep drafts may be this time.
      num_rounds: int32, at most ``program.rounds_per_dispatch``.

    Returns:
      The slots, what they emitted, and their statistics so far.
    """
    inputs = (Place.PARAMS, Place.STATE, Place.ROWS, Place.SAME, Place.SAME)
    run = program.layout.spread(program, functools.partial(_run, program), inputs, (Place.STATE, Place.SAME, Place.SAME))
    return run(params, state, ended, max_depth, num_rounds)


def _run(program: Round, params, state, ended, max_depth, num_rounds):
    state = state.replace(
        finish=jnp.where(ended & (state.finish == Finish.RUNNING), Finish.STOP, state.finish).astype(jnp.int32),
        max_depths=jnp.broadcast_to(max_depth, state.max_depths.shape).astype(jnp.int32),
    )
    state, info = program.run_rounds(params, state, num_rounds)
    # Whoever asks a device for the news gets those of all.
    tokens, finish, logprobs, counters = program.layout.all_rows((info.tokens, info.finish, info.logprobs, state.counters))
    info = info.replace(tokens=tokens, finish=finish, logprobs=logprobs)
    return state, info, jax.tree.map(jnp.copy, counters)


def check_rows(drafter, state, num_slots: int) -> None:
    """Raises ValueError unless all of a drafter's ``state`` (arrays or their shapes) has rows as its first axis."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if np.ndim(leaf) == 0 or leaf.shape[0] != num_slots:
            raise ValueError(
                f"drafter {drafter!r:.200}: its state has {jax.tree_util.keystr(path)} of shape {leaf.shape}; in an engine every "
                f"array of it must have rows as its first axis, here {num_slots}"
            )
