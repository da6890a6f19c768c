"""Options that commands share, and what is wrong with a call; no JAX here."""

import dataclasses
import logging
import sys
from typing import Annotated, Any

import typer

from specjax.cli.compilations import Compilations

MAX_SPECULATIVE_TOKENS = 32


class CallError(typer.TyperException):
    """The call was wrong: exit status 2."""

    exit_code = 2


@dataclasses.dataclass
class Settings:
    """What one run of the program carries beside its command.

    Attributes:
      verbose: whether log messages and the tracebacks of errors are shown.
      compilations: what JAX compiled, where that is to be shown at the end.
    """

    verbose: bool = False
    compilations: Compilations | None = None


def _be_verbose(context: typer.Context, verbose: bool) -> bool:
    settings = context.find_root().obj
    if verbose and not settings.verbose:
        settings.verbose, settings.compilations = True, Compilations()
        settings.compilations.watch()
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    return verbose


Verbose = Annotated[
    bool, typer.Option("--verbose", callback=_be_verbose, help="Show log messages, what was compiled, and tracebacks of errors.")
]
Model = Annotated[
    str,
    typer.Option(
        metavar="MODEL",
        help="Name from `specjax models`, a .gguf file, a folder with config.json and safetensors, or a hub id like org/name.",
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Branch, tag or commit of a hub id; by default the main branch.", show_default=False),
]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="float32, bfloat16, float16 or int8; by default the faster of the first two here."),
]
DrafterName = Annotated[
    str,
    typer.Option(
        "--drafter",
        metavar="NAME",
        help="What proposes tokens: none, lookup (earlier text), draft=MODEL (a smaller model, or a trained folder), medusa or "
        "eagle (trained heads; =FOLDER for your own), or auto: lookup, and behind it the trained head that pays here. "
        "Joined by +, the next is asked where one proposes nothing: lookup+draft=MODEL.",
    ),
]
NumSpeculativeTokens = Annotated[
    int | None,
    typer.Option(metavar="K", help="Draft tokens per round, 0 to 32, of each drafter; by default its own.", show_default=False),
]
Rule = Annotated[str, typer.Option(metavar="NAME", help="Verification rule; auto takes the strongest lossless one.")]
MaxTokens = Annotated[int, typer.Option(metavar="N", help="New tokens at most.")]
Temperature = Annotated[float, typer.Option(metavar="X", help="0 always takes the most likely token.")]
TopP = Annotated[float, typer.Option(metavar="X", help="Keep the most likely tokens up to this probability; 1 keeps all.")]
TopK = Annotated[int, typer.Option(metavar="N", help="Keep this many of the most likely tokens; 0 keeps all.")]
MinP = Annotated[
    float, typer.Option(metavar="X", help="Drop tokens below this share of the most likely one's probability; 0 keeps all.")
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(metavar="X", help="Above 1, tokens of the prompt and the answer so far become less likely; 1 changes nothing."),
]
PresencePenalty = Annotated[
    float, typer.Option(metavar="X", help="Subtracted from the logits of tokens that the answer has, -2 to 2.")
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(metavar="X", help="Subtracted from the logits once for every time that the answer has the token, -2 to 2."),
]
MinTokens = Annotated[int, typer.Option(metavar="N", help="New tokens before the answer may end.")]
Seed = Annotated[
    int | None,
    typer.Option(metavar="N", help="Makes a run repeatable; by default one is drawn and reported.", show_default=False),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="End before this text; may be given several times.", show_default=False),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's own end tokens.")]
