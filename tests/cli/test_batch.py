"""``specjax batch`` as a user runs it: whole jobs, in this process and in processes that are killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

import specjax
from specjax import SamplingParams

PLAIN = ["--drafter", "none", "--slots", "3", "--capacity", "96", "--max-tokens", "6", "--ignore-eos"]


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def read_records(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def chat_line(name, text, **body):
    body = {"model": "tiny-chat", "messages": [{"role": "user", "content": text}], "max_tokens": 5} | body
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_a_file_of_both_forms_is_answered(specjax_command, chat_model, tmp_path):
    lines = [
        {"prompt": "Hello", "id": "first"},
        chat_line("second", "Hi"),
        {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 3, "temperature": 0.9, "seed": 5},
        {"prompt": [20, 21, 22], "n": 2, "temperature": 1.0},
        {"custom_id": "last", "method": "POST", "url": "/v1/completions", "body": {"prompt": "abc", "max_tokens": 4}},
    ]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    outcome = specjax_command("batch", source, str(output), "--model", chat_model, *PLAIN, "--keep-order", "--json")
    assert outcome.code == 0, outcome.err
    summary = json.loads(outcome.out)
    assert (summary["num_answered"], summary["num_errors"], summary["complete"]) == (5, 0, True)
    assert "5 of 5 lines answered" in outcome.err

    model = specjax.load_model(chat_model)

    def alone(prompt, **settings):
        settings = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True} | settings
        return specjax.generate(model, [prompt], SamplingParams(**settings))

    first, second, third, fourth, last = read_records(output)
    (hello,) = alone([{"role": "user", "content": "Hello"}])
    assert (first["line"], first["id"], first["text"], first["token_ids"]) == (1, "first", hello.text, hello.token_ids)
    (hi,) = alone([{"role": "user", "content": "Hi"}], max_tokens=5)
    assert (second["id"], second["custom_id"], second["error"]) == ("batch_req_2", "second", None)
    body = second["response"]["body"]
    assert second["response"]["status_code"] == 200
    assert body["choices"][0]["message"] == {"role": "assistant", "content": hi.text}
    assert body["choices"][0]["finish_reason"] == hi.finish_reason
    assert (body["usage"]["completion_tokens"], body["object"], body["model"]) == (5, "chat.completion", "tiny-chat")
    (who,) = alone(lines[2]["messages"], max_tokens=3, temperature=0.9, seed=5)
    assert (third["line"], third["text"], third["seed"]) == (3, who.text, 5)
    assert (len(fourth["completions"]), fourth["num_prompt_tokens"]) == (2, 3)
    (again,) = {c["seed"] for c in fourth["completions"]}
    both = alone([20, 21, 22], temperature=1.0, n=2, seed=again)
    assert [c["token_ids"] for c in fourth["completions"]] == [c.token_ids for c in both]
    (abc,) = alone("abc", max_tokens=4)
    assert last["response"]["body"]["choices"][0]["text"] == abc.text
    # Once more: there is nothing left to do, and nothing is changed.
    before = output.read_bytes()
    assert specjax_command("batch", source, str(output), "--model", chat_model, *PLAIN, "--keep-order").code == 0
    assert output.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.job"]


def test_draft_lengths_by_load(specjax_command, chat_model, tmp_path):
    """One row alone drafts, three at once do not; the answers are the same either way."""
    line = {"prompt": [20, 21, 20, 21, 20], "max_tokens": 24}
    settings = ["--slots", "3", "--capacity", "96", "--ignore-eos", "--rule", "gumbel", "--draft-len-schedule", "1:4,2:0"]
    options = ["--model", chat_model, "--drafter", "lookup", *settings]
    found = {}
    for count in (1, 3):
        source, output = write_lines(tmp_path / f"{count}.jsonl", [line] * count), tmp_path / f"{count}.out"
        outcome = specjax_command("batch", source, str(output), *options)
        assert outcome.code == 0, outcome.err
        records = read_records(output)
        found[count] = sum(r["num_draft_tokens"] for r in records), {str(r["token_ids"]) for r in records}
    assert found[1][0] > 0
    assert found[3][0] == 0
    assert found[1][1] == found[3][1]


@pytest.mark.parametrize(
    ("text", "words"),
    [("4", "is '4'; it must be numbers of rows, at least 1, and draft lengths"), ("0:2", "is '0:2'"),
     ("4:-1", "is '4:-1'"), ("4:2,4:1", "a number of rows is there twice"), ("4:2,", "is '4:2,'")],
)  # fmt: skip
def test_a_schedule_that_is_none(specjax_command, tmp_path, text, words):
    outcome = specjax_command("batch", str(tmp_path / "in"), str(tmp_path / "out"), "--draft-len-schedule", text)
    assert (outcome.code, outcome.out) == (2, "")
    assert words in outcome.err


def test_bad_lines_get_an_error_with_their_number_and_stop_nothing(specjax_command, chat_model, tmp_path):
    data = [
        b'{"prompt": "a"}',
        b"",
        b'{"prompt": "b"',
        b"[1]",
        b'{"prompt": "c", "temperature": -1}',
        b'{"prompt": "d", "top_q": 1}',
        b'{"prompt": "e", "messages": []}',
        b'{"prompt": "%s"}' % (b"x" * 200),
        b'{"prompt": "f", "id": "same"}',
        json.dumps(chat_line("same", "g")).encode(),
        json.dumps(chat_line("x", "h", model="gpt")).encode(),
        json.dumps(chat_line("y", "h", tools=[])).encode(),
        b'{"prompt": "\xff"}',
        b'{"prompt": "i", "logprobs": 1}',
        b'{"prompt": ""}',
        b'{"prompt": "last"}',
    ]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(data))  # no newline behind the last
    output = tmp_path / "out.jsonl"
    outcome = specjax_command("batch", str(tmp_path / "in.jsonl"), str(output), "--model", chat_model, *PLAIN, "--raw")
    assert outcome.code == 0, outcome.err
    assert "15 of 15 lines answered, 12 of them with an error" in outcome.err
    records = {r.get("line") or int(r["id"].removeprefix("batch_req_")): r for r in read_records(output)}
    assert sorted(records) == [n for n in range(1, 17) if n != 2]
    assert all("text" in records[n] for n in (1, 9, 16))
    for number, words in {
        3: "line 3 is not JSON",
        4: "line 4 is a JSON list; it must be an object",
        5: "temperature is -1; it must be",
        6: "line 6 has 'top_q', which means nothing here",
        7: "line 7 has both of prompt and messages",
        8: "a prompt of 200 tokens and max_tokens 6 do not fit into a slot's capacity of 96 tokens",
        13: "line 13 is not JSON",
        14: "logprobs is 1; this engine reports none at all",
        15: "has no tokens",
    }.items():
        assert words in records[number]["error"], records[number]
    for number, words in {10: "the id 'same' is that of line 9 too", 11: "model is 'gpt'; this job runs", 12: "'tools'"}.items():
        assert records[number]["response"]["status_code"] == 400
        assert words in records[number]["response"]["body"]["error"]["message"]


def test_a_mesh_gives_the_same_answers(specjax_command, chat_model, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": f"{n} is", "max_tokens": 4 + n} for n in range(6)])
    answers = []
    lookup, draft = ["--drafter", "lookup"], ["--drafter", f"draft={chat_model}", "--num-speculative-tokens", "2"]
    mesh = ["--mesh", "data=2,model=2", "--slots", "4"]
    for name, more in (
        ("one", ["--slots", "2", *lookup]),
        ("mesh", [*mesh, *lookup]),
        ("split", [*mesh, *draft, "--split-draft"]),
    ):
        output = tmp_path / name
        call = ["batch", source, str(output), "--model", chat_model, "--keep-order", "--ignore-eos"]
        outcome = specjax_command(*call, "--capacity", "96", *more)
        assert outcome.code == 0, outcome.err
        answers.append([record["token_ids"] for record in read_records(output)])
    assert answers[0] == answers[1] == answers[2]


def command(chat_model, tmp_path, *more):
    arguments = ["batch", "in.jsonl", "out.jsonl", "--model", chat_model, *PLAIN, *more]
    program = [sys.executable, "-c", f"from specjax.cli import main; main({arguments!r})"]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    root = os.path.dirname(os.path.dirname(specjax.__file__))
    environment = {**os.environ, **cache, "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1", "PYTHONPATH": root}
    # One device starts sooner than the eight of the tests.
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    return {"args": program, "cwd": tmp_path, "env": environment, "stderr": subprocess.PIPE, "text": True}


@pytest.mark.parametrize(("keep_order", "times"), [(False, 14), (True, 6)])
def test_10_nothing_is_lost_when_the_job_is_killed_at_any_moment(chat_model, tmp_path, keep_order, times):
    numbers = random.Random(7)
    lines = [{"prompt": f"{n} " * numbers.randint(1, 8), "max_tokens": numbers.randint(1, 12)} for n in range(3000)]
    lines[100] = {"nothing": 1}
    write_lines(tmp_path / "in.jsonl", lines)
    call = command(chat_model, tmp_path, *["--keep-order"] * keep_order)
    output, kept = tmp_path / "out.jsonl", tmp_path / ("out.jsonl.unordered" if keep_order else "out.jsonl")
    kills, before = 0, b""
    while kills < times:
        process = subprocess.Popen(**call)
        # Some are killed while they start, the others while they write.
        if kills % 4 == 3:
            time.sleep(numbers.uniform(0, 4))
        else:
            while process.poll() is None and (not kept.exists() or kept.stat().st_size <= len(before)):
                time.sleep(0.005)
            time.sleep(numbers.uniform(0, 0.3))
        if process.poll() is not None:
            pytest.fail(process.stderr.read())
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += 1
        after = kept.read_bytes() if kept.exists() else b""
        # What was finished stays as it was: no record is written a second time, none is changed.
        whole = before[: before.rfind(b"\n") + 1]
        assert after.startswith(whole)
        before = after
    done = subprocess.run(**call, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "answers already; going on" in done.stderr
    records = read_records(output)
    assert sorted(record["line"] for record in records) == list(range(1, 3001))
    if keep_order:
        assert [record["line"] for record in records] == list(range(1, 3001))
    assert ["error" in record for record in sorted(records, key=lambda r: r["line"])] == [n == 100 for n in range(3000)]
    assert all(len(r["token_ids"]) == lines[r["line"] - 1]["max_tokens"] for r in records if "error" not in r)


def test_an_interrupt_finishes_what_has_begun_and_says_how_to_go_on(chat_model, tmp_path):
    write_lines(tmp_path / "in.jsonl", [{"prompt": f"{n}", "max_tokens": 40} for n in range(2000)])
    process = subprocess.Popen(**command(chat_model, tmp_path))
    output = tmp_path / "out.jsonl"
    while not (output.exists() and output.stat().st_size) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "Finishing what has begun" in said
    assert "the same command goes on" in said
    records = read_records(output)
    assert 0 < len(records) < 2000
    assert all(len(record["token_ids"]) == 40 for record in records)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.jsonl", "out.jsonl"], "missing.jsonl cannot be read: No such file"),
        (["empty.jsonl", "out.jsonl"], "empty.jsonl holds no line"),
        (["in.jsonl", "in.jsonl"], "in.jsonl is the input; name another file"),
        (["in.jsonl", "other.txt"], "other.txt exists and is not the output of a batch job"),
        (["in.jsonl", "no/such/folder"], "cannot be written: No such file"),
        (["in.jsonl", "out.jsonl", "--slots", "0"], "--slots is 0; it must be auto or a whole number"),
        (["in.jsonl", "out.jsonl", "--mesh", "data=99"], "a mesh of data=99,model=1 takes 99 devices; there are 8"),
        (["in.jsonl", "out.jsonl", "--mesh", "rows=2"], "there is no axis 'rows'"),
        (["in.jsonl", "out.jsonl", "--mesh", "model=2", "--split-draft"], "--drafter none has no draft model to split"),
        (["in.jsonl", "out.jsonl", "--batch-size", "8"], "no option --batch-size: here it is --slots N"),
        (["in.jsonl", "out.jsonl", "--capacity", "9999"], "capacity is 9999; model"),
    ],
)
def test_calls_that_begin_no_job(specjax_command, chat_model, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}])
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "other.txt").write_text("mine")
    outcome = specjax_command("batch", *arguments, "--model", chat_model, "--drafter", "none")
    assert outcome.code in (1, 2)
    assert message in outcome.err
    assert (tmp_path / "other.txt").read_text() == "mine"
    # Nothing is left that a better call would have to belong to.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.jsonl", "in.jsonl", "other.txt"]
    assert (tmp_path / "in.jsonl").read_text() == '{"prompt": "a"}\n'


def test_another_job_does_not_touch_the_output(specjax_command, chat_model, tmp_path):
    source, output = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}]), tmp_path / "out.jsonl"
    assert specjax_command("batch", source, str(output), "--model", chat_model, *PLAIN).code == 0
    before = output.read_bytes()
    for more, message in (
        (["--temperature", "1"], "its sampling is"),
        (["--rule", "gumbel"], "its rule is 'auto', this one's is"),
    ):
        outcome = specjax_command("batch", source, str(output), "--model", chat_model, *PLAIN, *more)
        assert outcome.code == 1
        assert "belongs to another job" in outcome.err
        assert message in outcome.err
    write_lines(tmp_path / "in.jsonl", [{"prompt": "b"}])
    outcome = specjax_command("batch", source, str(output), "--model", chat_model, *PLAIN)
    assert outcome.code == 1
    assert "its input is" in outcome.err
    assert output.read_bytes() == before
