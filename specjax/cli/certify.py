"""``specjax certify``: which rules are lossless for which drafts, by enumeration; and whether that notices mistakes."""

import json
import sys
from typing import Annotated

import typer

from specjax.cli import options

WIDE = 120
"""Columns in which the whole table fits."""


def certify(
    rule: Annotated[
        str | None, typer.Option(metavar="NAME", help="Certify one rule, for all its laws and shapes.", show_default=False)
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Certify every rule for every law and shape.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="The table, and every shipped mutant: wrong code that must be caught.")
    ] = False,
    vocab_size: Annotated[int, typer.Option(metavar="V", help="Tokens of the tiny models, at least 2.")] = 3,
    depth: Annotated[int, typer.Option(metavar="N", help="Depth of the drafts, at least 1.")] = 2,
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds to go through.")] = 2,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the tiny models' distributions.")] = 0,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
):
    """Prove by enumeration which verification rules leave the target's distribution unchanged.

    The rounds run as they ship, on tiny models and through every random outcome; the distribution of whole outputs is compared
    with the target's. The exit status is 1 if a rule that claims to be lossless is not, or a mutant is not caught.
    """
    if (rule is not None) + table + everything != 1:
        raise options.CallError("give one of --rule NAME, --table and --all")
    for name, value, least in (
        ("--vocab-size", vocab_size, 2),
        ("--depth", depth, 1),
        ("--rounds", rounds, 1),
        ("--seed", seed, 0),
    ):
        if value < least:
            raise options.CallError(f"{name} is {value}; it must be at least {least}")

    from specjax.certificates.certificate import check_size
    from specjax.certificates.mutants import MUTANTS, catch
    from specjax.certificates.table import cells, in_threads
    from specjax.cli.report import progress
    from specjax.verification import RULES

    if rule is not None and rule not in RULES:
        raise options.CallError(f"--rule is {rule!r}; it must be one of {', '.join(sorted(RULES))}")
    try:
        check_size(vocab_size, depth, rounds)
    except ValueError as error:
        raise options.CallError(str(error)) from error
    asked = cells(None if rule is None else [RULES[rule]])
    allowed = [cell for cell in asked if cell.refusal is None]
    settings = {"vocab_size": vocab_size, "depth": depth, "rounds": rounds, "seed": seed}
    found = dict(progress(in_threads(lambda cell: cell.certify(**settings), allowed), len(allowed), "certificates"))
    names = list(MUTANTS) if everything else []
    mutants = dict(progress(in_threads(catch, names), len(names), "mutants"))

    if as_json:
        print(json.dumps(_document(asked, found, mutants), indent=1))
    else:
        _print(asked, found, mutants)
    broken = any(cell.rule.lossless and not certificate.lossless for cell, certificate in found.items())
    if broken or not all(mutants.values()):
        raise typer.Exit(1)


def _document(asked, found, mutants) -> dict:
    rules, refused = [], []
    for cell in asked:
        row = {"rule": cell.rule.name, "law": cell.law.value, "shape": cell.shape}
        certificate = found.get(cell)
        if certificate is None:
            refused.append(row | {"reason": cell.refusal})
            continue
        row["lossless"] = cell.rule.lossless and certificate.lossless
        row["max_error"] = certificate.max_error
        row["expected_tokens"] = certificate.expected_tokens
        if certificate.counterexample is not None:
            row["counterexample"] = certificate.counterexample
        rules.append(row)
    return {
        "rules": rules,
        "refused": refused,
        "mutants": [{"mutant": name, "caught": caught} for name, caught in mutants.items()],
    }


def _print(asked, found, mutants) -> None:
    from rich.console import Console
    from rich.table import Table

    # A file or a pipe has no width for which cells would have to be broken.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    shapes = list(dict.fromkeys(cell.shape for cell in asked))
    table = Table("rule", "law", *shapes)
    reasons: dict[str, int] = {}
    notes = []
    by_row: dict[tuple, list] = {}
    for cell in asked:
        certificate = found.get(cell)
        if certificate is None:
            text = f"refused ({reasons.setdefault(cell.refusal, len(reasons) + 1)})"
        else:
            name = "exact" if certificate.lossless else "lossy" if not cell.rule.lossless else "WRONG"
            text = f"{name} {certificate.max_error:.0e}, {certificate.expected_tokens:.3f}"
            if certificate.counterexample is not None:
                notes.append(f"{cell.rule.name}, {cell.law.value}, {cell.shape}: {certificate.counterexample}")
        by_row.setdefault((cell.rule.name, cell.law.value), []).append(text)
    for (rule, law), texts in by_row.items():
        table.add_row(rule, law, *texts)
    console.print(table)
    console.print("Largest error of an output's probability, and tokens per round.")
    for line in (*(f"({number}) {reason}" for reason, number in reasons.items()), *notes):
        console.print(line, markup=False)
    if mutants:
        table = Table("mutant", "caught")
        for name, caught in mutants.items():
            table.add_row(name, "yes" if caught else "NO")
        console.print(table)
