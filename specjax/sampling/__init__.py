"""Sampling settings per request, and the distribution that they make of logits."""

from specjax.sampling.allowed_tokens import AllowedTokens
from specjax.sampling.params import SamplingArrays, SamplingParams
from specjax.sampling.path import LogitsProcessor, PathDistribution, TokenCounts, tree_paths
from specjax.sampling.transforms import keep_top_k, keep_top_p, to_log_probs

__all__ = [
    "AllowedTokens",
    "LogitsProcessor",
    "PathDistribution",
    "SamplingArrays",
    "SamplingParams",
    "TokenCounts",
    "keep_top_k",
    "keep_top_p",
    "to_log_probs",
    "tree_paths",
]
