"""Whole benchmarks of a model that is exact and compiled in a moment. What the clock says is never looked at."""

import copy
import json

import pytest

from specjax.benchmark.answers import answer_alone, answer_together, num_steps
from specjax.benchmark.cases import SUITES, Case, make_cases, suite_drafters
from specjax.benchmark.clock import Spread
from specjax.benchmark.parts import PARTS, RoundParts
from specjax.benchmark.run import Plan, run, wrong
from specjax.drafters import draft_model, prompt_lookup
from specjax.tree import DraftTree
from tests import hash_model, heads

TABLE = hash_model.random_table()
MODEL = hash_model.model(TABLE)
PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [6, 7, 6, 7, 6]]
DRAFTERS = {"lookup 4": prompt_lookup(4), "itself": draft_model(MODEL, 2)}


def planned(cases, **settings):
    """A small plan."""
    return Plan(
        **{"name": "p", "prompts": PROMPTS, "kinds": ["x", "y", "x"], "cases": cases, "max_tokens": 6, "repeats": 2, "seed": 5}
        | {"bandwidth_bytes": 2**18}
        | settings
    )


@pytest.fixture(scope="module")
def measured():
    """A document of plain decoding and a model that drafts for itself, and what was said meanwhile."""
    cases, left_out = make_cases({"itself": DRAFTERS["itself"]}, "auto", "float32", ["float32"], [1], [0.0])
    assert not left_out
    said, plan = [], planned(cases, notes=["a note"])
    return run({"float32": MODEL}, plan, said.append), said, plan


def test_the_document_has_what_is_promised(measured):
    document, said, plan = measured
    assert len(said) == plan.num_steps
    assert document["notes"][0] == "a note"
    assert [(row["drafter"], row["slots"]) for row in document["results"]] == [
        ("none", 1),
        ("itself", 1),
    ]
    for row in document["results"]:
        assert (row["prompts"], row["num_prompts"], row["temperature"], row["dtype"]) == ("p", 3, 0.0, "float32")
        assert row["num_tokens"] == 18
        assert row["repeats_equal"]
        assert row["round"]["target_passes"] == [1, 1]
        least, most = row["tokens_per_second_spread"]
        assert 0 < least <= row["tokens_per_second"] <= most
        assert row["predicted_speedup"] > 0
        assert set(row["by_kind"]) == {"x", "y"}
        assert row["round"]["over_least"] > 0
    plain = document["results"][0]
    assert (plain["speedup"], plain["predicted_speedup"], plain["num_speculative_tokens"], plain["shape"]) == (
        1.0,
        1.0,
        0,
        "none",
    )
    assert document["environment"]["num_prompts"] == 3
    assert not wrong(document)


def test_what_drafts_for_itself_is_accepted_whole(measured):
    """A broken drafter would leave all tokens right and show only here."""
    document, *_ = measured
    for row in document["results"]:
        if row["drafter"] == "itself":
            assert row["draft_acceptance_rate"] == row["tested_acceptance_rate"] == 1.0
            assert row["mean_acceptance_length"] == 3.0
            assert row["num_rounds"] == 6
            assert row["accepted_per_pos"] == [1.0, 1.0]


def test_answers_are_those_of_plain_decoding(measured):
    document, *_ = measured
    for row in document["results"]:
        wanted = None if row["drafter"] == "none" else {"equal": 3, "differ": 0, "largest_margin": 0.0, "passed": True}
        assert row["same_tokens"] == wanted


def test_wrong_tokens_and_idle_passes_are_named(measured):
    document = copy.deepcopy(measured[0])
    document["results"][1]["same_tokens"] = {"equal": 1, "differ": 2, "largest_margin": 0.5, "passed": False}
    document["results"][0]["round"]["target_passes"] = [1, 2]
    assert wrong(document) == [
        "none, rule gumbel, temperature 0, 1 slots, float32: a round makes 1 to 2 passes of the target; it must be 1",
        "itself, rule gumbel, temperature 0, 1 slots, float32: 2 of 3 answers are not plain decoding's; the deciding margin "
        "was 0.5, more than 0.001",
    ]


def test_sampled_tokens_are_compared_where_the_rule_shares_its_noise_with_plain_decoding(monkeypatch):
    once = Spread(1.0, 1.0, 1.0)
    parts = RoundParts(once, dict.fromkeys(PARTS, 0.0), once, num_drafted=2, num_cached=3, target_passes=(1, 1))
    monkeypatch.setattr("specjax.benchmark.run.measure_parts", lambda *_, **__: parts)
    cases, _ = make_cases({"itself": draft_model(MODEL, 2)}, "gumbel", "float32", ["float32"], [1], [0.7])
    document = run({"float32": MODEL}, planned(cases))
    assert [row["same_tokens"] and row["same_tokens"]["passed"] for row in document["results"]] == [None, True]
    # Other noise than plain decoding's: tokens need not be the same, and nothing is claimed.
    cases, _ = make_cases({"itself": draft_model(MODEL, 2)}, "block", "float32", ["float32"], [1], [0.7])
    document = run({"float32": MODEL}, planned(cases))
    assert [row["same_tokens"] for row in document["results"]] == [None, None]


