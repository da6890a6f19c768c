"""A tiny model that every mesh of eight devices divides, prompts of all rows different, and rounds over any mesh by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import Request, SamplingParams
from specjax.decoding import prefill, run_rounds
from specjax.decoding.generate import Batch
from specjax.decoding.layout import Place
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.parallel import make_mesh, place_params, spread_round

CONFIG = DecoderConfig(
    vocab_size=64, num_layers=1, width=32, num_query_heads=16, num_kv_heads=8, head_dim=4, mlp_width=32, max_positions=64
)
VOCAB_SIZE = 60
MESHES = [(8, 1), (4, 2), (2, 4), (1, 8)]


@functools.cache
def decoder(seed=0, **changes):
    """A random model of 60 ids; its logits are wide enough apart that no order of summation decides."""
    functions = Decoder(dataclasses.replace(CONFIG, **changes))
    params = functions.init(jax.random.key(seed), scale=0.5)
    return specjax.Model(functions=functions, params=params, vocab_size=VOCAB_SIZE, max_positions=CONFIG.max_positions)


def close_to(model):
    """A draft model that is often right."""
    noise = model.functions.init(jax.random.key(7), scale=0.1)
    return dataclasses.replace(model, params=jax.tree.map(lambda a, b: a + b if a.ndim > 1 else a, model.params, noise))


PROMPTS = [[*range(5 + i, 8 + 3 * i), 5 + i] for i in range(8)]
SETTINGS = [
    SamplingParams(temperature=0.0 if i % 3 == 0 else 0.6 + 0.2 * i, max_tokens=12 - i, seed=1000 + i, **extra)
    for i, extra in enumerate(
        [{}, {"top_k": 9}, {"top_p": 0.9}, {"repetition_penalty": 1.3}, {}, {"min_p": 0.05}, {"logprobs": 2}, {}]
    )
]


@functools.partial(jax.jit, static_argnums=(0, 2))
def _initial(program, params, capacity, *rows):
    init = program.layout.spread(program, program.init, (Place.PARAMS, *[Place.ROWS] * 5), Place.STATE)
    return init(params, *rows)


def started(target, drafter, mesh, rule="auto", settings=SETTINGS, prompts=PROMPTS):
    """The batch of all prompts, its program, parameters and state over ``mesh`` (None: one device), prompts in."""
    batch = Batch.prepare(target, prompts, settings, drafter, rule, allow_lossy=False)
    state, params = batch.initial_state(), batch.params
    program = dataclasses.replace(batch.program, prefill_width=batch.prefill_width)
    if mesh is not None:
        program = spread_round(program, make_mesh(*mesh))
        params = place_params(program, params)
        rows = (state.tokens, state.lengths, state.limits, state.stop_token_ids, state.sampling)
        state = _initial(program, params, batch.capacity, *rows)
    return batch, program, params, prefill(program, params, state, jnp.int32(batch.capacity))


def run_all(program, params, state):
    """Tokens of every row, and the last state and dispatch."""
    while True:
        state, info = run_rounds(program, params, state, jnp.int32(5))
        if not np.any(np.asarray(state.running)):
            break
    lengths, starts = np.asarray(state.lengths), np.asarray(state.prompt_lengths)
    return [row[a:b].tolist() for row, a, b in zip(np.asarray(state.tokens), starts, lengths, strict=True)], state, info


def several_requests():
    """Prompts and settings all different; one has no seed."""
    return [
        Request(
            [(7 * i + j % 3) % 50 for j in range(2 + 5 * i)],
            SamplingParams(temperature=[0.0, 0.9][i % 2], max_tokens=4 + i, seed=None if i == 2 else i),
        )
        for i in range(5)
    ]
