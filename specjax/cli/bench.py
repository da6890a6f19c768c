"""``specjax bench``: plain decoding and speculation side by side, on this machine."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from specjax.cli import options
from specjax.cli.drafters import check_drafter, make_drafter, parse_drafter

WIDE = 170
"""Columns in which all tables fit."""


def bench(
    suite: Annotated[
        str,
        typer.Option(metavar="NAME", help="quick: plain decoding, lookup and auto, in a minute or two; full: every drafter."),
    ] = "quick",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON lines with prompt or turns, and perhaps category; by default prompts of six kinds that come along.",
            show_default=False,
        ),
    ] = None,
    prompts_per_kind: Annotated[
        int | None,
        typer.Option(metavar="N", help="Prompts of each kind; by default the suite's, of a file all.", show_default=False),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(metavar="N", help="How often everything is timed; by default 3.", show_default=False)
    ] = None,
    pictures: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Draw the results into this folder, as SVG; needs matplotlib.", show_default=False),
    ] = None,
    plain_dtypes: Annotated[
        str, typer.Option(metavar="NAME,...", help="Dtypes of plain decoding; the fastest is what speedups are over.")
    ] = "float32,bfloat16",
    model: options.Model = "smollm2-135m-instruct",
    revision: options.Revision = None,
    dtype: options.Dtype = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Measure this one, named as for `specjax generate`, and not the suite's.", show_default=False
        ),
    ] = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    adaptive: options.Adaptive = None,
    rule: options.Rule = "auto",
    slots: Annotated[
        int | None,
        typer.Option(metavar="N", help="Requests that are answered at once; by default the suite's.", show_default=False),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="New tokens at most; by default the suite's.", show_default=False)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="X", help="0 is greedy; by default the suite's.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the first prompt's answer; the next has the next.")] = 0,
    allow_lossy: options.AllowLossy = False,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
):
    """Measure plain decoding and speculation side by side, on this machine: tokens per second, acceptance, and where time goes.

    Everything is compiled first and then timed in turns. Answers are compared with plain decoding's; the exit status is 1 if they
    differ by more than rounding can explain.
    """
    parts = None if drafter is None else parse_drafter(drafter, num_speculative_tokens)
    if parts is None:
        parse_drafter("lookup", num_speculative_tokens)
    if num_speculative_tokens == 0 and parts != ():
        raise options.CallError(
            "--num-speculative-tokens is 0; it must be from 1 to 32 here: plain decoding is measured in any case"
        )
    for name, value in (("--slots", slots), ("--repeats", repeats), ("--prompts-per-kind", prompts_per_kind)):
        if value is not None and value < 1:
            raise options.CallError(f"{name} is {value}; it must be a whole number of at least 1")

    import specjax
    from specjax.benchmark.cases import SUITES, make_cases, suite_drafters
    from specjax.benchmark.pictures import check_pictures, draw
    from specjax.benchmark.prompts import built_in_prompts, check_turns, conversations, read_prompts, some_of_each
    from specjax.benchmark.run import Plan, run, wrong
    from specjax.benchmark.show import show
    from specjax.checkpoints.load import DTYPES
    from specjax.cli.report import STANDARD_ERROR, print_header

    if suite not in SUITES:
        raise options.CallError(f"--suite is {suite!r}; it must be {' or '.join(SUITES)}")
    sizes = SUITES[suite]
    dtypes = [name.strip() for name in plain_dtypes.split(",")]
    for name in dtypes:
        if name not in DTYPES:
            known = ", ".join(DTYPES)
            raise options.CallError(f"--plain-dtypes is {plain_dtypes!r}; it must be some of {known}, joined by commas")
    temperatures = sizes.temperatures if temperature is None else (temperature,)
    num_tokens = sizes.max_tokens if max_tokens is None else max_tokens
    per_kind = prompts_per_kind if prompts_per_kind is not None or prompts is not None else sizes.per_kind
    try:
        for each in temperatures:
            greedy = specjax.SamplingParams(temperature=each, max_tokens=num_tokens, seed=seed).greedy
            if parts is not None:
                check_drafter(parts, num_speculative_tokens, rule, greedy, allow_lossy)
        found = some_of_each(built_in_prompts() if prompts is None else read_prompts(prompts), per_kind)
        if pictures is not None:
            check_pictures(pictures)
    except ValueError as error:
        raise options.CallError(str(error)) from error

    target = specjax.load_model(model, revision=revision, dtype=dtype)
    print_header(target)
    check_turns(target, found)
    if parts is None:
        drafters, notes = suite_drafters(target, sizes, num_speculative_tokens, rule)
    else:
        made = make_drafter(parts, num_speculative_tokens, dtype, target, rule)
        drafters, notes = {} if made is None else {drafter: made}, []
    # As `specjax generate` does it.
    as_deep_as_pays = ({"auto"} if adaptive is None else set(drafters)) if adaptive is not False else set()
    own = str(target.dtype) if dtype is None else dtype
    asked_slots = sizes.slots if slots is None else (slots,)
    cases, left_out = make_cases(
        drafters, rule, own, dtypes, asked_slots, temperatures, sizes.all_drafters, allow_lossy, as_deep_as_pays
    )
    models = {own: target} | {
        name: specjax.load_model(model, revision=revision, dtype=name) for name in dict.fromkeys(dtypes) if name != own
    }

    def answer(ids):
        params = specjax.SamplingParams(temperature=0.0, max_tokens=num_tokens)
        return specjax.generate(target, [ids], params)[0].text

    asked = conversations(target, found, answer)
    plan = Plan(
        name="built in" if prompts is None else prompts.name,
        prompts=[ids for _, ids in asked],
        kinds=[kind for kind, _ in asked],
        cases=cases,
        max_tokens=num_tokens,
        repeats=sizes.repeats if repeats is None else repeats,
        seed=seed,
        notes=[*notes, *(f"left out: {line}" for line in left_out)],
        allow_lossy=allow_lossy,
    )
    with _steps(plan.num_steps, STANDARD_ERROR) as step:
        document = run(models, plan, step)
    document["environment"]["suite"] = suite
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        from rich.console import Console

        show(document, Console(highlight=False, width=None if sys.stdout.isatty() else WIDE))
    if pictures is not None:
        STANDARD_ERROR.print(f"drawn: {', '.join(map(str, draw(document, pictures)))}", markup=False)
    problems = wrong(document)
    for line in problems:
        STANDARD_ERROR.print(f"WRONG: {line}", markup=False)
    if problems:
        raise typer.Exit(1)


def _steps(total: int, console):
    """A progress bar on a terminal; its value is called with what comes next."""
    import contextlib

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    @contextlib.contextmanager
    def shown():
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=total)

            def step(what):
                bar.advance(task)
                bar.update(task, description=what)

            yield step

    return shown()
