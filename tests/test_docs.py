"""The Python in docs/ runs as it stands."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", ["drafters", "meshes", "rules", "sampling", "serving"])
def test_the_code_runs(page):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, f"docs/{page}.md", "exec"), {})
