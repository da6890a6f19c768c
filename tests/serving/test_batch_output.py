"""The output of a batch job: whole records, whatever happens, and nobody else's file."""

import json
import os
import resource
import tracemalloc

import pytest

from specjax.serving.batch_output import BatchInput, BatchOutput, JobError

JOB = {"model": "m"}


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(n)}) + "\n" for n in range(5)))
    return BatchInput(path)


def record(line, **more):
    return {"line": line, "text": "x" * line} | more


def opened(tmp_path, source, **settings):
    return BatchOutput(tmp_path / "out.jsonl", JOB, source, **settings)


def lines_of(path):
    return [json.loads(data) for data in path.read_bytes().splitlines()]


def test_records_are_found_again(tmp_path, source):
    output = opened(tmp_path, source)
    output.write(record(3))
    output.write(record(1, error="no"))
    output.close()
    again = opened(tmp_path, source)
    assert (again.num_answered, again.num_errors) == (2, 1)
    assert [again.has(n) for n in range(1, 6)] == [True, False, True, False, False]
    with pytest.raises(ValueError, match=r"a record of line 3 is there already"):
        again.write(record(3))
    again.close()


@pytest.mark.parametrize("torn", [b'{"line": 4, "te', b'{"line": 4, "text": "xxxx"}', b"\xe4"])
def test_a_torn_record_is_cut_off_and_written_anew(tmp_path, source, torn):
    output = opened(tmp_path, source)
    output.write(record(2))
    output.close()
    with open(tmp_path / "out.jsonl", "ab") as file:
        file.write(torn)
    again = opened(tmp_path, source)
    assert not again.has(4)
    again.write(record(4))
    again.close()
    assert lines_of(tmp_path / "out.jsonl") == [record(2), record(4)]


def test_records_in_the_order_of_the_input(tmp_path, source):
    for lines in ((4, 2), (5,), (1, 3)):
        output = opened(tmp_path, source, keep_order=True)
        for line in lines:
            output.write(record(line))
        if output.num_answered == 5:
            output.finish()
        output.close()
        assert (tmp_path / "out.jsonl").exists() == (output.num_answered == 5)
    assert lines_of(tmp_path / "out.jsonl") == [record(n) for n in range(1, 6)]
    again = opened(tmp_path, source, keep_order=True)
    assert again.num_answered == 5
    again.finish()


def test_a_full_disk_leaves_whole_records_and_can_be_gone_on_from(tmp_path, source):
    output = opened(tmp_path, source)
    output.write(record(1))
    before = (tmp_path / "out.jsonl").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The system itself refuses to make the file longer than ten bytes more.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
    try:
        with pytest.raises(JobError, match=r"cannot be written: .*The 1 records in it are whole; make room and give"):
            output.write(record(5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "out.jsonl").read_bytes() == before
    output.write(record(5))
    output.close()
    assert lines_of(tmp_path / "out.jsonl") == [record(1), record(5)]


def test_two_processes_do_not_write_one_output(tmp_path, source):
    output = opened(tmp_path, source)
    with pytest.raises(JobError, match=r"another process is writing"):
        opened(tmp_path, source)
    output.close()
    opened(tmp_path, source).close()


@pytest.mark.parametrize("foreign", ['{"some": "json"}\n', '{"line": 6, "text": ""}\n', "words\n", '{"line": 1}\n{"line": 1}\n'])
def test_what_is_no_record_of_this_job_stays(tmp_path, source, foreign):
    opened(tmp_path, source).close()
    (tmp_path / "out.jsonl").write_text(foreign)
    with pytest.raises(JobError, match=r"is no record of this job, or one too many; nothing was changed"):
        opened(tmp_path, source)
    assert (tmp_path / "out.jsonl").read_text() == foreign


def test_a_damaged_job_file_is_named(tmp_path, source):
    opened(tmp_path, source).close()
    (tmp_path / "out.jsonl.job").write_text("{")
    with pytest.raises(JobError, match=r"out.jsonl.job is damaged"):
        opened(tmp_path, source)


def test_half_a_character_in_an_id(tmp_path, source):
    output = opened(tmp_path, source)
    output.write(record(1, id="\ud800", text="語"))
    output.close()
    (read,) = lines_of(tmp_path / "out.jsonl")
    assert (read["id"], read["text"]) == ("\ud800", "語")


def test_duplicate_ids_are_seen_however_far_apart(tmp_path):
    path = tmp_path / "in.jsonl"
    names = ["a", None, "b", None, "a", 1, "1", 1, "a"]
    path.write_text("".join(json.dumps({"prompt": ""} | ({} if n is None else {"id": n})) + "\n\n" for n in names))
    found = {number: duplicate for number, _, duplicate in BatchInput(path)}
    # Blank lines are between them; a number is not a text.
    assert found == {1: None, 3: None, 5: None, 7: None, 9: 1, 11: None, 13: None, 15: 11, 17: 1}


def test_a_million_lines_take_little_memory(tmp_path):
    path = tmp_path / "in.jsonl"
    line = json.dumps({"prompt": "word " * 20}) + "\n"
    with open(path, "w") as file:
        for _ in range(20):
            file.write(line * 10_000)
    size = os.path.getsize(path)
    tracemalloc.start()
    source = BatchInput(path)
    output = BatchOutput(tmp_path / "out.jsonl", JOB, source, keep_order=True)
    count = sum(1 for _ in source)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    output.close()
    # A fifth of a million here, at a few numbers of 8 bytes for each, while the file is far larger.
    assert count == 200_000
    assert size > 20e6
    assert peak < 60 * count
