"""``specjax generate`` on a tiny chat model."""

import io
import json
import re

import jax
import pytest

import specjax
from specjax.cli.generate import read_prompt
from specjax.cli.options import CallError

STATS = {
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_accepted_tokens_per_pos",
    "draft_acceptance_rate",
    "mean_acceptance_length",
}


@pytest.fixture
def generate(specjax_command, chat_model):
    def call(*arguments):
        return specjax_command("generate", "--model", chat_model, "--dtype", "float32", "--max-tokens", "12", *arguments)

    return call


def standard_input(monkeypatch, data, is_terminal=False):
    stream = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr("sys.stdin", stream)


def expected(chat_model, prompt, **settings):
    model = specjax.load_model(chat_model, dtype="float32")
    (completion,) = specjax.generate(model, [prompt], specjax.SamplingParams(max_tokens=12, **settings))
    return completion


def test_json_is_one_document_and_nothing_else(generate):
    outcome = generate("--prompt", "abcabcabc", "--json", "--seed", "7", "--temperature", "0.8", "--num-speculative-tokens", "3")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert set(document) == {"text", "token_ids", "finish_reason", "seed", "stats"}
    assert document["seed"] == 7
    assert len(document["token_ids"]) <= 12
    assert set(document["stats"]) >= STATS
    assert "float32" in outcome.err


def test_text_goes_to_standard_output_alone(generate, chat_model):
    outcome = generate("--prompt", "abcabcabc", "--temperature", "0")
    assert outcome.code == 0, outcome.err
    answer = expected(chat_model, [{"role": "user", "content": "abcabcabc"}], temperature=0)
    assert outcome.out == answer.text + "\n"
    assert "float32: asked for" in outcome.err
    assert "tokens per round" in outcome.err


def test_raw_leaves_the_chat_template_out(generate, chat_model):
    document = json.loads(generate("--prompt", "abcabcabc", "--raw", "--json").out)
    assert document["token_ids"] == expected(chat_model, "abcabcabc", temperature=0).token_ids
    assert document["token_ids"] != json.loads(generate("--prompt", "abcabcabc", "--json").out)["token_ids"]


def test_penalties_and_a_minimum_length(generate, chat_model):
    settings = {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.4, "min_tokens": 3, "temperature": 0}
    flags = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    outcome = generate("--prompt", "abcabcabc", "--json", *flags)
    assert outcome.code == 0, outcome.err
    answer = expected(chat_model, [{"role": "user", "content": "abcabcabc"}], **settings)
    assert json.loads(outcome.out)["token_ids"] == answer.token_ids
    neutral = expected(chat_model, [{"role": "user", "content": "abcabcabc"}], temperature=0)
    assert answer.token_ids != neutral.token_ids


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--min-tokens", "13"], "min_tokens is 13; it must be a whole number from 0 to max_tokens (12)"),
        (["--repetition-penalty", "0"], "repetition_penalty is 0.0; it must be a number above 0"),
        (["--repeat-penalty", "1.1"], "no option --repeat-penalty: here it is --repetition-penalty"),
    ],
)
def test_wrong_penalties(generate, flags, words):
    outcome = generate("--prompt", "a", *flags)
    assert outcome.code == 2
    assert words in " ".join(outcome.err.split())


def test_drafters_change_nothing_but_the_statistics(generate, chat_model):
    runs = [
        json.loads(generate("--prompt", "abcabcabc", "--json", *options).out)
        for options in (
            ("--drafter", "none"),
            ("--drafter", "lookup", "--num-speculative-tokens", "0"),
            ("--drafter", "auto", "--num-speculative-tokens", "5"),
            ("--drafter", f"lookup+draft={chat_model}", "--num-speculative-tokens", "3"),
            ("--drafter", f"draft={chat_model}", "--num-speculative-tokens", "2"),
        )
    ]
    assert len({json.dumps(run["token_ids"]) for run in runs}) == 1
    assert [run["stats"]["num_draft_tokens"] > 0 for run in runs] == [False, False, True, True, True]
    assert [len(run["stats"]["by_source"]) for run in runs] == [0, 0, 0, 2, 0]
    sources = runs[3]["stats"]["by_source"].values()
    assert sum(source["num_draft_tokens"] for source in sources) == runs[3]["stats"]["num_draft_tokens"]
    assert runs[-1]["stats"]["draft_acceptance_rate"] > 0.5  # the model drafts for itself; the budget cuts its last round


