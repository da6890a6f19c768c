"""``specjax certify``: what it prints, and how it ends."""

import json

import pytest

from specjax.certificates import Certificate
from specjax.certificates.mutants import MUTANTS
from specjax.certificates.table import Cell, cells

EXACT = Certificate(lossless=True, max_error=2.2e-16, expected_tokens=2.0525, counterexample=None)
WRONG = Certificate(lossless=False, max_error=0.25, expected_tokens=2.5, counterexample="(0,) has probability 1 instead of 0.75")


@pytest.fixture
def stub(monkeypatch):
    """Certificates without work: ``stub(broken)`` gives the rules of these names, and ``typical``, an error."""

    def install(*broken):
        asked = []

        def certify(cell, **settings):
            asked.append((cell.rule.name, cell.law.value, cell.shape, *settings.values()))
            return WRONG if cell.rule.name in ("typical", *broken) else EXACT

        monkeypatch.setattr(Cell, "certify", certify)
        for name in MUTANTS:
            monkeypatch.setitem(MUTANTS, name, lambda: True)
        return asked

    return install


def test_one_rule_for_real(specjax_command):
    outcome = specjax_command("certify", "--rule", "membership", "--vocab-size", "2", "--depth", "1", "--rounds", "1", "--json")
    assert (outcome.code, outcome.err) == (0, "")
    document = json.loads(outcome.out)
    assert [(row["rule"], row["law"], row["shape"]) for row in document["rules"]] == [
        ("membership", "deterministic", "chain"),
        ("membership", "deterministic", "tree"),
        ("membership", "deterministic", "row_tree"),
    ]
    for row in document["rules"]:
        assert row["lossless"] is True
        assert row["max_error"] <= 1e-12
        assert 1 < row["expected_tokens"] <= 2
    # Two children of two tokens: one of them is always what the target draws.
    assert document["rules"][1]["expected_tokens"] == pytest.approx(2)
    # The tree of the row's own leaves unlikely ones out.
    assert document["rules"][2]["expected_tokens"] < 2
    assert {row["law"] for row in document["refused"]} == {"independent", "without_replacement", "coupled"}
    assert "met with probability sum(p q) only" in document["refused"][0]["reason"]
    assert document["mutants"] == []


def test_everything_as_one_document(specjax_command, stub):
    asked = stub()
    outcome = specjax_command("certify", "--all", "--json", "--vocab-size", "4", "--depth", "1", "--rounds", "3", "--seed", "5")
    assert outcome.code == 0
    document = json.loads(outcome.out)
    assert len(document["rules"]) == len(asked) == len([cell for cell in cells() if cell.refusal is None])
    assert len(document["rules"]) + len(document["refused"]) == len(cells())
    assert asked[0] == ("greedy", "deterministic", "chain", 4, 1, 3, 5)
    by_rule = {row["rule"]: row for row in document["rules"]}
    assert by_rule["token"] == {
        "rule": "token",
        "law": "without_replacement",
        "shape": "chain",
        "lossless": True,
        "max_error": 2.2e-16,
        "expected_tokens": 2.0525,
    }
    assert by_rule["typical"]["lossless"] is False
    assert by_rule["typical"]["counterexample"] == WRONG.counterexample
    assert document["mutants"] == [{"mutant": name, "caught": True} for name in MUTANTS]


def test_the_table(specjax_command, stub):
    stub()
    outcome = specjax_command("certify", "--table")
    assert outcome.code == 0
    lines = [[part.strip() for part in line.split("│")[1:-1]] for line in outcome.out.splitlines() if line.startswith("│")]
    assert len(lines) == len(cells()) // 3
    assert ["token", "deterministic", "exact 2e-16, 2.053", "refused (6)", "refused (7)"] in lines
    assert ["typical", "coupled", *["lossy 2e-01, 2.500"] * 3] in lines
    assert "(6) rule 'token' takes drafts of shape ['chain']; this drafter proposes a tree" in outcome.out
    assert "(7) rule 'token' takes drafts of shape ['chain']; this drafter proposes a row_tree: where" in outcome.out
    assert "typical, coupled, tree: (0,) has probability 1 instead of 0.75" in outcome.out
    assert "mutant" not in outcome.out


def test_a_claim_that_fails(specjax_command, stub):
    stub("kseq")
    outcome = specjax_command("certify", "--rule", "kseq", "--json")
    assert outcome.code == 1
    assert [row["lossless"] for row in json.loads(outcome.out)["rules"]] == [False, False]  # a chain and a tree
    assert "WRONG 2e-01, 2.500" in specjax_command("certify", "--rule", "kseq").out


def test_a_mutant_that_is_not_caught(specjax_command, stub, monkeypatch):
    stub()
    monkeypatch.setitem(MUTANTS, "reversed ratio", lambda: EXACT)
    outcome = specjax_command("certify", "--all")
    assert outcome.code == 1
    caught = [line.split("│")[1:3] for line in outcome.out.splitlines() if "yes" in line or "NO" in line]
    assert [name.strip() for name, verdict in caught if verdict.strip() == "NO"] == ["reversed ratio"]
    assert len(caught) == len(MUTANTS)
