"""Drafters: what proposes the tokens that the target verifies."""

from specjax.drafters.base import BoundDrafter, Context, Drafter, NoDrafter, bind
from specjax.drafters.draft_model import DraftModel, draft_model
from specjax.drafters.prompt_lookup import PromptLookup, prompt_lookup

__all__ = [
    "BoundDrafter",
    "Context",
    "DraftModel",
    "Drafter",
    "NoDrafter",
    "PromptLookup",
    "bind",
    "draft_model",
    "prompt_lookup",
]
