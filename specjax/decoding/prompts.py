"""What is asked of a model, checked against it before anything runs."""

from collections.abc import Sequence

import numpy as np

from specjax.models.loaded import Model
from specjax.sampling.params import SamplingParams


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
    for token in settings.stop_token_ids:
        if token >= model.vocab_size:
            raise ValueError(f"params[{index}]: stop_token_ids holds {token}; ids of this model are below {model.vocab_size}")
    if settings.stop and model.tokenizer is None:
        raise ValueError(
            f"params[{index}]: stop is {settings.stop!r}, but model {model.name!r} has no tokenizer and so no text; "
            "it must be None (stop_token_ids needs no text)"
        )
