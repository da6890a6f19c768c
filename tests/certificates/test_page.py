"""docs/certificates.md says what docs/measurements/certificates.json holds, which has every cell; its code runs."""

import json
import re
from pathlib import Path

from specjax.certificates.mutants import MUTANTS
from specjax.certificates.table import cells
from specjax.verification import SHAPES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "certificates.md").read_text()
RESULTS = json.loads((ROOT / "docs" / "measurements" / "certificates.json").read_text())


def of(cell):
    return cell.rule.name, cell.law.value, cell.shape


def rows(key):
    return {(row["rule"], row["law"], row["shape"]): row for row in RESULTS[key]}


def test_the_results_have_every_cell_and_every_mutant():
    certified, refused = rows("rules"), rows("refused")
    assert certified.keys() | refused.keys() == {of(cell) for cell in cells()}
    for cell in cells():
        if cell.refusal is None:
            row = certified[of(cell)]
            assert row["lossless"] == cell.rule.lossless
            assert (row["max_error"] <= 1e-12) == cell.rule.lossless
            assert ("counterexample" in row) == (not cell.rule.lossless)
        else:
            assert refused[of(cell)]["reason"] == cell.refusal
    assert {row["mutant"]: row["caught"] for row in RESULTS["mutants"]} == dict.fromkeys(MUTANTS, True)


def test_the_page_shows_them():
    certified = rows("rules")

    def text(cell):
        if cell.refusal is not None:
            return "refused"
        row = certified[of(cell)]
        return f"{'exact' if row['lossless'] else 'lossy'} {row['max_error']:.0e}, {row['expected_tokens']:.3f}"

    table = cells()
    for of_shapes in zip(*(table[start :: len(SHAPES)] for start in range(len(SHAPES))), strict=True):
        assert f"| {of_shapes[0].rule.name} | {of_shapes[0].law.value} | {' | '.join(map(text, of_shapes))} |" in PAGE
    for name in MUTANTS:
        assert f"* {name}: " in PAGE


def test_the_code_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    example = (ROOT / "examples" / "own_rule.py").read_text()
    (call,) = [block for block in blocks if block not in example]
    assert len(blocks) == 2
    exec(compile(call, "docs/certificates.md", "exec"), {})
    assert capsys.readouterr().out == "True None\n"
