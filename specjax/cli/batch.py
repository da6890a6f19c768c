"""``specjax batch``: every line of a file answered, in one job that can be interrupted and goes on."""

import contextlib
import dataclasses
import json
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from specjax.cli import options
from specjax.cli.drafters import check_drafter, check_split_draft, make_drafter, parse_drafter
from specjax.cli.generate import has_chat_template


def batch(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(metavar="IN.jsonl", help="Lines with a prompt or messages, or of the OpenAI batch form.")
    ],
    output: Annotated[
        Path, typer.Argument(metavar="OUT.jsonl", help="A record for every line; the same command goes on with it.")
    ],
    keep_order: Annotated[
        bool, typer.Option("--keep-order", help="Records in the order of the lines, once all are answered; else as they finish.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue a prompt as it is, also with a chat model.")] = False,
    model: options.Model = "smollm2-135m-instruct",
    revision: options.Revision = None,
    dtype: options.Dtype = None,
    drafter: options.DrafterName = "auto",
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    draft_len_schedule: options.DraftLenSchedule = None,
    adaptive: options.Adaptive = None,
    rule: options.Rule = "auto",
    slots: options.Slots = "auto",
    capacity: options.Capacity = None,
    mesh: options.Mesh = None,
    split_draft: options.SplitDraft = False,
    coordinator_address: options.CoordinatorAddress = None,
    num_processes: options.NumProcesses = None,
    process_id: options.ProcessId = None,
    distributed: options.Distributed = False,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    min_tokens: options.MinTokens = 0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    max_logprobs: Annotated[
        int | None,
        typer.Option(metavar="N", help="The most log-probabilities that a line may ask for, 0 to 20; by default none."),
    ] = None,
    allow_lossy: options.AllowLossy = False,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
):
    """Answer every line of a file; interrupted at any moment, the same command goes on where it was.

    Sampling options hold where a line says nothing. With --seed each line's seed is that number plus the line's. Ctrl-C finishes
    what has begun; a second one stops at once, and nothing that was written is lost.

    Over several hosts the same command runs on each, but for --process-id; process 0 alone reads IN.jsonl and writes OUT.jsonl.
    """
    parts = parse_drafter(drafter, num_speculative_tokens)
    num_slots = _slots(slots)
    schedule = None if draft_len_schedule is None else _schedule(draft_len_schedule)
    if adaptive and schedule is not None:
        raise options.CallError("--adaptive stands beside --draft-len-schedule; give one of them")
    join = options.join_arguments(coordinator_address, num_processes, process_id, distributed, mesh)

    import jax
    from rich.console import Console

    import specjax
    from specjax.cli.report import STANDARD_ERROR, print_header
    from specjax.models.dtype import choose_dtype
    from specjax.parallel import ALONE, Processes, joined, make_mesh, parse_mesh
    from specjax.serving.batch_hosts import open_input, open_output
    from specjax.serving.batch_job import run_batch

    try:
        defaults = options.sampling_params(context)
        check_drafter(parts, num_speculative_tokens, rule, False, allow_lossy)
        if split_draft:
            check_split_draft(parts, drafter, mesh)
        sizes = None if mesh is None else parse_mesh(mesh)
    except ValueError as error:
        raise options.CallError(str(error)) from error

    with contextlib.nullcontext() if join is None else joined(**join):
        try:
            devices = None if sizes is None else make_mesh(*sizes)
            processes = ALONE if devices is None else Processes.all_of(devices)
        except ValueError as error:
            raise options.CallError(str(error)) from error
        console = STANDARD_ERROR if processes.first else Console(quiet=True)
        say = console.print
        lines = open_input(processes, source)
        if processes.count > 1:
            # What would be measured here might come out otherwise elsewhere.
            dtype = processes.on_first(lambda: dtype or choose_dtype()[0])[1]
            if drafter == "auto":
                parts = parse_drafter("lookup", num_speculative_tokens)
                say("drafter lookup: what trained heads cost is not measured over several processes; name one to have it")
        if adaptive is None:
            # Over several processes only who asks for it waits for a measurement that all of them take part in.
            adaptive = drafter == "auto" and schedule is None and processes.count == 1
        target = specjax.load_model(model, revision=revision, dtype=dtype, mesh=devices)
        settings = {
            "model": target.name,
            **({} if revision is None else {"revision": revision}),
            "dtype": str(target.dtype),
            "drafter": drafter,
            "num_speculative_tokens": num_speculative_tokens,
            **({} if schedule is None else {"draft_len_schedule": {str(rows): length for rows, length in schedule.items()}}),
            **({"adaptive": True} if adaptive else {}),
            "rule": rule,
            "raw": raw,
            "capacity": capacity,
            "max_logprobs": max_logprobs,
            "sampling": json.loads(json.dumps(dataclasses.asdict(defaults))),
        }
        versions = {"version of specjax": specjax.__version__, "version of jax": jax.__version__}
        devices_hold = {"slots": slots, "mesh": str(sizes), "split_draft": split_draft}
        processes.check_same(settings | versions | devices_hold | {"allow_lossy": allow_lossy})
        made = make_drafter(parts, num_speculative_tokens, dtype, target, rule, devices if split_draft else None)
        print_header(target, console)
        # The engine first: settings that make none must not leave an output behind that belongs to them.
        with (
            specjax.Engine(
                target,
                drafter=made,
                rule=rule,
                slots=num_slots,
                draft_len_schedule=schedule,
                adaptive=adaptive,
                capacity=capacity,
                max_logprobs=max_logprobs,
                allow_lossy=allow_lossy,
                mesh=devices,
            ) as engine,
            contextlib.closing(open_output(processes, output, {"input": lines.digest} | settings, lines, keep_order)) as written,
        ):
            if written.num_answered:
                say(f"{output} has {written.num_answered} of {lines.num_inputs} answers already; going on.", markup=False)
            say(str(engine.memory), markup=False)
            chat = not raw and has_chat_template(target)
            shown = _Display(lines.num_inputs, written.num_answered, console)
            with shown as display, _finish_on_interrupt(STANDARD_ERROR.print) as stopping:
                done = run_batch(engine, lines, written, defaults, chat=chat, progress=display.show, stop=lambda: bool(stopping))
    if as_json and processes.first:
        print(json.dumps(done.to_dict() | {"output": str(output)}))
    _summary(done, output, say)
    if not done.complete:
        raise typer.Exit(130)


