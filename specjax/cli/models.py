"""``specjax models`` and ``specjax pull NAME``: the models that are known by name."""

import sys
from typing import Annotated

import typer

from specjax.cli import options


def models(verbose: options.Verbose = False):
    """List the models that are known by name, and which of them are in your cache folder."""
    from rich.console import Console
    from rich.table import Table

    from specjax.checkpoints.cards import model_cards
    from specjax.checkpoints.download import cached_path

    table = Table(box=None, pad_edge=False, collapse_padding=False)
    for heading in ("name", "parameters", "download", "licence", "publisher", "here"):
        table.add_column(heading, justify="right" if heading in ("parameters", "download") else "left", overflow="fold")
    for card in model_cards().values():
        table.add_row(
            card.name,
            f"{card.parameters / 1e6:.0f} M",
            f"{card.source.bytes / 1e6:.0f} MB",
            card.licence,
            card.publisher,
            "yes" if cached_path(card.name) else "no",
        )
    Console(highlight=False).print(table)


def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a model card; see `specjax models`.")],
    verbose: options.Verbose = False,
):
    """Fetch a model into your cache folder unless it is there, and print its path."""
    from specjax.checkpoints.download import pull as fetch

    print(fetch(name, progress=lambda line: print(line, file=sys.stderr)))
