#!/usr/bin/env python3
"""The API reference from the docstrings: one page for each module. What `make docs` runs.

python scripts/make_docs.py FOLDER
"""

import argparse
import pkgutil
import warnings
from pathlib import Path

import pdoc

import specjax


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="made where it does not exist")
    folder = parser.parse_args().folder
    # pdoc lists what is there; these names are imported when they are first asked for.
    for name in specjax.__all__:
        setattr(specjax, name, getattr(specjax, name))
    # Packages that say what is public would hide their modules, so each is named; others show theirs, which pdoc then has twice.
    warnings.filterwarnings("ignore", "The module specification .* has already been added")
    modules = [module.name for module in pkgutil.walk_packages(specjax.__path__, "specjax.")]
    pdoc.render.configure(docformat="google", footer_text=f"specjax {specjax.__version__}")
    pdoc.pdoc("specjax", *modules, output_directory=folder)


if __name__ == "__main__":
    main()
