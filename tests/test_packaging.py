"""What a built wheel holds, and the hints that it promises to have. Nothing is installed."""

import pathlib
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest

import specjax

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The names in a wheel built from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_holds_every_module_and_the_type_marker(wheel):
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "specjax").rglob("*.py")}
    assert sources <= set(wheel.namelist())
    assert "specjax/py.typed" in wheel.namelist()
    assert wheel.read("specjax/benchmark/prompts.jsonl") == (ROOT / "specjax" / "benchmark" / "prompts.jsonl").read_bytes()


@pytest.mark.parametrize("folder", ["models", "checkpoints"])
def test_wheel_holds_what_ships_beside_the_package(wheel, folder):
    files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert wheel.read(f"specjax/_shipped/{path.relative_to(ROOT).as_posix()}") == path.read_bytes()


def test_wheel_holds_nothing_else(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"specjax", f"specjax-{specjax.__version__}.dist-info"}
    assert not [name for name in wheel.namelist() if "test" in name.lower() or name.endswith((".gguf", ".safetensors", ".pyc"))]


def test_wheel_names_the_licence_and_the_command(wheel):
    names = {pathlib.PurePosixPath(name).name for name in wheel.namelist()}
    assert {"LICENSE", "NOTICE"} <= names
    info = f"specjax-{specjax.__version__}.dist-info"
    assert "specjax = specjax.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert "License-Expression: Apache-2.0" in wheel.read(f"{info}/METADATA").decode()


def test_version_is_written_once_more_and_alike():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert specjax.__version__ == project["version"]
    assert project["version"] in (ROOT / "CHANGELOG.md").read_text()


def test_type_hints_are_right():
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_tracked_file_names_a_path_of_one_machine():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    # Spelled so that this file does not name one itself; what follows a word is the path of a web address.
    pattern = re.compile(rb"(?<![\w.])/(?:work|root|home/\w+|Users/\w+|tmp/[a-z]\w*)/")
    found = []
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file():
            found += [f"{name}: {match.group().decode()}" for match in pattern.finditer(path.read_bytes())]
    assert not found
