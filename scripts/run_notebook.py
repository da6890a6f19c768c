#!/usr/bin/env python3
"""Runs a notebook's code cells from top to bottom and stores what they printed.

    python scripts/run_notebook.py examples/tour.ipynb

Only what is printed is stored, which needs no Jupyter: cells that show something print it.
"""

import contextlib
import io
import json
import pathlib
import sys


def run_cells(notebook: dict, name: str) -> dict:
    """The notebook with the outputs of its code cells, which are run in one namespace.

    Args:
      notebook: as its file has it.
      name: for tracebacks.
    """
    names, cells, count = {"__name__": "__main__"}, [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"{name}, cell {count}", "exec"), names)
            text = printed.getvalue().splitlines(keepends=True)
            outputs = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
            cell = cell | {"execution_count": count, "outputs": outputs}
        cells.append(cell)
    return notebook | {"cells": cells}


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(f"give one notebook: python {sys.argv[0]} NOTEBOOK.ipynb")
    path = pathlib.Path(sys.argv[1])
    done = run_cells(json.loads(path.read_text(encoding="utf-8")), path.name)
    path.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
