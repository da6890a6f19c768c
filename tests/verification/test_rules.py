import dataclasses
import inspect

import jax.numpy as jnp
import pytest

import specjax.verification
from specjax.row_trees import TreeBounds
from specjax.tree import Draft, DraftTree, Law
from specjax.verification import CHAIN, ROW_TREE, RULES, TREE, Greedy, Match, Token, check_fits, choose_rule, why_not

DETERMINISTIC, INDEPENDENT, COUPLED, WITHOUT = (
    Law.DETERMINISTIC,
    Law.INDEPENDENT,
    Law.COUPLED,
    Law.WITHOUT_REPLACEMENT,
)
CHAIN_4, FORK = DraftTree.chain(4), DraftTree((-1, 0, 0))


def test_the_table_of_rules():
    table = {name: (set(rule.laws), set(rule.shapes), rule.lossless, rule.seed_stable) for name, rule in RULES.items()}
    every, fresh = set(Law), set(Law) - {COUPLED}
    both, all_shapes = {CHAIN, TREE}, {CHAIN, TREE, ROW_TREE}
    assert table == {
        "greedy": (every, all_shapes, True, True),
        "gumbel": (every, all_shapes, True, True),
        "match": (every, all_shapes, True, False),
        "membership": ({DETERMINISTIC}, all_shapes, True, False),
        "token": (fresh, {CHAIN}, True, False),
        "block": (fresh, {CHAIN}, True, False),
        "multi_round": ({INDEPENDENT, DETERMINISTIC}, both, True, False),
        "without_replacement": (fresh, both, True, False),
        "kseq": ({INDEPENDENT}, both, True, False),
        "traversal": (fresh, both, True, False),
        "typical": (every, all_shapes, False, False),
    }


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_law_is_taken_or_refused_with_a_reason(rule):
    for law in Law:
        reason = why_not(rule, CHAIN, law)
        assert (reason is None) == (law in rule.laws)
        assert reason is None or ("this drafter draws" in reason and "use " in reason)
        # Where the shape is chosen row by row, no law that states a q is true.
        reason = why_not(rule, ROW_TREE, law)
        assert (reason is None) == (ROW_TREE in rule.shapes and law in rule.laws and law in (DETERMINISTIC, COUPLED))
        assert reason is None or "use " in reason


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rules_are_static_parts_of_a_compiled_round(rule):
    assert hash(rule) == hash(type(rule)())
    assert rule == type(rule)()
    assert list(inspect.signature(rule).parameters) == ["choices", "draft", "target_log_probs"]


@pytest.mark.parametrize(
    ("law_choices", "tree", "greedy", "rule", "law"),
    [
        ((INDEPENDENT, COUPLED, DETERMINISTIC), CHAIN_4, False, "block", INDEPENDENT),
        ((INDEPENDENT, COUPLED, DETERMINISTIC), CHAIN_4, True, "gumbel", COUPLED),
        ((DETERMINISTIC,), CHAIN_4, False, "gumbel", DETERMINISTIC),
        ((DETERMINISTIC,), FORK, False, "gumbel", DETERMINISTIC),
        ((INDEPENDENT,), FORK, False, "traversal", INDEPENDENT),
        ((COUPLED, INDEPENDENT, WITHOUT), FORK, False, "traversal", WITHOUT),
        ((DETERMINISTIC,), TreeBounds(4, 2), False, "gumbel", DETERMINISTIC),
        ((INDEPENDENT, COUPLED, DETERMINISTIC), TreeBounds(4, 2), False, "gumbel", COUPLED),
        ((), DraftTree.chain(0), False, "gumbel", DETERMINISTIC),
    ],
)
def test_auto(law_choices, tree, greedy, rule, law):
    chosen, its_law = choose_rule("auto", tree, law_choices, greedy)
    assert (chosen.name, its_law) == (rule, law)


