"""``specjax batch`` over several processes, and calls of it that are wrong."""

import json

import pytest

from tests.together import free_address, run_together

LINES = [
    {"prompt": "Hello", "id": "first", "max_tokens": 9},
    {"prompt": "wrong", "top_q": 1},
    {"messages": [{"role": "user", "content": "Who? ü"}], "max_tokens": 3, "temperature": 0.9, "seed": 5},
    {"prompt": [20, 21, 22], "n": 2, "temperature": 1.0, "seed": 6},
    {"prompt": "abc abc abc", "max_tokens": 12, "stop": ["q"]},
    {"prompt": "never", "seed": None, "temperature": 1.0, "max_tokens": 4},
]


def test_a_file_is_answered_by_two_processes(specjax_command, chat_model, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    (here / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    options = ["--model", chat_model, "--drafter", "lookup", "--rule", "gumbel", "--ignore-eos", "--capacity", "64"]
    options += ["--dtype", "float32", "--max-tokens", "6", "--seed", "3", "--keep-order"]
    address = free_address()
    calls = [
        ["batch", "in.jsonl", "out.jsonl", *options, "--slots", "2", "--mesh", "data=2", "--json"]
        + ["--coordinator-address", address, "--num-processes", "2", "--process-id", str(index)]
        for index in range(2)
    ]
    outcomes = run_together([["-c", f"from specjax.cli import main; main({call!r})"] for call in calls], [here, there])
    for code, _, err in outcomes:
        assert code == 0, err
    (_, out, err), (_, other_out, other_err) = outcomes
    summary = json.loads(out.splitlines()[-1])
    assert (summary["num_answered"], summary["num_errors"], summary["complete"]) == (6, 1, True)
    assert "6 of 6 lines answered, 1 of them with an error" in err
    # The other one has no file, writes none, and says nothing.
    assert list(there.iterdir()) == []
    assert "{" not in other_out
    assert "lines answered" not in other_err

    alone = tmp_path / "alone.jsonl"
    outcome = specjax_command("batch", str(here / "in.jsonl"), str(alone), *options, "--slots", "2")
    assert outcome.code == 0, outcome.err
    records, expected = ([json.loads(line) for line in path.read_bytes().splitlines()] for path in (here / "out.jsonl", alone))
    # The last line has no seed: each job draws its own.
    assert records[:-1] == expected[:-1]
    assert len(records[-1]["token_ids"]) == 4


SEVERAL = {"--coordinator-address": "127.0.0.1:1234", "--num-processes": "2", "--process-id": "0", "--mesh": "data=2"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--process-id": "2"}, "--process-id is 2 and --num-processes is 2; it must be from 0 to 1"),
        ({"--process-id": "-1"}, "--process-id is -1 and --num-processes is 2; it must be from 0 to 1"),
        ({"--num-processes": "0"}, "--num-processes is 0; it must be a whole number of at least 1"),
        ({"--coordinator-address": None}, "--num-processes is given without --coordinator-address; several processes need all"),
        (
            {"--coordinator-address": None, "--process-id": None},
            "--num-processes is given without --coordinator-address and --process-id",
        ),
        ({"--coordinator-address": "myhost"}, "--coordinator-address is 'myhost'; it must be HOST:PORT"),
        ({"--coordinator-address": "myhost:99999"}, "with a port from 1 to 65535"),
        ({"--mesh": None}, "--mesh is missing: it says how the devices of all processes work together"),
        ({"--mesh": "rows=2"}, "there is no axis 'rows'"),
        ({"--distributed": ""}, "--distributed finds by itself what --coordinator-address says; give one of them"),
    ],
)
def test_calls_of_several_processes_that_are_wrong(specjax_command, tmp_path, monkeypatch, changed, message):
    """All of them are refused before any process waits for another, and before a model is looked for."""
    monkeypatch.chdir(tmp_path)
    options = {name: value for name, value in (SEVERAL | changed).items() if value is not None}
    arguments = [text for option in options.items() for text in option if text]
    outcome = specjax_command("batch", "in.jsonl", "out.jsonl", "--model", "nowhere", *arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert list(tmp_path.iterdir()) == []
