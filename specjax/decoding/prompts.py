"""What is asked of a model, checked against it before anything runs."""

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.state import NO_TOKEN
from specjax.models.loaded import Model
from specjax.sampling.allowed_tokens import AllowedTokens
from specjax.sampling.params import SamplingParams

STOP_IDS_STEP = 8
"""The number of stop ids per row is rounded up to a multiple of this, so that it is no reason to compile again."""


def prompt_ids(model: Model, prompt, index: int) -> list[int]:
    """Token ids of a prompt in any of its three forms, checked against the model."""
    name = f"prompts[{index}]"
    is_list = (isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes))) or isinstance(prompt, np.ndarray)
    if isinstance(prompt, str) or (is_list and len(prompt) and isinstance(prompt[0], dict)):
        if model.tokenizer is None:
            raise ValueError(f"{name} is text, but model {model.name!r} has no tokenizer; give token ids")
        ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else model.tokenizer.encode_chat(prompt)
    elif is_list:
        ids = list(prompt)
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < model.vocab_size:
                raise ValueError(f"{name} holds {token!r}; token ids are whole numbers from 0 to {model.vocab_size - 1}")
    else:
        raise ValueError(f"{name} is {type(prompt).__name__}; it must be text, a list of token ids, or a list of chat messages")
    if not ids:
        raise ValueError(f"{name} has no tokens; a prompt needs at least one")
    if len(ids) >= model.max_positions:
        raise ValueError(f"{name} has {len(ids)} tokens; with one new token it must fit into {model.max_positions} positions")
    return [int(token) for token in ids]


def check_settings(model: Model, settings: SamplingParams, index: int) -> None:
    """Raises a ValueError where settings ask for what this model does not have."""
    for name, ids in (("stop_token_ids", settings.stop_token_ids), ("logit_bias", settings.logit_bias or ())):
        for token in ids:
            if token >= model.vocab_size:
                raise ValueError(f"params[{index}]: {name} holds {token}; ids of this model are below {model.vocab_size}")
    if settings.stop and model.tokenizer is None:
        raise ValueError(
            f"params[{index}]: stop is {settings.stop!r}, but model {model.name!r} has no tokenizer and so no text; "
            "it must be None (stop_token_ids needs no text)"
        )


def end_ids(model: Model, settings: SamplingParams) -> tuple[int, ...]:
    """Ids that end a completion with these settings."""
    return tuple(dict.fromkeys((() if settings.ignore_eos else model.stop_token_ids) + settings.stop_token_ids))


def stop_ids(model: Model, sampling: Sequence[SamplingParams], width: int = 1) -> np.ndarray:
    """[B, M] int32 the ids that end each row, filled up with ``NO_TOKEN``; M is at least ``width``."""
    ends = [end_ids(model, settings) for settings in sampling]
    most = -(-max(width, *map(len, ends)) // STOP_IDS_STEP) * STOP_IDS_STEP
    array = np.full((len(ends), most), NO_TOKEN, np.int32)
    for row, ids in zip(array, ends, strict=True):
        row[: len(ids)] = ids
    return array


def check_allowed_tokens(allowed_tokens, model: Model) -> None:
    """Raises ValueError unless ``allowed_tokens`` is None or a grammar over this model's ids."""
    if allowed_tokens is None:
        return
    if not isinstance(allowed_tokens, AllowedTokens):
        raise ValueError(f"allowed_tokens is {type(allowed_tokens).__name__}; it must be a specjax.AllowedTokens")
    if allowed_tokens.vocab_size > model.vocab_size:
        raise ValueError(
            f"allowed_tokens has {allowed_tokens.vocab_size} columns; ids of this model are below {model.vocab_size}"
        )


def logits_dtype(model: Model):
    """Dtype in which the model's logits become probabilities, at least float32."""
    return jnp.promote_types(model.logits.dtype, jnp.float32)


def check_processor(logits_processor, model: Model) -> None:
    """Raises ValueError unless ``logits_processor`` is what ``generate`` takes. Nothing is computed."""
    name = f"logits_processor is {logits_processor!r}"
    if not isinstance(logits_processor, Hashable) or not callable(logits_processor):
        raise ValueError(f"{name}; it must be a hashable function (tokens, prompt_length, length, logits) -> logits")
    logits = jax.ShapeDtypeStruct(model.logits.shape, logits_dtype(model))
    text, number = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((model.max_positions,), ()))
    try:
        result = jax.eval_shape(logits_processor, text, number, number, logits)
    except Exception as error:
        raise ValueError(f"{name}; traced by JAX it fails: {error}") from error
    one = jax.tree.structure(result) == jax.tree.structure(logits)  # type: ignore[operator]  # jaxlib has no hints
    if not one or (result.shape, result.dtype) != (logits.shape, logits.dtype):
        raise ValueError(f"{name}; it must return {logits.dtype.name}{list(logits.shape)}, not {result}")
