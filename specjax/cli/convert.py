"""``specjax convert``: a model from any source as a folder that loads as it runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from specjax.cli import options


def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="What --model takes elsewhere.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder; --model takes it.")],
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="float32, bfloat16, float16 or int8; by default the narrowest that keeps what SOURCE has, float32 for .gguf.",
            show_default=False,
        ),
    ] = None,
    scan_layers: Annotated[
        bool,
        typer.Option(
            "--scan-layers",
            help="Layers that are alike in one array per parameter, run in a loop: for deep models on TPUs.",
        ),
    ] = False,
    revision: options.Revision = None,
    verbose: options.Verbose = False,
):
    """Write a model as an Orbax folder, parameters as they run, and print its path."""
    from specjax.checkpoints.convert import convert as write

    print(f"reading {source}", file=sys.stderr)
    print(write(source, folder, dtype=dtype, revision=revision, scan_layers=scan_layers or None))
