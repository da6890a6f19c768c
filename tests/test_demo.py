"""The demo, on a tiny model. ``make demo`` itself runs it on the default one."""

import pathlib
import runpy

import pytest

from tests.cli.conftest import chat_model  # noqa: F401  (a fixture)

DEMO = pathlib.Path(__file__).resolve().parents[1] / "scripts" / "demo.py"
pytestmark = pytest.mark.skipif(not DEMO.exists(), reason="tests of a source checkout")


@pytest.fixture
def demo(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["demo.py", *arguments])
        with pytest.raises(SystemExit) as exit_:
            runpy.run_path(str(DEMO), run_name="__main__")
        return exit_.value.code, capsys.readouterr()

    return call


def test_one_prompt_is_answered_without_and_with_speculation(demo, chat_model):  # noqa: F811
    code, printed = demo("--model", chat_model, "--prompt", "--abc $abc `abc`", "--max-tokens", "12")
    assert code == 0, printed.err
    parts = printed.out.split("---")
    assert "--abc $abc `abc`" in printed.out
    assert "plain decoding" in printed.out
    assert "Drafter prompt_lookup: no trained head is known for" in printed.out
    assert "speculative decoding with prompt_lookup" in printed.out
    assert "tokens per second" in parts[-1]
    assert "Measured speedup" in parts[-1]


def test_a_model_that_is_not_there_is_one_line(demo):
    code, printed = demo("--model", "no-such-model")
    assert code == 1
    assert printed.err.startswith("demo: no model is called 'no-such-model'")
    assert len(printed.err.splitlines()) == 1