def test_both_arms_end_at_the_end_token_and_reading_the_prompt_is_apart():
    prompt = [(7 * n) % hash_model.VOCAB for n in range(512)]
    text = hash_model.greedy(TABLE, prompt, 16)
    stop = text[10]
    length = text.index(stop) + 1
    model = hash_model.model(TABLE, max_positions=1024, stop_token_ids=(stop,))
    cases, _ = make_cases({"lookup": prompt_lookup(4)}, "auto", "float32", [], [1, 2], [0.0])
    alone = answer_alone({"float32": model}, [case for case in cases if case.slots == 1], [prompt], 16, 2, 0)
    together = answer_together({"float32": model}, [case for case in cases if case.slots == 2], [prompt], 16, 1, 0)
    for answers in (alone | together).values():
        assert answers.tokens == [text[:length]]
        assert answers.stats[0].num_tokens == length
        assert answers.repeatable
    for answers in alone.values():
        assert answers.prefill_seconds > 0
        # Seconds are those of the rounds alone: of each repeat, and of nothing else.
        assert answers.seconds[0] == [answers.stats[0].decode_seconds]
        assert len(answers.seconds) == 2
    assert [answers.prefill_seconds for answers in together.values()] == [0.0] * 2


def test_steps_are_known_beforehand():
    cases, _ = make_cases(DRAFTERS, "auto", "float32", ["float32"], [1, 2], [0.0])
    assert num_steps(cases, num_prompts=3, repeats=2) == 3 * 3 * 3 + 3 * 3


def names(cases):
    return [(case.drafter, case.rule, case.slots, case.temperature, case.dtype) for case in cases]


def test_cases_are_every_combination_and_plain_decoding_in_every_dtype():
    cases, left_out = make_cases({"lookup 4": prompt_lookup(4)}, "auto", "bfloat16", ["float32"], [1, 4], [0.0, 0.7])
    assert not left_out
    assert names(cases) == [
        case
        for slots in (1, 4)
        for temperature in (0.0, 0.7)
        for case in (
            ("none", "gumbel", slots, temperature, "float32"),
            ("none", "gumbel", slots, temperature, "bfloat16"),
            ("lookup 4", "gumbel", slots, temperature, "bfloat16"),
        )
    ]
    assert {case.setting for case in cases} == {(1, 0.0), (1, 0.7), (4, 0.0), (4, 0.7)}


def test_every_rule_that_takes_the_drafts_above_temperature_0_and_one_of_them_when_greedy():
    tree = {"tree": draft_model(MODEL, tree=DraftTree((-1, 0, 0)))}
    cases, left_out = make_cases(tree, "auto", "float32", [], [1], [0.0, 0.7], every_rule=True)
    rules = [case.rule for case in cases if case.drafter == "tree"]
    assert not left_out
    assert (rules[0], set(rules[1:]) >= {"gumbel", "multi_round", "without_replacement", "kseq", "traversal"}) == ("gumbel", True)
    assert not {"token", "block", "typical", "greedy"} & set(rules)


def test_what_a_rule_does_not_take_is_left_out_and_said_and_nothing_left_is_an_error():
    drafters = {"tree": draft_model(MODEL, tree=DraftTree((-1, 0, 0))), "chain": draft_model(MODEL, 2)}
    cases, left_out = make_cases(drafters, "token", "float32", [], [1], [0.7])
    assert [case.drafter for case in cases] == ["none", "chain"]
    assert len(left_out) == 1
    assert left_out[0].startswith("tree, temperature 0.7, 1 slots: rule 'token' takes drafts of shape")
    with pytest.raises(ValueError, match="rule is 'token', which none of the drafters can be measured with: tree"):
        make_cases({"tree": drafters["tree"]}, "token", "float32", [], [1], [0.7])


def test_the_suites_drafters(monkeypatch):
    target = heads.target()
    eagle, medusa = heads.eagle_head(target), heads.medusa_heads(target)
    for head in (eagle, medusa):
        head.facts["accuracies"] = [[0.5, 0.2, 0.1, 0.05]] * 3
    monkeypatch.setattr("specjax.benchmark.cases.heads_of", lambda name: [eagle, medusa])
    monkeypatch.setattr("specjax.benchmark.cases.measure_costs", lambda model: None)
    quick, notes = suite_drafters(target, SUITES["quick"], None, "auto")
    assert list(quick) == ["lookup 7", "auto"]
    assert notes[0].startswith("auto is prompt_lookup: ")
    full, _ = suite_drafters(target, SUITES["full"], None, "auto")
    sizes = {name: drafter.functions.tree.num_nodes for name, drafter in full.items()}
    assert sizes.items() >= {"lookup 4": 4, "lookup 7": 7, "eagle tree 16": 16, "eagle growing tree 16": 16, "auto": 7}.items()
    assert {name.split(" + ")[1].split()[0] for name in full if " + " in name} == {"eagle", "medusa"}
    chains, _ = suite_drafters(target, SUITES["full"], 3, "auto")
    assert "lookup 3" in chains
    assert all(drafter.functions.tree.is_chain for name, drafter in chains.items() if "+" not in name)
    monkeypatch.setattr("specjax.benchmark.cases.heads_of", lambda name: [])
    full, notes = suite_drafters(target, SUITES["full"], None, "auto")
    assert list(full) == ["lookup 4", "lookup 7", "auto"]
    assert [note.split(":")[0] for note in notes] == ["medusa", "eagle", "auto is prompt_lookup"]


def test_a_case_has_a_name():
    assert str(Case("lookup 4", None, "gumbel", 4, 0.7, "float32")) == "lookup 4, rule gumbel, temperature 0.7, 4 slots, float32"


def test_adaptive_cases_say_so_and_give_the_same_tokens(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cases, _ = make_cases({"itself": DRAFTERS["itself"]}, "auto", "float32", [], [1, 2], [0.0], adaptive={"itself"})
    assert [(case.drafter, case.adaptive) for case in cases] == [("none", False), ("itself", True)] * 2
    assert str(cases[1]).startswith("itself, adaptive, rule ")
    document = run({"float32": MODEL}, planned(cases))
    assert wrong(document) == []
    assert [row["adaptive"] for row in document["results"]] == [False, True] * 2
    # Costs were measured for one row and for two.
    assert len(json.loads((tmp_path / "specjax" / "rounds.json").read_text())) == 2
