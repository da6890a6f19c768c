"""The examples run as they stand, and say what they promise."""

import re
import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_own_model(capsys):
    runpy.run_path(str(EXAMPLES / "own_model.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert "The same tokens as plain decoding." in output
    accepted = [int(number) for number in re.findall(r"(\d+) of \d+ drafted tokens accepted", output)]
    assert len(accepted) == 6
    assert sum(accepted) > 6


def test_own_rule(capsys):
    runpy.run_path(str(EXAMPLES / "own_rule.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert "right_residual=False): lossless False, error 2e-01\n  after the prompt (1,), (0,) has probability" in output
    assert "right_residual=True): lossless True" in output
    assert "1.772 tokens per round; token verification 2.053" in output
