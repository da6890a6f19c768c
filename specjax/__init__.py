"""Lossless speculative decoding in JAX."""

from specjax import drafters
from specjax.certificates import Certificate, certify
from specjax.checkpoints.load import load_model
from specjax.decoding import Completion, Piece, generate, stream
from specjax.models.loaded import Model
from specjax.sampling import SamplingParams
from specjax.statistics import Stats

__version__ = "0.1.0"

__all__ = [
    "Certificate",
    "Completion",
    "Model",
    "Piece",
    "SamplingParams",
    "Stats",
    "certify",
    "drafters",
    "generate",
    "load_model",
    "stream",
]