def _slots(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise options.CallError(f"--slots is {text}; it must be auto or a whole number of at least 1")
    return int(text)


def _schedule(text: str) -> dict[int, int]:
    pairs = [part.split(":") for part in text.split(",")]
    if not all(len(pair) == 2 and all(number.isdecimal() for number in pair) and int(pair[0]) >= 1 for pair in pairs):
        raise options.CallError(
            f"--draft-len-schedule is {text!r}; it must be numbers of rows, at least 1, and draft lengths, as in 4:8,16:2"
        )
    schedule = {int(rows): int(length) for rows, length in pairs}
    if len(schedule) < len(pairs):
        raise options.CallError(f"--draft-len-schedule is {text!r}; a number of rows is there twice")
    return schedule


def _summary(done, output, say):
    errors = f", {done.num_errors} of them with an error" if done.num_errors else ""
    say(f"{done.num_answered} of {done.num_inputs} lines answered{errors}: {output}", markup=False)
    if done.num_tokens:
        say(
            f"{done.num_tokens} tokens in {done.seconds:.1f} s, {done.num_tokens / done.seconds:.1f} tokens/s, compilation "
            f"included; {done.stats.draft_acceptance_rate:.0%} of the drafted tokens accepted, "
            f"{done.stats.mean_acceptance_length:.2f} tokens per round."
        )
    if not done.complete:
        say("Stopped before the end; the same command goes on.")


@contextlib.contextmanager
def _finish_on_interrupt(say):
    """Yields a list that is no longer empty once somebody pressed Ctrl-C, or the system asked the process to end."""
    asked: list[int] = []

    def ask(signum, frame):
        del frame
        if asked:
            # The second time it is meant.
            raise KeyboardInterrupt
        asked.append(signum)
        say("Finishing what has begun; once more stops at once.")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Display:
    """Progress on standard error: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, total: int, done: int, console):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
            console=console,
            disable=console.quiet or not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("", total=total, completed=done, words="compiling")
        self._say, self._told = console.print, 0.0

    def __enter__(self):
        self._bar.start()
        return self

    def __exit__(self, *_):
        self._bar.stop()

    def show(self, state) -> None:
        """The state of the job."""
        rate = state.num_tokens / state.seconds
        words = f"{rate:.0f} tokens/s, {state.stats.draft_acceptance_rate:.0%} accepted, {state.seconds_left or 0:.0f} s left"
        self._bar.update(self._task, completed=state.num_answered, words=words)
        if self._bar.disable and state.seconds - self._told > 30:
            self._told = state.seconds
            self._say(f"{state.num_answered} of {state.num_inputs}: {words}", markup=False)
