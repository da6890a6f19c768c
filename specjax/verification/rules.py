"""Rules by name, and the choice of ``rule="auto"``."""

from specjax.row_trees import TreeBounds
from specjax.tree import DraftTree, Law
from specjax.verification.base import Rule, check_fits, check_rule, shape_of, why_not
from specjax.verification.kseq import KSeq
from specjax.verification.match_walk import Greedy, Gumbel, Match, Membership
from specjax.verification.rejection import MultiRound, Token, WithoutReplacement
from specjax.verification.traversal import Block, Traversal
from specjax.verification.typical import Typical

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Greedy(),
        Gumbel(),
        Match(),
        Membership(),
        Token(),
        Block(),
        MultiRound(),
        WithoutReplacement(),
        KSeq(),
        Traversal(),
        Typical(),
    )
}
"""The rules that are built in."""


def choose_rule(rule, tree: DraftTree | TreeBounds, law_choices: tuple[Law, ...], greedy: bool, allow_lossy: bool = False):
    """Finds the rule of a run and the law that the drafter shall draw by.

    Args:
      rule: a name, ``"auto"``, or a :class:`Rule` object.
      tree: topology of the drafts, or its bounds.
      law_choices: laws that the drafter can draw; empty where nothing is drafted.
      greedy: whether all requests of the run are greedy.
      allow_lossy: whether a rule that changes the distribution may be used.

    Returns:
      The rule, and one of ``law_choices`` (``Law.DETERMINISTIC`` where nothing is drafted).

    Raises:
      ValueError: the name is unknown, the rule does not fit the drafter or the requests, or it is lossy and not allowed.

    Example:
      >>> rule, law = choose_rule("auto", DraftTree.chain(4), (Law.DETERMINISTIC,), greedy=False)
      >>> rule.name, law.value
      ('gumbel', 'deterministic')
    """
    if isinstance(rule, str):
        if rule == "auto":
            rule = _strongest(tree, law_choices, greedy).name
        if rule not in RULES:
            raise ValueError(f"rule is {rule!r}; it must be 'auto' or one of {sorted(RULES)}")
        rule = RULES[rule]
    check_rule(rule)
    if not isinstance(allow_lossy, bool):
        raise ValueError(f"allow_lossy is {allow_lossy!r}; it must be True or False")
    if not rule.lossless and not allow_lossy:
        raise ValueError(f"rule {rule.name!r} changes the target's distribution; it needs allow_lossy=True")
    if isinstance(rule, Greedy) and not greedy:
        raise ValueError("rule 'greedy' needs temperature 0 in every request; another rule samples")
    if not law_choices:
        return rule, Law.DETERMINISTIC
    fitting = (law for law in rule.laws if law in law_choices and why_not(rule, shape_of(tree), law) is None)
    law = next(fitting, law_choices[0])
    check_fits(rule, tree, (law,) * tree.num_nodes)
    return rule, law


def _strongest(tree: DraftTree | TreeBounds, law_choices: tuple[Law, ...], greedy: bool) -> Rule:
    """The lossless rule that accepts most; of equals the seed-stable one."""
    if greedy or isinstance(tree, TreeBounds) or not {Law.INDEPENDENT, Law.WITHOUT_REPLACEMENT} & set(law_choices):
        # Deterministic drafts are accepted with probability p(x) by every rule, and what is shaped per row has no q.
        return RULES["gumbel"]
    return RULES["block" if tree.is_chain else "traversal"]
