"""Drafters: what proposes the tokens that the target verifies."""

from specjax.drafters.base import BoundDrafter, Context, Drafter, NoDrafter, bind
from specjax.drafters.draft_model import DraftModel, draft_model
from specjax.drafters.draft_tree import DraftTreeModel
from specjax.drafters.prompt_lookup import PromptLookup, prompt_lookup
from specjax.drafters.stacked import BoundStack, Stacked, stacked
from specjax.drafters.stopping import DraftStep, StopAfterUnlikely, StopAtConfidence, StopAtEntropy, StopHook

__all__ = [
    "BoundDrafter",
    "BoundStack",
    "Context",
    "DraftModel",
    "DraftStep",
    "DraftTreeModel",
    "Drafter",
    "NoDrafter",
    "PromptLookup",
    "Stacked",
    "StopAfterUnlikely",
    "StopAtConfidence",
    "StopAtEntropy",
    "StopHook",
    "bind",
    "draft_model",
    "prompt_lookup",
    "stacked",
]
