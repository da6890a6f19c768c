"""The Makefile and the script that builds the environment, on stand-ins: nothing is installed or downloaded here."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="tests of a source checkout")


def run(*command, cwd, **environment):
    """Runs a command with a small environment."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
    return subprocess.run(
        command, cwd=cwd, env=kept | {"HOME": str(cwd)} | environment, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture
def project(tmp_path):
    """A folder, its path with a space, that holds the Makefile and a demo that prints its arguments."""
    folder = tmp_path / "a project"
    (folder / "scripts").mkdir(parents=True)
    (folder / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", folder)
    (folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (folder / "scripts" / "make_environment.sh").write_text("exit 0\n")
    (folder / "scripts" / "demo.py").write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    return folder


PROMPTS = [
    "plain",
    "",
    "$HOME $(shell touch harm) ${HOME} $$ $@ $",
    "`touch harm` $(touch harm)",
    "\"double\" and 'single' and \\ and \\n and a last \\",
    "# not a comment; touch harm & | > harm",
    "--help",
    "two\nlines\n\nand a last one\n",
    "%s %d 100%",
    "a=b := c ?= d",
    "grüße, 你好, 🙂",
    "* ? [a-z] ~ {a,b} !!",
    "trailing blanks  ",
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompt_reaches_the_demo_as_it_was_typed(project, prompt):
    done = run("make", "demo", f"PROMPT={prompt}", cwd=project)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [f"--prompt={prompt}"]
    assert not (project / "harm").exists()


def test_prompt_may_come_from_the_environment(project):
    done = run("make", "demo", cwd=project, PROMPT="$(shell touch harm) `x`")
    assert json.loads(done.stdout) == ["--prompt=$(shell touch harm) `x`"]
    assert not (project / "harm").exists()


def test_demo_without_a_prompt_takes_the_built_in_ones(project):
    assert json.loads(run("make", "demo", cwd=project).stdout) == []


def test_a_failing_environment_stops_make(project):
    (project / "scripts" / "make_environment.sh").write_text("exit 1\n")
    done = run("make", "demo", cwd=project)
    assert done.returncode != 0
    assert done.stdout == ""


FAILING_SHIM = "#!/bin/sh\necho 'command not found' >&2\nexit 127\n"

# Answers as a Python of the given version whose environments are made of this file, and whose pip does what FAKE_PIP says.
INTERPRETER = """#!/bin/sh
case "$1 $2" in
    "-c "*sys.version_info*) printf '%s\\t%s\\n' {version} "{path}" ;;
    "-c "*) exit 0 ;;
    "-m venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo {version} >.venv/version ;;
    "-m pip")
        case "$*" in
            *--version*) exit 0 ;;
            *) echo {version} >>installs; eval "$FAKE_PIP" ;;
        esac ;;
    *) exit 1 ;;
esac
"""


@pytest.fixture
def machine(tmp_path):
    """A project with the real script, on a machine whose only Pythons are stand-ins: returns (project folder, add, build)."""
    folder = tmp_path / "a project"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "make_environment.sh", folder / "scripts")
    (folder / "pyproject.toml").write_text("[project]\n")
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("sh", "awk", "sort", "cut", "cksum", "cat", "mkdir", "mv", "rm", "cp", "grep", "dirname", "tr"):
        (tools / tool).symlink_to(shutil.which(tool))
    places = []

    def add(place, name, version):
        path = tmp_path / place / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(FAILING_SHIM if version is None else INTERPRETER.format(version=version, path=path))
        path.chmod(0o755)
        if str(path.parent) not in places:
            places.append(str(path.parent))

    def build(*options, pip="exit 0", pyenv="none"):
        return run(
            "sh", "scripts/make_environment.sh", *options, cwd=folder,
            PATH=":".join([*places, str(tools)]), FAKE_PIP=pip, PYENV_ROOT=str(tmp_path / pyenv),
        )  # fmt: skip

    return folder, add, build


def versions(done):
    return [line.split("\t")[0] for line in done.stdout.splitlines()]


def test_newest_interpreter_first_by_number(machine):
    _, add, build = machine
    add("one folder", "python3", "3.9.9")  # says so itself: the real question would have failed there
    add("one folder", "python3.11", "3.11.7")
    add("other", "python3.12", "3.12.10")
    add("other", "python3", "3.12.9")
    assert versions(build("--interpreters"))[:3] == ["3.12.10", "3.12.9", "3.11.7"]


def test_a_shim_that_fails_hides_nothing(machine):
    folder, add, build = machine
    add("shims", "python3.13", None)
    add("shims", "python3", None)
    add("bin", "python3.13", "3.13.1")
    done = build()
    assert done.returncode == 0, done.stderr
    assert (folder / ".venv" / "version").read_text() == "3.13.1\n"


def test_pyenv_versions_are_found_behind_their_shims(machine, tmp_path):
    _, add, build = machine
    add("shims", "python3.13", None)
    place = tmp_path / "pyenv" / "versions" / "3.13.0" / "bin" / "python"
    place.parent.mkdir(parents=True)
    place.write_text(INTERPRETER.format(version="3.13.0", path=place))
    place.chmod(0o755)
    assert versions(build("--interpreters", pyenv="pyenv")) == ["3.13.0"]


def test_an_older_interpreter_where_the_newest_has_no_wheels(machine):
    folder, add, build = machine
    add("bin", "python3.14", "3.14.0")
    add("bin", "python3.12", "3.12.1")
    done = build(pip="! grep -q 3.14 .venv/version")
    assert done.returncode == 0, done.stderr
    assert (folder / "installs").read_text().split() == ["3.14.0", "3.12.1"]
    assert (folder / ".venv" / "version").read_text() == "3.12.1\n"


def test_a_complete_environment_is_left_alone(machine):
    folder, add, build = machine
    add("bin", "python3.12", "3.12.1")
    assert build().returncode == 0
    (folder / "installs").unlink()
    done = build(pip="exit 1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (folder / "installs").exists()


@pytest.mark.parametrize("end", ["exit 1", "kill -9 $PPID"])
def test_a_build_cut_short_is_not_taken_as_complete(machine, end):
    folder, add, build = machine
    add("bin", "python3.12", "3.12.1")
    assert build(pip=f": >.venv/half; {end}").returncode != 0
    assert (folder / ".venv" / "half").exists()
    done = build()
    assert done.returncode == 0, done.stderr
    assert not (folder / ".venv" / "half").exists()


def test_changed_requirements_are_installed_into_what_is_there(machine):
    folder, add, build = machine
    add("bin", "python3.12", "3.12.1")
    assert build().returncode == 0
    (folder / ".venv" / "kept").touch()
    (folder / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    assert build().returncode == 0
    assert (folder / ".venv" / "kept").exists()
    assert (folder / "installs").read_text().split() == ["3.12.1", "3.12.1"]


def test_offline_keeps_a_working_environment_and_says_one_line(machine):
    folder, add, build = machine
    add("bin", "python3.12", "3.12.1")
    assert build().returncode == 0
    (folder / ".venv" / "kept").touch()
    (folder / "pyproject.toml").write_text("[project]\nname = 'changed'\n")
    done = build(pip="echo NewConnectionError >.venv/install.log; exit 1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "The package index cannot be reached. Connect to the network and run make again."
    assert (folder / ".venv" / "kept").exists()
    assert build().returncode == 0


def test_moving_the_project_builds_anew(machine):
    folder, add, build = machine
    add("bin", "python3.12", "3.12.1")
    assert build().returncode == 0
    mark = folder / ".venv" / "specjax-environment"
    mark.write_text(mark.read_text().replace("a project", "where it was before"))
    (folder / ".venv" / "old").touch()
    assert build().returncode == 0
    assert not (folder / ".venv" / "old").exists()


def test_somebody_elses_environment_is_not_touched(machine):
    folder, add, build = machine
    add("bin", "python3.12", "3.12.1")
    (folder / ".venv").mkdir()
    (folder / ".venv" / "theirs").touch()
    for options in ((), ("--remove",)):
        done = build(*options)
        assert (folder / ".venv" / "theirs").exists()
    assert build().returncode == 1
    assert "move it away" in build().stderr
    assert done.returncode == 0


def test_nothing_to_build_with_is_said_in_one_line(machine):
    _, add, build = machine
    add("shims", "python3", None)
    done = build()
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "No Python of at least 3.11 runs here. Install one, for example: apt install python3 python3-venv"
    ]


def test_no_pip_anywhere_is_said_in_one_line(machine, tmp_path):
    _, add, build = machine
    add("bin", "python3.12", "3.12.1")
    path = tmp_path / "bin" / "python3.12"
    path.write_text(path.read_text().replace("*--version*) exit 0", "*--version*) exit 1"))
    done = build()
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "There is no pip for Python 3.12.1. Install it, for example: apt install python3-venv"
