"""Verification rules: which draft tokens stay, and which token follows them."""

from specjax.verification.base import CHAIN, TREE, Rule, Verdict, check_fits
from specjax.verification.match_walk import Greedy, Gumbel, Match, match_walk
from specjax.verification.rejection import Token, residual_log_probs
from specjax.verification.rules import RULES, choose_rule

__all__ = [
    "CHAIN",
    "RULES",
    "TREE",
    "Greedy",
    "Gumbel",
    "Match",
    "Rule",
    "Token",
    "Verdict",
    "check_fits",
    "choose_rule",
    "match_walk",
    "residual_log_probs",
]
