"""scripts/tpu_vm_batch.sh with a stand-in for gcloud: what would run on the hosts, and calls that are refused."""

import json
import os
import pathlib
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "tpu_vm_batch.sh"
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="tests of a source checkout")

PLACE = ["--name", "pod", "--zone", "us-west4-a"]
JOB = ["--", "in.jsonl", "out.jsonl", "--mesh", "data=4,model=2"]


def run(*arguments, path=os.environ["PATH"]):
    return subprocess.run(
        ["/bin/sh", str(SCRIPT), *arguments], env={"PATH": path}, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture
def gcloud(tmp_path):
    """A PATH whose gcloud prints its arguments as JSON and ends with status 7."""
    (tmp_path / "gcloud").write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\nsys.exit(7)\n")
    (tmp_path / "gcloud").chmod(0o755)
    return f"{tmp_path}{os.pathsep}{os.environ['PATH']}"


def test_the_command_for_all_hosts(gcloud):
    done = run(*PLACE, "--project=mine", *JOB, path=gcloud)
    assert done.returncode == 7, done.stderr
    command = "cd specjax && exec .venv/bin/specjax batch in.jsonl out.jsonl --mesh data=4,model=2 --distributed"
    place = ["compute", "tpus", "tpu-vm", "ssh", "pod", "--zone=us-west4-a", "--worker=all"]
    assert json.loads(done.stdout) == [*place, f"--command={command}", "--project=mine"]


def test_a_dry_run_prints_the_command_and_runs_nothing(gcloud):
    done = run(*PLACE, "--dry-run", *JOB, path=gcloud)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("gcloud compute tpus tpu-vm ssh pod --zone=us-west4-a --worker=all '--command=cd specjax && exec ")
    # What is printed is what runs: a shell that reads it calls the same.
    printed = subprocess.run(["/bin/sh", "-c", line], env={"PATH": gcloud}, capture_output=True, text=True, check=False)
    assert json.loads(printed.stdout) == json.loads(run(*PLACE, *JOB, path=gcloud).stdout)


def test_arguments_reach_the_hosts_as_they_were_typed(gcloud):
    odd = ["two words", "it's", '$HOME `x` \\ "', "", "*", "a\n\nb\n", "grüße; exit 3 & #", "'", "x'x"]
    job = ["in.jsonl", "out.jsonl", "--mesh=data=8", *[text for stop in odd for text in ("--stop", stop)]]
    done = run(*PLACE, "--folder", "my own/$folder", "--", *job, path=gcloud)
    (command,) = [text.removeprefix("--command=") for text in json.loads(done.stdout) if text.startswith("--command=")]
    words = ["cd", "my own/$folder", "&&", "exec", ".venv/bin/specjax", "batch", *job, "--distributed"]
    assert shlex.split(command) == words
    # A real shell reads it alike.
    shown = command.replace("exec .venv/bin/specjax", f"{sys.executable} -c 'import json,sys; print(json.dumps(sys.argv[1:]))'")
    shown = shown.replace("cd 'my own/$folder' && ", "")
    there = subprocess.run(["/bin/sh", "-c", shown], capture_output=True, text=True, check=True)
    assert json.loads(there.stdout) == words[5:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (JOB, "--name is missing"),
        (["--name", "pod", *JOB], "--zone is missing: where the TPU VM pod is"),
        (["--name"], "--name needs a value"),
        (["--name=", *JOB], "--name is empty"),
        (PLACE, "the job is missing"),
        ([*PLACE, "--", "in.jsonl"], "IN.jsonl and OUT.jsonl must come behind --"),
        ([*PLACE, "--", "in.jsonl", "out.jsonl"], "--mesh is missing"),
        ([*PLACE, *JOB, "--process-id=1"], "--process-id is found by the hosts; leave it out"),
        ([*PLACE, *JOB, "--distributed"], "--distributed is added here"),
        ([*PLACE, "--worker", "0", *JOB], "there is no option --worker"),
    ],
)
def test_calls_that_are_refused(gcloud, arguments, message):
    done = run(*arguments, path=gcloud)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_without_gcloud(tmp_path):
    (tmp_path / "sed").symlink_to("/bin/sed" if os.path.exists("/bin/sed") else "/usr/bin/sed")
    done = run(*PLACE, *JOB, path=str(tmp_path))
    assert done.returncode == 2
    assert "gcloud is not here" in done.stderr
    assert run(*PLACE, "--dry-run", *JOB, path=str(tmp_path)).returncode == 0


def test_help_is_the_head_of_the_script():
    done = run("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Runs one batch job on all hosts of a TPU VM")
    assert "set -eu" not in done.stdout