Logprobs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Add the log-probability of every token and of the N most likely ones, 0 to 20; needs --json.",
        show_default=False,
    ),
]
NumCompletions = Annotated[
    int, typer.Option("--n", metavar="N", help="Completions of the prompt; more than one need --json, which is then a list.")
]
Slots = Annotated[
    str,
    typer.Option(
        metavar="N", help="Requests that are answered at once; auto takes what memory has room for, 16 at most on a CPU."
    ),
]
DraftLenSchedule = Annotated[
    str | None,
    typer.Option(
        metavar="ROWS:LENGTH,...",
        help="Draft lengths by load: 4:8,16:2 drafts 8 tokens with up to 4 rows being answered, 2 with up to 16, else none.",
    ),
]
Adaptive = Annotated[
    bool | None,
    typer.Option(
        "--adaptive/--no-adaptive",
        help="Draft only as deep as pays, by what rounds cost here and what was accepted lately; by default with --drafter auto.",
        show_default=False,
    ),
]
Capacity = Annotated[
    int | None,
    typer.Option(metavar="N", help="Tokens of a slot, prompt and answer together; by default 1024, or what the model has."),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        metavar="data=N,model=M", help="Devices: rows over N of them, the model over M; by default one.", show_default=False
    ),
]
SplitDraft = Annotated[
    bool,
    typer.Option(
        "--split-draft", help="Split a draft model over the M devices of --mesh as the model is; else each has all of it."
    ),
]
CoordinatorAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Several processes, the same command on every host: where process 0 is, with a free port of it.",
        show_default=False,
    ),
]
NumProcesses = Annotated[int | None, typer.Option(metavar="N", help="How many processes there are.", show_default=False)]
ProcessId = Annotated[int | None, typer.Option(metavar="I", help="Which of them this one is, from 0.", show_default=False)]
Distributed = Annotated[
    bool, typer.Option("--distributed", help="Several processes that find one another: on TPU VMs, under Slurm or Open MPI.")
]
AllowLossy = Annotated[bool, typer.Option("--allow-lossy", help="Allow a rule that changes the distribution of the output.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def sampling_params(context: typer.Context):
    """The :class:`specjax.SamplingParams` of a call: the options of a command that have the name of one of its fields.

    Raises:
      ValueError: a value is out of range.
    """
    import specjax

    given: dict[str, Any] = {field.name: context.params.get(field.name) for field in dataclasses.fields(specjax.SamplingParams)}
    return specjax.SamplingParams(**{name: value for name, value in given.items() if name in context.params})


def join_arguments(
    coordinator_address: str | None, num_processes: int | None, process_id: int | None, distributed: bool, mesh: str | None
) -> dict | None:
    """Arguments of :func:`specjax.parallel.joined`; None where this process is the only one.

    Raises:
      CallError: they do not go together, or are out of range.
    """
    given = {"coordinator_address": coordinator_address, "num_processes": num_processes, "process_id": process_id}
    names = {name: f"--{name.replace('_', '-')}" for name in given}
    there = [names[name] for name, value in given.items() if value is not None]
    if distributed and there:
        raise CallError(f"--distributed finds by itself what {there[0]} says; give one of them")
    if not distributed and not there:
        return None
    missing = [names[name] for name, value in given.items() if value is None]
    if there and missing:
        raise CallError(
            f"{there[0]} is given without {' and '.join(missing)}; several processes need all of {', '.join(names.values())}"
        )
    if coordinator_address is not None and num_processes is not None and process_id is not None:
        host, colon, port = coordinator_address.rpartition(":")
        if not host or not colon or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise CallError(f"--coordinator-address is {coordinator_address!r}; it must be HOST:PORT with a port from 1 to 65535")
        if num_processes < 1:
            raise CallError(f"--num-processes is {num_processes}; it must be a whole number of at least 1")
        if not 0 <= process_id < num_processes:
            raise CallError(
                f"--process-id is {process_id} and --num-processes is {num_processes}; it must be from 0 to {num_processes - 1}"
            )
    if mesh is None:
        raise CallError("--mesh is missing: it says how the devices of all processes work together, such as --mesh data=8")
    return {} if distributed else given


_LENGTH = "--num-speculative-tokens K"
_DRAFT_MODEL = "--drafter draft=MODEL"

# What other programs call it -> what it is called here. Hyphens stand for underscores too.
RENAMED = {
    "draft": _LENGTH,
    "draft-max": _LENGTH,
    "draft-n": _LENGTH,
    "draft-n-max": _LENGTH,
    "gamma": _LENGTH,
    "num-assistant-tokens": _LENGTH,
    "num-draft-tokens": _LENGTH,
    "spec-draft-n-max": _LENGTH,
    "speculative-num-draft-tokens": _LENGTH,
    "speculative-num-steps": _LENGTH,
    "num-speculative-tokens": _LENGTH,
    "prompt-lookup-num-tokens": f"--drafter lookup {_LENGTH}",
    "assistant-model": _DRAFT_MODEL,
    "draft-model": _DRAFT_MODEL,
    "model-draft": _DRAFT_MODEL,
    "spec-draft-model": _DRAFT_MODEL,
    "speculative-draft-model-path": _DRAFT_MODEL,
    "speculative-model": _DRAFT_MODEL,
    "speculative-algorithm": "--drafter NAME",
    "speculative-config": f"--drafter NAME and {_LENGTH}",
    "max-length": "--max-tokens",
    "max-new-tokens": "--max-tokens",
    "n-predict": "--max-tokens",
    "max-tokens": "--max-tokens",
    "temp": "--temperature",
    "top-p": "--top-p",
    "top-k": "--top-k",
    "min-p": "--min-p",
    "repeat-penalty": "--repetition-penalty",
    "repetition-penalty": "--repetition-penalty",
    "presence-penalty": "--presence-penalty",
    "frequency-penalty": "--frequency-penalty",
    "min-length": "--min-tokens",
    "min-new-tokens": "--min-tokens",
    "min-tokens": "--min-tokens",
    "allow-lossy": "--allow-lossy",
    "reverse-prompt": "--stop TEXT",
    "stop-sequence": "--stop TEXT",
    "stop-sequences": "--stop TEXT",
    "stop-strings": "--stop TEXT",
    "ignore-eos": "--ignore-eos",
    "n-probs": "--logprobs N",
    "top-logprobs": "--logprobs N",
    "num-return-sequences": "--n N",
    "parallel": "--slots N",
    "np": "--slots N",
    "max-num-seqs": "--slots N",
    "batch-size": "--slots N",
    "max-model-len": "--capacity N",
    "ctx-size": "--capacity N",
    "tensor-parallel-size": "--mesh model=N",
    "data-parallel-size": "--mesh data=N",
    "tp": "--mesh model=N",
    "draft-tensor-parallel-size": "--mesh model=N --split-draft",
    "speculative-draft-tensor-parallel-size": "--mesh model=N --split-draft",
    "dp": "--mesh data=N",
    "input-file": "specjax batch IN.jsonl OUT.jsonl",
    "output-file": "specjax batch IN.jsonl OUT.jsonl",
}


def suggestion(option: str | None) -> str | None:
    """The message for an option that has another name here, or None.

    Example:
      >>> suggestion("--draft-max")
      'no option --draft-max: here it is --num-speculative-tokens K'
      >>> suggestion("--nonsense") is None
      True
    """
    if option is None:
        return None
    ours = RENAMED.get(option.split("=")[0].lstrip("-").replace("_", "-").lower())
    return None if ours is None else f"no option {option.split('=')[0]}: here it is {ours}"