@pytest.mark.parametrize(
    ("rule", "law_choices", "law"),
    [
        ("gumbel", (INDEPENDENT, COUPLED, DETERMINISTIC), COUPLED),
        ("gumbel", (INDEPENDENT, DETERMINISTIC), DETERMINISTIC),
        ("match", (INDEPENDENT, COUPLED, DETERMINISTIC), DETERMINISTIC),
        ("token", (DETERMINISTIC, COUPLED, INDEPENDENT), INDEPENDENT),
        ("token", (COUPLED, DETERMINISTIC), DETERMINISTIC),
    ],
)
def test_a_rule_takes_the_law_that_it_likes_best(rule, law_choices, law):
    assert choose_rule(rule, CHAIN_4, law_choices, greedy=False) == (RULES[rule], law)


def test_unknown_rules():
    with pytest.raises(ValueError, match=r"rule is 'tokn'; it must be 'auto' or one of \['block', 'greedy', 'gumbel', "):
        choose_rule("tokn", CHAIN_4, (INDEPENDENT,), greedy=False)


def test_greedy_needs_greedy_requests():
    with pytest.raises(ValueError, match="rule 'greedy' needs temperature 0 in every request"):
        choose_rule("greedy", CHAIN_4, (DETERMINISTIC,), greedy=False)
    assert choose_rule("greedy", CHAIN_4, (DETERMINISTIC,), greedy=True) == (Greedy(), DETERMINISTIC)


def test_rules_refuse_what_they_are_not_right_for():
    with pytest.raises(ValueError, match=r"rule 'token' takes drafts of shape \['chain'\]; this drafter proposes a tree"):
        choose_rule("token", FORK, (DETERMINISTIC,), greedy=False)
    with pytest.raises(
        ValueError, match=r"rule 'token' is right for the laws \['independent', .*\]; this drafter draws 'coupled'"
    ):
        choose_rule("token", CHAIN_4, (COUPLED,), greedy=False)
    with pytest.raises(ValueError, match=r"this drafter proposes a row_tree: where the shape is chosen row by row, tokens may"):
        choose_rule("traversal", TreeBounds(3, 2), (DETERMINISTIC,), greedy=False)
    with pytest.raises(ValueError, match="this drafter draws 'independent' in a row_tree: where the shape is chosen row by row"):
        choose_rule("match", TreeBounds(3, 2), (INDEPENDENT,), greedy=False)
    with pytest.raises(ValueError, match="this drafter draws 'coupled'"):
        check_fits(Token(), DraftTree.chain(2), (INDEPENDENT, COUPLED))


def test_lossy_rules_must_be_allowed():
    @dataclasses.dataclass(frozen=True)
    class Lossy(Match):
        name = "lossy"
        lossless = False

    with pytest.raises(ValueError, match="rule 'lossy' changes the target's distribution; it needs allow_lossy=True"):
        choose_rule(Lossy(), CHAIN_4, (DETERMINISTIC,), greedy=False)
    assert choose_rule(Lossy(), CHAIN_4, (DETERMINISTIC,), greedy=False, allow_lossy=True)[0] == Lossy()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_shapes_are_checked(rule):
    draft = Draft(jnp.zeros((2, 3), jnp.int32), jnp.ones((2, 3), bool), None, DraftTree.chain(3), (DETERMINISTIC,) * 3)
    with pytest.raises(AssertionError, match=r"\(2, 3, 7\)"):
        rule(None, draft, jnp.zeros((2, 3, 7)))
    with pytest.raises(AssertionError, match=r"\(1, 4, 7\)"):
        rule(None, draft, jnp.zeros((1, 4, 7)))
    if rule.name in ("token", "block"):
        with pytest.raises(AssertionError, match=r"\(2, 3, 8\)"):
            rule(None, draft.replace(parent_log_probs=jnp.zeros((2, 3, 8))), jnp.zeros((2, 4, 7)))


def test_all_rules_are_public():
    for rule in RULES.values():
        assert getattr(specjax.verification, type(rule).__name__) is type(rule)
