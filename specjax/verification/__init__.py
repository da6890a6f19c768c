"""Verification rules: which draft tokens stay, and which token follows them."""

from specjax.verification.base import CHAIN, ROW_TREE, SHAPES, TREE, Rule, Verdict, check_fits, shape_of, why_not
from specjax.verification.kseq import KSeq
from specjax.verification.match_walk import Greedy, Gumbel, Match, Membership, match_walk
from specjax.verification.proposal import proposal_log_probs, residual_log_probs
from specjax.verification.rejection import MultiRound, Token, WithoutReplacement
from specjax.verification.rules import RULES, choose_rule
from specjax.verification.traversal import Block, Traversal
from specjax.verification.typical import Typical

__all__ = [
    "CHAIN",
    "ROW_TREE",
    "RULES",
    "SHAPES",
    "TREE",
    "Block",
    "Greedy",
    "Gumbel",
    "KSeq",
    "Match",
    "Membership",
    "MultiRound",
    "Rule",
    "Token",
    "Traversal",
    "Typical",
    "Verdict",
    "WithoutReplacement",
    "check_fits",
    "choose_rule",
    "match_walk",
    "proposal_log_probs",
    "residual_log_probs",
    "shape_of",
    "why_not",
]
