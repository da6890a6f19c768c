"""Lossless speculative decoding in JAX."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specjax import drafters
    from specjax.certificates import Certificate, certify
    from specjax.checkpoints.common_tokens import in_vocabulary_of
    from specjax.checkpoints.heads import load_head
    from specjax.checkpoints.load import load_model
    from specjax.checkpoints.medusa_files import load_medusa
    from specjax.decoding import Completion, Piece, generate, stream
    from specjax.models.loaded import Model
    from specjax.models.trained_head import TrainedHead
    from specjax.sampling import AllowedTokens, SamplingParams
    from specjax.serving import Engine, Request
    from specjax.statistics import Stats

__version__ = "0.1.0"

__all__ = [
    "AllowedTokens",
    "Certificate",
    "Completion",
    "Engine",
    "Model",
    "Piece",
    "Request",
    "SamplingParams",
    "Stats",
    "TrainedHead",
    "certify",
    "drafters",
    "generate",
    "in_vocabulary_of",
    "load_head",
    "load_medusa",
    "load_model",
    "stream",
]

# Imported when first asked for: JAX takes seconds, and `specjax --help` should not wait for it.
_HOMES = {
    "AllowedTokens": "specjax.sampling",
    "Certificate": "specjax.certificates",
    "Completion": "specjax.decoding",
    "Engine": "specjax.serving",
    "Model": "specjax.models.loaded",
    "Piece": "specjax.decoding",
    "Request": "specjax.serving",
    "SamplingParams": "specjax.sampling",
    "Stats": "specjax.statistics",
    "TrainedHead": "specjax.models.trained_head",
    "certify": "specjax.certificates",
    "generate": "specjax.decoding",
    "in_vocabulary_of": "specjax.checkpoints.common_tokens",
    "load_head": "specjax.checkpoints.heads",
    "load_medusa": "specjax.checkpoints.medusa_files",
    "load_model": "specjax.checkpoints.load",
    "stream": "specjax.decoding",
}


def __getattr__(name):
    if name == "drafters":
        return importlib.import_module("specjax.drafters")
    if name not in _HOMES:
        raise AttributeError(f"module 'specjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__():
    return sorted({*globals(), *__all__})
