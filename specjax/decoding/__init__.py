"""The compiled round, the device loop around it, and generation from prompts."""

from specjax.decoding.completions import Completion, Piece
from specjax.decoding.costs import propose_seconds
from specjax.decoding.generate import generate, stream
from specjax.decoding.round import Round, prefill, run_rounds
from specjax.decoding.state import DecodingState, DispatchInfo, Finish, Parameters, RoundInfo

__all__ = [
    "Completion",
    "DecodingState",
    "DispatchInfo",
    "Finish",
    "Parameters",
    "Piece",
    "Round",
    "RoundInfo",
    "generate",
    "prefill",
    "propose_seconds",
    "run_rounds",
    "stream",
]
