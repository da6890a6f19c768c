"""The drafter that pays: by the costs of a machine, not by name."""

import pytest

import specjax
from specjax.decoding.auto import SIZES, PassCosts, best_of_head, choose_drafter, measure_costs
from specjax.drafters import prompt_lookup
from tests import hash_model, heads

MODEL = heads.target()
ACCURACIES = [[0.5, 0.2, 0.1], [0.4, 0.15, 0.1], [0.4, 0.1, 0.05]]


def head(kind, accuracies=ACCURACIES):
    made = heads.eagle_head(MODEL) if kind == "eagle" else heads.medusa_heads(MODEL)
    made.facts["accuracies"] = accuracies
    return made


def costs(by_size, output=0.0):
    """Of a model of 10 layers whose passes take these many times a single token's."""
    return PassCosts({n: 0.001 * c for n, c in zip(SIZES, by_size, strict=True)}, {n: output * n for n in SIZES}, 10)


FLAT, STEEP = costs((1, 1, 1, 1, 1.01, 1.02, 1.04, 1.05)), costs((1, 2, 2.5, 3, 4, 5, 7, 9))


def test_a_machine_whose_passes_cost_the_same_gets_a_tree_and_a_steep_one_none():
    drafter, reason = choose_drafter(MODEL, [head("eagle")], FLAT)
    tree = drafter.functions.tree
    assert drafter.name.startswith("stacked(prompt_lookup, eagle")
    assert tree.num_nodes > 8
    assert "times plain decoding are expected" in reason
    drafter, reason = choose_drafter(MODEL, [head("eagle")], STEEP)
    assert drafter.functions == prompt_lookup(7).functions
    assert "2.00 for 2, 2.50 for 3, 3.00 for 4, 4.00 for 6, 5.00 for 8, 7.00 for 12, 9.00 for 16 tokens" in reason


def test_the_head_with_more_expected_tokens_per_second_is_taken():
    worse = [[share / 2 for share in row] for row in ACCURACIES]
    for good, bad in (("eagle", "medusa"), ("medusa", "eagle")):
        _, reason = choose_drafter(MODEL, [head(bad, worse), head(good)], FLAT)
        assert reason.startswith(good)


def test_a_rule_for_chains_gets_chains():
    for kind in ("eagle", "medusa"):
        assert best_of_head(head(kind), FLAT, chains_only=True).tree.is_chain
        assert not best_of_head(head(kind), FLAT).tree.is_chain


def test_drafting_has_its_price():
    cheap, dear = (best_of_head(head("eagle"), costs((1,) * len(SIZES), output)).tree for output in (0.0, 0.01))
    assert cheap.depth > dear.depth


def test_without_heads_or_costs_it_is_lookup():
    for found, known in (([], FLAT), ([head("eagle")], None)):
        drafter, reason = choose_drafter(MODEL, found, known)
        assert drafter.functions == prompt_lookup(7).functions
        assert "no trained head" in reason
    assert measure_costs(hash_model.model(hash_model.random_table())) is None


def test_costs_are_measured_once_and_kept(tmp_path, monkeypatch):
    # How busy this machine is does not decide whether it is measured again.
    monkeypatch.setattr("specjax.decoding.auto.is_steady", lambda repeats: True)
    first = measure_costs(MODEL, tmp_path)
    assert first.verify.keys() == set(SIZES)
    assert all(seconds > 0 for seconds in first.verify.values())
    assert first.num_layers == 2
    monkeypatch.setattr("specjax.decoding.auto.time_passes", lambda model: pytest.fail("measured again"))
    assert measure_costs(MODEL, tmp_path) == first


def test_what_is_chosen_decodes_as_plain_decoding():
    drafter, _ = choose_drafter(MODEL, [head("eagle"), head("medusa")], FLAT)
    params = specjax.SamplingParams(temperature=0.0, max_tokens=16)
    plain, ours = (specjax.generate(MODEL, [[1, 2, 3], [4]], params, d) for d in (None, drafter))
    assert [c.token_ids for c in ours] == [c.token_ids for c in plain]
    assert all(c.stats.num_draft_tokens > 0 for c in ours)
