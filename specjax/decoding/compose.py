"""Target, drafter and rule put together and checked against one another, before anything runs."""

from typing import Any, NamedTuple

from specjax.decoding.prompts import check_allowed_tokens, check_processor, logits_dtype
from specjax.decoding.round import Round
from specjax.decoding.state import Parameters
from specjax.drafters.base import BoundDrafter, bind
from specjax.models.loaded import Model
from specjax.sampling.allowed_tokens import AllowedTokens
from specjax.sampling.path import LogitsProcessor
from specjax.tree import Law
from specjax.verification.rules import choose_rule


class Composition(NamedTuple):
    """What a compiled round runs.

    Attributes:
      program: its static part.
      params: of target and drafter.
      law: how the drafter draws; q, and with it the overlap, is known unless it is deterministic.
    """

    program: Round
    params: Parameters
    law: Law | None


def check_model(model) -> None:
    """Raises ValueError unless ``model`` is a :class:`specjax.Model`."""
    if not isinstance(model, Model):
        raise ValueError(f"model is {type(model).__name__}; it must be a specjax.Model (see specjax.load_model)")


def compose(
    model: Model,
    drafter: Any,
    rule: Any,
    *,
    greedy: bool,
    allow_lossy: bool,
    logits_processor: LogitsProcessor | None = None,
    allowed_tokens: AllowedTokens | None = None,
    num_logprobs: int | None = None,
) -> Composition:
    """Puts target, drafter and rule together.

    Args:
      model: the target.
      drafter: from ``specjax.drafters``, or None for plain decoding.
      rule: a rule's name, a rule object, or ``"auto"``.
      greedy: whether all requests will be greedy, for which more rules fit.
      allow_lossy: whether the rule may change the distribution.
      logits_processor: a user's own transform of the target's logits.
      allowed_tokens: the grammar of all requests.
      num_logprobs: how many of the most likely tokens are reported beside every emitted one; None reports nothing.

    Raises:
      ValueError: what does not fit, with both sides named.
    """
    check_model(model)
    if logits_processor is not None:
        check_processor(logits_processor, model)
    check_allowed_tokens(allowed_tokens, model)
    bound: BoundDrafter = bind(drafter)
    bound.check_target(model)
    tree, laws = bound.functions.tree, bound.functions.law_choices
    chosen, law = choose_rule(rule, tree, laws, greedy=greedy, allow_lossy=allow_lossy)
    program = Round(
        target=bound.target_functions(model),
        drafter=bound.functions.with_law(law),
        rule=chosen,
        vocab_size=model.vocab_size,
        logits_width=model.logits.shape[-1],
        logits_dtype=logits_dtype(model),
        logits_processor=logits_processor,
        num_logprobs=num_logprobs,
    )
    next_state = None if allowed_tokens is None else allowed_tokens.next_state
    return Composition(program, Parameters(model.params, bound.params_for(model), next_state), law)
