"""Drafters: what proposes the tokens that the target verifies."""

from specjax.drafters.base import BoundDrafter, Context, Drafter, NoDrafter, bind
from specjax.drafters.draft_model import DraftModel, draft_model
from specjax.drafters.draft_tree import DraftTreeModel
from specjax.drafters.eagle import Eagle
from specjax.drafters.heads import eagle, medusa
from specjax.drafters.medusa import Medusa
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
    "Eagle",
    "Medusa",
    "NoDrafter",
    "PromptLookup",
    "Stacked",
    "StopAfterUnlikely",
    "StopAtConfidence",
    "StopAtEntropy",
    "StopHook",
    "bind",
    "draft_model",
    "eagle",
    "medusa",
    "prompt_lookup",
    "stacked",
]
