"""What the parts of a round cost here."""

import functools
import statistics
import time

import jax
import jax.numpy as jnp

from specjax.choices import KeyedChoices
from specjax.decoding.generate import Batch
from specjax.decoding.round import Round, prefill
from specjax.decoding.state import DecodingState


@functools.partial(jax.jit, static_argnames="program")
def propose_once(program: Round, params, state: DecodingState):
    """The draft of a round whose rows all have room for a whole one, compiled; nothing else of the round is computed."""
    choices = KeyedChoices(state.sampling.seeds, state.sampling.completion, state.lengths)
    num_draft = jnp.full_like(state.lengths, program.drafter.tree.num_nodes)
    draft, _ = program.drafter.propose(params.drafter, state.drafter, program.context(params, state), choices, num_draft)
    return draft


def propose_seconds(model, prompt, params=None, drafter=None, rule="auto", repeats: int = 9) -> float:
    """Median seconds of one full proposal right behind a prompt, compilation apart.

    Args:
      model: the target.
      prompt: as for ``specjax.generate``.
      params: sampling settings; leave room for the draft in ``max_tokens``.
      drafter: from ``specjax.drafters``.
      rule: it decides how a draft model draws.
      repeats: how often it is timed.
    """
    batch = Batch.prepare(model, [prompt], params, drafter, rule, allow_lossy=False)
    state = prefill(batch.program, batch.params, batch.initial_state(), jnp.int32(batch.capacity))
    jax.block_until_ready(propose_once(batch.program, batch.params, state))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(propose_once(batch.program, batch.params, state))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
