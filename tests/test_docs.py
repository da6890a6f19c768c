"""The Python in docs/ runs as it stands."""

import re
from pathlib import Path

import pytest

import specjax
from specjax.checkpoints.heads import save_head
from tests import heads

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", ["drafters", "meshes", "rules", "sampling", "serving"])
def test_the_code_runs(page):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, f"docs/{page}.md", "exec"), {})


def test_the_code_about_trained_drafts_runs(tmp_path, monkeypatch):
    """With a tiny model in place of the reader's, and untrained drafts for it in the folders that the page names."""
    monkeypatch.chdir(tmp_path)
    for name, make in (("eagle", heads.eagle_head), ("medusa", heads.medusa_heads), ("draft", heads.draft_layers)):
        save_head(make(), f"{name}_folder")
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "training.md").read_text(), re.DOTALL)
    names = {"model": heads.target(), "prompts": [[1, 2, 3], [5]], "params": specjax.SamplingParams(max_tokens=4, seed=1)}
    exec(compile(block, "docs/training.md", "exec"), names)