def test_stop_strings_end_the_json_and_the_text(generate, chat_model):
    whole = expected(chat_model, "abcabcabc", temperature=0).text
    stop = whole[5:7]
    arguments = ("--prompt", "abcabcabc", "--raw", "--stop", "no such text", "--stop", stop)
    document = json.loads(generate(*arguments, "--json").out)
    assert (document["text"], document["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    assert len(document["token_ids"]) == len(document["text"]) + len(stop) == document["stats"]["num_tokens"]
    assert generate(*arguments).out == document["text"] + "\n"


def test_log_probabilities_and_several_completions(generate):
    arguments = ("--prompt", "abcabcabc", "--json", "--temperature", "9", "--seed", "7", "--ignore-eos")
    documents = json.loads(generate(*arguments, "--logprobs", "2", "--n", "3").out)
    assert len({json.dumps(document["token_ids"]) for document in documents}) == 3
    for document in documents:
        assert document["seed"] == 7
        assert [next(iter(entry)) for entry in document["logprobs"]] == [str(token) for token in document["token_ids"]]
        assert {len(entry) for entry in document["logprobs"]} <= {2, 3}
        assert len(document["token_ids"]) == 12
    assert json.loads(generate(*arguments).out)["token_ids"] == documents[0]["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--logprobs", "3"), "--logprobs needs --json"),
        (("--n", "3"), "--n needs --json"),
        (("--n", "0", "--json"), "n is 0; it must be a whole number from 1"),
        (("--logprobs", "21", "--json"), "logprobs is 21; it must be None or a whole number from 0 to 20"),
        (("--stop", ""), "none of them empty"),
        (("--stop-sequence", "x"), "no option --stop-sequence: here it is --stop TEXT"),
        (("--rule", "best"), "rule is 'best'; it must be 'auto' or one of"),
        (("--rule", "greedy", "--temperature", "0.5"), "rule 'greedy' needs temperature 0"),
        (
            ("--drafter", "lookup+draft=x", "--rule", "membership", "--num-speculative-tokens", "40"),
            "is 40; it must be from 0 to 32",
        ),
        (("--drafter", "lookup", "--rule", "kseq", "--temperature", "0.5"), "this drafter draws 'deterministic'"),
    ],
)
def test_what_is_wrong_with_the_call_is_said_before_a_model_is_loaded(specjax_command, arguments, words):
    outcome = specjax_command("generate", "--prompt", "hi", "--model", "there-is-no-such-model", *arguments)
    assert outcome.code == 2
    assert words in outcome.err
    assert "there-is-no-such-model" not in outcome.err


def test_prompt_from_standard_input(generate, monkeypatch):
    standard_input(monkeypatch, b"abcabcabc\n")
    piped = generate("--json")
    assert json.loads(piped.out)["token_ids"] == json.loads(generate("--json", "--prompt", "abcabcabc").out)["token_ids"]


@pytest.mark.parametrize(
    ("data", "text"), [(b"a\n", "a"), (b"a\n\n", "a\n"), ("ä".encode(), "ä"), (b"\n", ""), (b" $x ", " $x ")]
)
def test_one_newline_at_the_end_of_standard_input_is_dropped(monkeypatch, data, text):
    standard_input(monkeypatch, data)
    assert read_prompt(None) == text


def test_a_given_prompt_is_taken_as_it_is(monkeypatch):
    standard_input(monkeypatch, b"not this")
    assert read_prompt("x\n") == "x\n"


@pytest.mark.parametrize(
    ("data", "is_terminal", "words"), [(b"", False, "empty"), (b"", True, "--prompt TEXT"), (b"\xff", False, "UTF-8")]
)
def test_no_usable_prompt(monkeypatch, data, is_terminal, words):
    standard_input(monkeypatch, data, is_terminal)
    with pytest.raises(CallError, match=words):
        read_prompt(None)


def test_int8(specjax_command, chat_model):
    outcome = specjax_command(
        "generate", "--model", chat_model, "--dtype", "int8", "--max-tokens", "6", "--prompt", "abcabc", "--temperature", "0"
    )
    assert outcome.code == 0, outcome.err
    assert "int8: asked for" in outcome.err
    model = specjax.load_model(chat_model, dtype="int8")
    params = specjax.SamplingParams(max_tokens=6, temperature=0)
    (answer,) = specjax.generate(model, [[{"role": "user", "content": "abcabc"}]], params)
    assert outcome.out == answer.text + "\n"


def test_verbose_says_what_was_compiled(generate):
    jax.clear_caches()
    outcome = generate("--prompt", "abcabcabc", "--drafter", "none", "--verbose")
    assert outcome.code == 0, outcome.err
    found = re.search(r"specjax: compiled (\d+) programs and fetched 0 compiled ones in [0-9.]+ s", outcome.err)
    # At least what makes the state, what reads the prompt, and the round.
    assert int(found[1]) >= 3


def test_adaptive_changes_no_token(generate):
    flags = ("--prompt", "abcabcabc", "--drafter", "lookup", "--json")
    fixed, adaptive = (json.loads(generate(*flags, flag).out) for flag in ("--no-adaptive", "--adaptive"))
    assert fixed["token_ids"] == adaptive["token_ids"]
