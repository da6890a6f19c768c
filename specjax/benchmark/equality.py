"""Whether answers have the tokens of plain decoding, and how near a call it was where they have not.

Passes over other numbers of tokens, or of rows, round differently. So a first difference is allowed where the deciding margin is
below a tolerance stated beforehand: greedy, the distance of the two best log-probabilities; sampled by shared noise, that of the
two best with their noise, or of a token to the threshold of a filter.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.choices import KeyedChoices
from specjax.models.loaded import Model
from specjax.sampling import PathDistribution, SamplingArrays, SamplingParams

TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "float16": 0.25, "bfloat16": 1.0, "int8": 1.0}
"""Largest deciding margin, in units of log p, at which a first difference is put down to rounding, by the parameters' dtype."""

WIDTH_STEP = 64
"""Texts are padded to multiples of it, so that few passes are compiled."""


@functools.partial(jax.jit, static_argnames="functions")
def _whole_pass(functions, params, tokens):
    """Logits [1, T, V] of a text that is fed at once."""
    positions = jnp.arange(tokens.shape[1])[None]
    output = functions.apply(params, tokens, positions, functions.init_cache(params, 1, 1), None)
    return functions.unembed(params, output.hidden).astype(jnp.float32)


def logits_of(model: Model, ids: Sequence[int], width: int | None = None) -> jax.Array:
    """Logits [len(ids), V] in float32 from one pass over a text.

    Args:
      model: the target.
      ids: the text.
      width: tokens of the compiled pass, at least ``len(ids)``; None: the next multiple of 64.
    """
    width = -(-len(ids) // WIDTH_STEP) * WIDTH_STEP if width is None else width
    padded = np.zeros((1, width), np.int32)
    padded[0, : len(ids)] = ids
    return _whole_pass(model.functions, model.params, jnp.asarray(padded))[0, : len(ids)]


def margin(model: Model, prompt: Sequence[int], emitted: Sequence[int], params: SamplingParams) -> float:
    """How far the token behind ``emitted`` was from being another one, in units of log p, from one pass over the text.

    Args:
      model: the target, in the dtype that decides.
      prompt: token ids.
      emitted: tokens of the answer before that one.
      params: settings of the request; sampled ones with a seed, by a rule that shares its noise with plain decoding.
    """
    ids = [*prompt, *emitted]
    text = np.zeros((1, -(-len(ids) // WIDTH_STEP) * WIDTH_STEP), np.int32)
    text[0, : len(ids)] = ids
    seed = params.seed or 0
    soft, kept, noise = _scores(
        model.vocab_size,
        logits_of(model, ids)[-1],
        SamplingArrays.stack([params], [seed]),
        text,
        np.array([len(prompt)], np.int32),
        np.array([len(ids)], np.int32),
        np.array([[*model.stop_token_ids]], np.int32),
    )
    if params.greedy:
        best = np.sort(soft)[-2:]
        return float(best[1] - best[0])
    best = np.sort(kept + noise)[-2:]
    # A token just inside or outside of the filter, whose noise would have won.
    winning = soft + noise > best[0]
    edge = np.min(np.where(kept > -np.inf, soft, np.inf))
    distance = np.min(np.where(winning, np.abs(soft - edge), np.inf))
    return float(min(best[1] - best[0], distance))


def _scores(*arguments) -> tuple[np.ndarray, ...]:
    """[V] each: log-probabilities before and behind the filters, and the shared noise."""
    return tuple(np.asarray(values) for values in _compiled_scores(*arguments))


@functools.partial(jax.jit, static_argnums=0)
def _compiled_scores(vocab_size, logits, sampling, text, prompt_lengths, lengths, stops):
    distribution = PathDistribution.create(sampling, text, prompt_lengths, lengths, stops, vocab_size, width=logits.shape[-1])
    no_path, no_drafts = jnp.zeros((1, 1, 0), jnp.int32), jnp.zeros((1,), jnp.int32)
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    unfiltered = distribution.replace(sampling=sampling.replace(top_p=jnp.ones(1), temperature=temperature))
    soft, kept = (each.log_probs(logits[None, None], no_path, no_drafts)[0, 0] for each in (unfiltered, distribution))
    choices = KeyedChoices(sampling.seeds, sampling.completion, lengths)
    return soft, kept, choices.gumbel(0, logits.shape[-1], jnp.float32)[0]


def compare(
    model: Model,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    plain: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
    tolerance: float,
) -> dict:
    """Counts of equal answers and of first differences, with the largest of their margins.

    Args:
      model: margins are computed with it.
      prompts: token ids.
      params: settings of each request.
      plain: tokens of plain decoding's answers.
      others: tokens of the answers that are compared with them.
      tolerance: the largest margin that passes.

    Returns:
      ``equal``, ``differ``, ``largest_margin`` (0.0 without a difference; None where one answer goes on behind the other's end)
      and ``passed``.
    """
    margins = []
    for prompt, settings, one, other in zip(prompts, params, plain, others, strict=True):
        if list(one) != list(other):
            pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
            place = sum(1 for _ in pairs)
            within = place < min(len(one), len(other))
            margins.append(margin(model, prompt, one[:place], settings) if within else float("inf"))
    largest = max(margins, default=0.0)
    return {
        "equal": len(prompts) - len(margins),
        "differ": len(margins),
        # JSON has no infinity.
        "largest_margin": round(largest, 6) if math.isfinite(largest) else None,
        "passed": largest <= tolerance,
    }
