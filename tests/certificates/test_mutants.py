"""Every mutant is caught, and what it differs from is right."""

import re

import pytest

from specjax.certificates import ReusedKeyError, certify
from specjax.certificates.mutants import MUTANTS, accepts_the_impossible, catch, key_of_position, mutant
from specjax.certificates.table import in_threads
from specjax.certificates.tiny import table_drafter
from specjax.choices import KeyedChoices
from specjax.tree import DraftTree, Law

CAUGHT_BY_KEY = {
    "draft noise reused for the residual": "draws from two distributions, or in two rounds, with the key",
    "coins keyed by position alone": r"with the key \(<Stream.ACCEPT: 2>, ",
}


def outcome(name):
    try:
        return MUTANTS[name]()
    except ReusedKeyError as error:
        return error


@pytest.fixture(scope="module")
def outcomes(request):
    """Of all mutants that this run of the tests asks for, made side by side."""
    asked = [item.callspec.params["name"] for item in request.session.items if "outcomes" in getattr(item, "fixturenames", ())]
    return dict(in_threads(outcome, asked))


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name, outcomes):
    found = outcomes[name]
    if name in CAUGHT_BY_KEY:
        assert isinstance(found, ReusedKeyError)
        assert re.search(CAUGHT_BY_KEY[name], str(found))
    elif not isinstance(found, bool):
        assert found.max_error > 1e-3
        assert not found.lossless
        assert found.counterexample.startswith("after the prompt ")
        if name == "soft q for argmax drafts":
            assert found.counterexample == "after the prompt (1,), (0,) has probability 1 instead of 0.51"
    else:
        assert found


def test_there_are_enough_and_all_say_where_they_were_met():
    assert len(MUTANTS) >= 16
    assert all(len(function.__doc__) > 40 for function in MUTANTS.values())


def test_one_round_does_not_show_keys_that_forget_the_round():
    drafter = table_drafter(DraftTree.chain(2))
    assert certify("block", drafter=drafter, law=Law.INDEPENDENT, rounds=1, key=key_of_position).lossless


def test_production_coins_of_probability_0_are_never_true():
    assert not accepts_the_impossible(KeyedChoices)


def test_a_right_rule_is_not_caught(monkeypatch):
    def right():
        return certify("match", vocab_size=2, depth=1, rounds=1)

    monkeypatch.setitem(MUTANTS, "right", right)
    assert not catch("right")


def test_bad_names():
    with pytest.raises(ValueError, match="name is 'nonsense'; it must be one of"):
        catch("nonsense")
    with pytest.raises(ValueError, match="name is 'reversed ratio'; there is one already"):
        mutant("reversed ratio")(lambda: True)
