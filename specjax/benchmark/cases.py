"""What is compared: drafters, rules, draft lengths or trees, slots, temperatures."""

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any

from specjax.checkpoints.heads import heads_of
from specjax.decoding.auto import LOOKUP_LENGTH, choose_drafter, measure_costs
from specjax.drafters import eagle, medusa, prompt_lookup, stacked
from specjax.drafters.base import bind
from specjax.models.loaded import Model
from specjax.row_trees import TreeBounds
from specjax.sampling.params import SamplingParams
from specjax.tree import DraftTree
from specjax.tree_shapes import greedy_product_tree
from specjax.verification.rules import RULES, choose_rule

PLAIN = "none"
"""Name of decoding without a drafter."""

TREE_NODES, TREE_DEPTH = 16, 5


@dataclasses.dataclass(frozen=True)
class Suite:
    """How much is measured, where the call does not say.

    Attributes:
      per_kind: prompts of each kind; None: all.
      max_tokens: of each answer.
      repeats: of everything.
      slots: requests that are answered at once.
      temperatures: 0 is greedy.
      all_drafters: whether all drafters are measured, at temperatures above 0 by every lossless rule that takes their drafts;
        else prompt lookup and auto.
    """

    per_kind: int | None
    max_tokens: int
    repeats: int
    slots: tuple[int, ...]
    temperatures: tuple[float, ...]
    all_drafters: bool


