"""The shipped drafters, and what they may do, under the enumerator."""

import dataclasses
import functools
import operator

import pytest

from specjax.certificates import certify
from specjax.certificates.table import in_threads
from specjax.certificates.tiny import table_drafter, table_model
from specjax.drafters import draft_model, prompt_lookup, stacked
from specjax.drafters.stopping import StopAfterUnlikely, StopAtConfidence, StopAtEntropy
from specjax.row_trees import TreeBounds
from specjax.sampling import SamplingParams
from specjax.tree import DraftTree, Law

FORK = DraftTree((-1, 0, 0, 1))
# Rows of one batch that draft 0, 1 and 2 deep, and one that goes through both rounds whole.
BUDGETS = (1, 2, 3, 6)


def test_a_draft_model_with_filters():
    """The same filters on both sides, and rows that draft nothing or less."""
    found = certify("token", sampling=SamplingParams(temperature=0.8, top_k=2, top_p=0.95), max_tokens=BUDGETS)
    assert found.lossless, found.counterexample
    assert found.expected_tokens > 1


def test_a_draft_model_with_shared_noise():
    found = certify("gumbel", law=Law.COUPLED)
    assert found.max_error == 0, found.counterexample


def test_a_draft_model_drafts_a_tree():
    whole = certify("traversal", tree=FORK)
    assert whole.lossless, whole.counterexample
    budgets = certify("traversal", tree=FORK, max_tokens=BUDGETS)
    assert budgets.lossless, budgets.counterexample
    assert 1 < budgets.expected_tokens < whole.expected_tokens


def test_trees_that_a_drafter_shapes_per_row():
    """By the text, its own log-probabilities and the shared noise; and rows whose budgets hold 0, 1 and 2 levels."""
    bounds = TreeBounds(num_nodes=3, depth=2)
    for rule in ("match", "gumbel"):
        whole, budgets = certify(rule, tree=bounds), certify(rule, tree=bounds, max_tokens=BUDGETS)
        assert whole.lossless, whole.counterexample
        assert budgets.lossless, budgets.counterexample
        assert whole.max_error == budgets.max_error == 0 or rule == "match"
        assert 1 < budgets.expected_tokens < whole.expected_tokens


@pytest.mark.parametrize("rule", ["without_replacement", "traversal"])
def test_children_of_different_laws(rule):
    laws = (Law.DETERMINISTIC, Law.WITHOUT_REPLACEMENT, Law.INDEPENDENT)
    # Three children of the root, by three laws.
    found = certify(rule, drafter=table_drafter(DraftTree((-1, 0, 0, 0)), laws=laws), rounds=1)
    assert found.lossless, found.counterexample


@dataclasses.dataclass(frozen=True)
class AnyOf:
    """Stops where one of the shipped hooks does: all of them in one compiled round."""

    hooks: tuple

    def __call__(self, step):
        return functools.reduce(operator.or_, (hook(step) for hook in self.hooks))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_stopping_early(rule):
    hook = AnyOf((StopAtEntropy(least=0.5), StopAtConfidence(least=0.5), StopAfterUnlikely(least=0.3)))
    found = certify(rule, drafter=draft_model(table_model(3, seed=1), 2, stop=hook), law=Law.INDEPENDENT)
    assert found.lossless, found.counterexample
    # It stops somewhere, and not everywhere.
    assert 1.1 < found.expected_tokens < 2.05


def test_a_reduced_vocabulary():
    """Ids 0 and 1 of the drafter are 0 and 2 of the target, which also emits 1."""
    found = certify("token", drafter=table_drafter(DraftTree.chain(2), vocab_size=2, offsets=(0, 1)), law=Law.INDEPENDENT)
    assert found.lossless, found.counterexample
    assert found.expected_tokens > 1.2


I, W, C = Law.INDEPENDENT, Law.WITHOUT_REPLACEMENT, Law.COUPLED
LOOKUP = prompt_lookup(2, prompt_lookup_max=2, prompt_lookup_min=1)
# The lookup is deeper than what is stacked on it, or lies within it.
LONGER, WITHIN, PAIR = DraftTree.chain(1), FORK, DraftTree((-1, 0, 0))
STACKS = {
    "block": ("block", W, LONGER),
    "kseq": ("kseq", I, PAIR),
    "without_replacement": ("without_replacement", W, WITHIN),
    "gumbel": ("gumbel", C, PAIR),
}


@pytest.fixture(scope="module")
def stacks(request):
    """Certificates of the stacks that this run of the tests asks for, made side by side."""
    asked = [item.callspec.params["name"] for item in request.session.items if "stacks" in getattr(item, "fixturenames", ())]

    def certified(name):
        rule, law, tree = STACKS[name]
        return certify(rule, law=law, drafter=stacked(LOOKUP, table_drafter(tree, seed=1)))

    return dict(in_threads(certified, asked))


@pytest.mark.parametrize("name", STACKS)
def test_a_lookup_stacked_on_drawn_drafts(name, stacks):
    """Rows of one batch are drafted by one and by the other: a token occurs again in some outputs of the first round."""
    found = stacks[name]
    assert found.lossless, found.counterexample
    assert found.max_error <= (0 if name == "gumbel" else 1e-12)
    assert found.expected_tokens > 1.3


def test_a_stack_of_a_draft_model_with_budgets():
    stack = stacked(LOOKUP, draft_model(table_model(3, seed=1), tree=FORK))
    found = certify("traversal", drafter=stack, max_tokens=BUDGETS)
    assert found.lossless, found.counterexample
    assert found.expected_tokens > 1.1
