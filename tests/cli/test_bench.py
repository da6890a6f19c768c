"""``specjax bench``: what it refuses before any work, and a small run."""

import importlib.util
import json

import pytest

from specjax.benchmark.pictures import check_pictures, draw

RESULT = {
    "prompts",
    "drafter",
    "rule",
    "num_speculative_tokens",
    "slots",
    "temperature",
    "tokens_per_second",
    "speedup",
    "predicted_speedup",
    "draft_acceptance_rate",
    "mean_acceptance_length",
}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--suite", "slow"), "--suite is 'slow'; it must be quick or full"),
        (("--slots", "0"), "--slots is 0; it must be a whole number of at least 1"),
        (("--repeats", "0"), "--repeats is 0; it must be a whole number of at least 1"),
        (("--prompts-per-kind", "-1"), "--prompts-per-kind is -1; it must be a whole number of at least 1"),
        (("--plain-dtypes", "float32,float8"), "--plain-dtypes is 'float32,float8'; it must be some of float32, bfloat16"),
        (("--prompts", "no-such-file.jsonl"), "no-such-file.jsonl cannot be read: No such file or directory"),
        (("--max-tokens", "0"), "max_tokens is 0"),
        (("--temperature", "-1"), "temperature is -1.0"),
        (("--seed", "-1"), "seed is -1"),
        (("--num-speculative-tokens", "33"), "is 33; it must be from 0 to 32"),
        (("--num-speculative-tokens", "0"), "is 0; it must be from 1 to 32 here: plain decoding is measured in any case"),
        (("--drafter", "lookup", "--num-speculative-tokens", "0"), "is 0; it must be from 1 to 32 here"),
        (("--drafter", "none", "--num-speculative-tokens", "4"), "must be 0 or left out; it is 4"),
        (("--drafter", "guess"), "--drafter is 'guess'; it must be none, lookup"),
        (("--drafter", "eagle=nowhere"), "no trained head is called 'nowhere'"),
        (("--drafter", "lookup", "--rule", "kseq", "--temperature", "1"), "this drafter draws 'deterministic'"),
        (("--drafter", "lookup", "--rule", "best"), "rule is 'best'; it must be 'auto' or one of"),
        (("--drafter", "lookup", "--rule", "typical"), "changes the target's distribution; it needs allow_lossy=True"),
        (("--max-new-tokens", "3"), "no option --max-new-tokens: here it is --max-tokens"),
    ],
)
def test_wrong_calls(specjax_command, monkeypatch, arguments, words):
    monkeypatch.setattr("specjax.load_model", lambda *_, **__: pytest.fail("work has begun"), raising=False)
    outcome = specjax_command("bench", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert words in " ".join(outcome.err.split())


@pytest.mark.parametrize(("text", "words"), [("", "holds no prompt"), ("{", "line 1: no JSON"), ("{}", "line 1: it has []")])
def test_wrong_prompt_files(specjax_command, tmp_path, text, words):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    outcome = specjax_command("bench", "--prompts", str(path))
    assert outcome.code == 2
    assert words in " ".join(outcome.err.split())


def test_pictures_need_matplotlib_and_a_folder(specjax_command, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: object() if name == "matplotlib" else find(name, *more))
    outcome = specjax_command("bench", "--pictures", str(tmp_path / "file"))
    assert outcome.code == 2
    assert "pictures go into a folder, and" in outcome.err
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == "matplotlib" else find(name, *more))
    outcome = specjax_command("bench", "--pictures", str(tmp_path / "new"))
    assert (outcome.code, outcome.out) == (2, "")
    assert "pictures need the library matplotlib: pip install 'specjax[plots]'" in outcome.err
    assert not (tmp_path / "new").exists()


def test_a_head_that_does_not_come_along_for_the_model(specjax_command, chat_model):
    outcome = specjax_command("bench", "--model", chat_model, "--drafter", "eagle")
    assert outcome.code == 1
    assert "no eagle head for 'tiny-chat' comes with specjax" in outcome.err


@pytest.fixture
def bench(specjax_command, chat_model, tmp_path, monkeypatch):
    """A run on three short prompts: plain decoding and a lookup in float32, one repeat."""
    monkeypatch.setattr("specjax.benchmark.run.memory_bandwidth", lambda num_bytes: {"copy": 2e9, "sum": 1e9})
    prompts = tmp_path / "three.jsonl"
    prompts.write_text('{"prompt": "abcabcabc", "category": "x"}\n{"turns": ["xyz", "once more"], "category": "y"}\n')
    settings = {"--model": chat_model, "--dtype": "float32", "--plain-dtypes": "float32", "--prompts": prompts, "--repeats": 1}
    settings |= {"--drafter": "lookup", "--num-speculative-tokens": 3, "--max-tokens": 6}

    def call(*arguments):
        return specjax_command("bench", *(str(word) for pair in settings.items() for word in pair), *arguments)

    return call


def test_a_run_as_json_and_as_a_table(bench, tmp_path):
    outcome = bench("--json")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert set(document) >= {"environment", "verify_cost", "results"}
    assert list(document["verify_cost"]) == ["2", "4", "8", "16"]
    plain, lookup = document["results"]
    for row in (plain, lookup):
        assert set(row) >= RESULT
        assert (row["prompts"], row["num_prompts"], row["slots"]) == ("three.jsonl", 3, 1)
        assert row["round"]["target_passes"] == [1, 1]
        assert row["round"]["least_seconds"] > 0
    assert (plain["drafter"], plain["speedup"]) == ("none", 1.0)
    assert (lookup["drafter"], lookup["num_speculative_tokens"]) == ("lookup", 3)
    assert lookup["speedup"] == pytest.approx(lookup["tokens_per_second"] / plain["tokens_per_second"], rel=2e-3)
    assert lookup["same_tokens"] == {"equal": 3, "differ": 0, "largest_margin": 0.0, "passed": True}
    assert (document["environment"]["suite"], document["environment"]["max_tokens"]) == ("quick", 6)

    outcome = bench()
    assert outcome.code == 0, outcome.err
    for words in (
        "3 prompts: three.jsonl",
        "lookup gumbel",
        "3 of 3",
        "Where the time of a round goes",
        "at the measured 2.0 GB/s",
    ):
        assert words in outcome.out
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ValueError, match="pictures need the library matplotlib"):
            check_pictures(tmp_path)
    else:
        paths = draw(document, tmp_path / "pictures")
        assert [path.name for path in paths] == [
            "speedup.svg",
            "acceptance_by_position.svg",
            "acceptance_by_kind.svg",
            "round_time.svg",
        ]
        assert all("<svg" in path.read_text() for path in paths)


def test_answers_that_are_not_plain_decodings_are_a_failure(bench, monkeypatch):
    """Half of the run is not needed for that."""
    document = {"results": [], "environment": {}}
    monkeypatch.setattr("specjax.benchmark.run.run", lambda models, plan, step: document)
    monkeypatch.setattr("specjax.benchmark.run.wrong", lambda document: ["lookup: 2 of 3 answers are not plain decoding's"])
    outcome = bench("--json")
    assert outcome.code == 1
    assert "WRONG: lookup: 2 of 3 answers are not plain decoding's" in outcome.err
    assert json.loads(outcome.out)["environment"] == {"suite": "quick"}