SUITES = {
    "quick": Suite(1, 16, 3, (1,), (0.0,), False),
    "full": Suite(2, 64, 3, (1, 8), (0.0, 0.7), True),
}
"""What ``--suite`` names."""


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One way to answer the prompts.

    Attributes:
      drafter: what it is called.
      made: the drafter itself; None: plain decoding.
      rule: name of the rule that runs, "auto" resolved.
      slots: requests that are answered at once; with 1 each is answered by ``specjax.generate``, else by an engine.
      temperature: of all requests.
      dtype: of the target's parameters.
      adaptive: whether every round drafts as deep as pays, see :func:`specjax.generate`.
    """

    drafter: str
    made: Any
    rule: str
    slots: int
    temperature: float
    dtype: str
    adaptive: bool = False

    @property
    def tree(self) -> DraftTree | TreeBounds:
        """What it drafts."""
        return bind(self.made).functions.tree

    @property
    def is_plain(self) -> bool:
        """Whether it drafts nothing, ever."""
        return self.made is None

    @property
    def setting(self) -> tuple[int, float]:
        """Cases are compared with plain decoding of the same slots and temperature."""
        return self.slots, self.temperature

    def __str__(self) -> str:
        """For progress and messages."""
        slots = "" if self.slots == 1 else f", {self.slots} slots"
        adaptive = ", adaptive" if self.adaptive else ""
        return f"{self.drafter}{adaptive}, rule {self.rule}, temperature {self.temperature:g}{slots}, {self.dtype}"


def suite_drafters(model: Model, suite: Suite, num_speculative_tokens: int | None, rule: str) -> tuple[dict, list[str]]:
    """The drafters of a suite by name, and notes about them.

    Args:
      model: the target; trained drafts that come with the library for it are measured.
      suite: from ``SUITES``.
      num_speculative_tokens: K of all of them, which are chains then; None: what suits each, trees too.
      rule: what was asked for; "auto" takes trees.
    """
    length = num_speculative_tokens
    found: dict[str, Any] = {}
    heads = {head.kind: head for head in heads_of(model)}
    for size in (length,) if length else (4, LOOKUP_LENGTH) if suite.all_drafters else (LOOKUP_LENGTH,):
        found[f"lookup {size}"] = prompt_lookup(size)
    notes = []
    if suite.all_drafters:
        for name, make, kind, deepest in (("medusa", medusa, "medusa", None), ("eagle", eagle, "eagle", TREE_DEPTH)):
            if kind not in heads:
                notes.append(f"{name}: no trained draft of this kind comes with specjax for {model.name}")
                continue
            try:
                found |= _of_head(name, make, heads[kind], length, deepest)
            except ValueError as error:
                notes.append(f"{name}: {error}")
    if length is None:
        drafter, reason = choose_drafter(model, list(heads.values()), measure_costs(model), chains_only=rule != "auto")
        found["auto"] = drafter
        notes.append(f"auto is {drafter.name}: {reason}")
    return found, notes


def _of_head(name, make, head, length, deepest):
    """A head as a chain, as trees, and behind a lookup."""
    accuracies = [list(row) for row in head.facts.get("accuracies") or ()]
    size = length or min(4, len(accuracies) or 4)
    found = {f"{name} chain {size}": make(head, size)}
    if length is None and accuracies:
        # What an autoregressive head accepts at the deepest level that was measured, it accepts below.
        accuracies += [accuracies[-1]] * ((deepest or len(accuracies)) - len(accuracies))
        tree = greedy_product_tree(accuracies, TREE_NODES)
        found[f"{name} tree {TREE_NODES}"] = make(head, tree=tree)
        if make is eagle:
            found[f"{name} growing tree {TREE_NODES}"] = eagle(head, tree=TreeBounds(TREE_NODES, TREE_DEPTH), branching=4)
        found[f"lookup {LOOKUP_LENGTH} + {name} tree {TREE_NODES}"] = stacked(prompt_lookup(LOOKUP_LENGTH), make(head, tree=tree))
    found[f"lookup {length or LOOKUP_LENGTH} + {name} chain {size}"] = stacked(
        prompt_lookup(length or LOOKUP_LENGTH), make(head, size)
    )
    return found


def make_cases(
    drafters: Mapping[str, Any],
    rule: str,
    dtype: str,
    plain_dtypes: Sequence[str],
    slots: Sequence[int],
    temperatures: Sequence[float],
    every_rule: bool = False,
    allow_lossy: bool = False,
    adaptive: Container[str] = (),
) -> tuple[list[Case], list[str]]:
    """Plain decoding in every dtype, then each drafter with each rule, for all slots and temperatures.

    Args:
      drafters: by name.
      rule: a rule's name, or "auto".
      dtype: that the drafters' target runs in.
      plain_dtypes: that plain decoding is measured in; ``dtype`` is added.
      slots: requests at once.
      temperatures: of the requests.
      every_rule: whether "auto" above temperature 0 stands for all lossless rules that take a drafter's drafts. Greedy requests
        are answered alike by all of them.
      allow_lossy: whether a rule that changes the distribution may be used.
      adaptive: names of the drafters that draft as deep as pays.

    Returns:
      The cases, and what was left out, with why.

    Raises:
      ValueError: the rule fits none of the drafters.
    """
    cases: list[Case] = []
    left_out: list[str] = []
    for num in slots:
        for temperature in temperatures:
            # An engine is made for any requests, greedy ones among them.
            greedy = temperature == 0 and num == 1
            for name in dict.fromkeys((*plain_dtypes, dtype)):
                found, _ = choose_rule("auto", DraftTree.chain(0), (), greedy)
                cases.append(Case(PLAIN, None, found.name, num, temperature, name))
            for name, drafter in drafters.items():
                rules = [rule]
                if every_rule and rule == "auto" and temperature > 0:
                    rules = [each.name for each in RULES.values() if each.lossless]
                taken: dict[str, None] = {}
                for asked in rules:
                    functions = bind(drafter).functions
                    try:
                        chosen, _ = choose_rule(asked, functions.tree, functions.law_choices, greedy, allow_lossy)
                    except ValueError as error:
                        if len(rules) == 1:
                            left_out.append(f"{name}, temperature {temperature:g}, {num} slots: {error}")
                        continue
                    taken[chosen.name] = None
                cases += [Case(name, drafter, each, num, temperature, dtype, name in adaptive) for each in taken]
    if drafters and all(case.is_plain for case in cases):
        raise ValueError(f"rule is {rule!r}, which none of the drafters can be measured with: {left_out[0]}")
    return cases, left_out


def request_params(case: Case, max_tokens: int, seed: int) -> SamplingParams:
    """Settings of a request of a case; the model's own end tokens end it.

    Raises:
      ValueError: one is out of range.
    """
    return SamplingParams(temperature=case.temperature, max_tokens=max_tokens, seed=seed)
