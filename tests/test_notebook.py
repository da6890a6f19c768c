"""The notebook runs from top to bottom, and its outputs are those of such a run."""

import json
import runpy
from pathlib import Path

import pytest

import specjax

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "tour.ipynb"
pytestmark = pytest.mark.skipif(not NOTEBOOK.exists(), reason="tests of a source checkout")


@pytest.fixture(scope="module")
def notebook():
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def text_of(cell):
    return "".join(line for output in cell["outputs"] for line in output["text"])


@pytest.mark.default_model
def test_it_runs_from_top_to_bottom(notebook, smollm2, monkeypatch):
    """The model is loaded once for all tests."""
    monkeypatch.setattr(specjax, "load_model", lambda name, dtype: smollm2, raising=False)
    run_cells = runpy.run_path(str(ROOT / "scripts" / "run_notebook.py"))["run_cells"]
    done = run_cells(notebook, "tour.ipynb")
    printed = [text_of(cell) for cell in code_cells(done)]
    assert all(printed)
    assert "lossless: True" in printed[-1]
    assert "lossless: False" in printed[-1]
    # What depends on neither speed nor the last bits of a product is as it is stored.
    stored = [text_of(cell) for cell in code_cells(notebook)]
    assert printed[-1] == stored[-1]
    assert printed[0].split()[-4:] == stored[0].split()[-4:]


def test_its_outputs_are_stored_in_order(notebook):
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(text_of(cell) for cell in cells)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
