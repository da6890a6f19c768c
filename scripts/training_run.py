"""What the training scripts share: their options, and the way from a prompt file to a checkpoint with its card.

A script names the function that trains its kind of draft and what only that takes; :func:`run` does the rest.
"""

import argparse
import json
import pathlib
import shlex
import sys
import time
from collections.abc import Callable

import jax
import numpy as np

import specjax
from specjax.checkpoints.heads import load_head, save_head
from specjax.training.answers import write_answers
from specjax.training.loop import TrainingSettings
from specjax.training.losses import LOSSES
from specjax.training.material import Material
from specjax.training.texts import Texts


def run(
    description: str,
    train: Callable,
    kind: str,
    steps: int,
    learning_rate: float,
    own: dict[str, dict],
    check: Callable = lambda model, arguments: None,
) -> None:
    """A whole script.

    Args:
      description: for ``--help``.
      train: a recipe, see :mod:`specjax.training.recipes`.
      kind: of draft, names its checkpoints in the work folder.
      steps: default of ``--steps``.
      learning_rate: likewise.
      own: arguments of ``train`` that no other kind has, each with the settings of its option.
      check: raises ValueError if the arguments do not fit the target, before its answers are made.
    """
    options = parser(description, steps, learning_rate)
    for name, about in own.items():
        options.add_argument("--" + name.replace("_", "-"), **about)
    arguments = options.parse_args()
    start = load_head(arguments.start) if arguments.start else None
    material, command = prepare(arguments, start, check)
    trained, log = train(
        material,
        settings(arguments),
        **{name: getattr(arguments, name) for name in own},
        loss=arguments.loss,
        start=start,
        folder=f"{arguments.work}/{kind}",
        mesh=mesh(),
        progress=say,
    )
    finish(trained, log, arguments, command, start)


def parser(description: str, steps: int, learning_rate: float) -> argparse.ArgumentParser:
    """Options of every training script."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument("--target", default="smollm2-135m-instruct", help="a model's name, a .gguf file or a folder")
    options.add_argument("--prompts", help="JSON lines with a 'prompt' each (or 'turns'); the target answers them first")
    options.add_argument("--texts", nargs="+", default=[], help=".npz files of texts that exist already")
    options.add_argument(
        "--work", required=True, help="folder for texts, states and checkpoints; a run goes on from what is there"
    )
    options.add_argument("--output", required=True, help="new folder for what was trained and its card")
    options.add_argument("--start", help="something trained of the same kind to go on from")
    options.add_argument("--steps", type=int, default=steps)
    options.add_argument("--learning-rate", type=float, default=learning_rate)
    options.add_argument("--loss", default="kl", choices=LOSSES, help="distance from the target's distribution")
    options.add_argument("--tokens-per-batch", type=int, default=2048)
    options.add_argument("--draft-vocab-size", type=int, help="tokens that it can propose, 0: all; what --start has, else 8192")
    options.add_argument("--held-out", type=float, default=0.03, help="share of the prompts that is only evaluated on")
    options.add_argument("--max-tokens", type=int, default=150, help="of the target's answers")
    options.add_argument("--evaluate-every", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--licence", default="Apache-2.0", help="of what was trained, for its card")
    options.add_argument("--data", default="", help="what the texts are and their licences, for the card")
    return options


def settings(arguments) -> TrainingSettings:
    """The training settings of a call."""
    return TrainingSettings(
        num_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        warmup_steps=min(30, arguments.steps // 10),
        evaluate_every=arguments.evaluate_every,
        save_every=arguments.evaluate_every,
        seed=arguments.seed,
    )


def read_prompts(path: str) -> list[str]:
    """The prompts of a file of JSON lines, or the first turns of its conversations."""
    try:
        # Not str.splitlines: a text may hold other line ends than those of its file.
        with open(path, encoding="utf-8") as file:
            return [_first_turn(line, f"{path}: line {number}") for number, line in enumerate(file, 1)]
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"--prompts {path}: {error}") from None


def _first_turn(line: str, where: str) -> str:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise SystemExit(f"{where} is not JSON: {error}") from None
    if isinstance(fields, dict):
        turns = fields.get("turns")
        for text in (fields.get("prompt"), turns[0] if isinstance(turns, list) and turns else None):
            if isinstance(text, str) and text:
                return text
    raise SystemExit(f"{where} has neither 'prompt' nor 'turns' with a text")


def prepare(arguments, start, check: Callable) -> tuple[Material, str]:
    """Material of a call, and the command for the card."""
    if not arguments.prompts and not arguments.texts:
        raise SystemExit("give --prompts, --texts or both")
    if pathlib.Path(arguments.output).exists():
        raise SystemExit(f"--output {arguments.output} exists already; name a new folder")
    prompts = read_prompts(arguments.prompts) if arguments.prompts else []
    model = specjax.load_model(arguments.target, dtype="float32")
    # What would otherwise be refused hours later.
    check(model, arguments)
    vocabulary = {"draft_vocab_size": (8192 if arguments.draft_vocab_size is None else arguments.draft_vocab_size) or None}
    if start is not None:
        start.target.check(model, f"--start {arguments.start}")
        if arguments.draft_vocab_size is not None:
            raise SystemExit(f"--draft-vocab-size is {arguments.draft_vocab_size}; --start {arguments.start} has its own tokens")
        vocabulary = {"draft_ids": start.ids}
    work = pathlib.Path(arguments.work)
    parts = [Texts.load(path) for path in arguments.texts]
    if prompts:
        asked = [model.tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
        said = Clock("answers")
        parts.append(
            write_answers(model, asked, work / "answers", max_tokens=arguments.max_tokens, seed=arguments.seed, progress=said)
        )
    devices = len(jax.devices())
    material = Material.prepare(
        model,
        Texts.join(parts),
        work / "states",
        **vocabulary,
        held_out=arguments.held_out,
        tokens_per_batch=arguments.tokens_per_batch,
        rows_multiple=devices,
        progress=say,
    )
    # No folder of this machine in the card.
    names = [path.name if path.is_absolute() or path.exists() else str(path) for path in map(pathlib.Path, sys.argv)]
    return material, shlex.join(["python", f"scripts/{names[0]}", *names[1:]])


def mesh():
    """All devices as one axis of data; None for a single one."""
    devices = jax.devices()
    return None if len(devices) == 1 else jax.sharding.Mesh(np.array(devices), ("data",))


def finish(trained, log, arguments, command: str, start=None) -> None:
    """Completes the card, writes what was trained and its curves.

    Args:
      trained: what is written.
      log: of the run.
      arguments: of the command line.
      command: for the card.
      start: what training went on from, whose own history is kept; None: nothing.
    """
    history = ("command", "stages", "data", "training_tokens", "started_from")
    about = {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "data": arguments.data,
        "licence": arguments.licence,
        "started_from": None if start is None else {name: start.facts[name] for name in history if name in start.facts},
    }
    trained.facts.update({name: value for name, value in about.items() if value})
    save_head(trained, arguments.output)
    work = pathlib.Path(arguments.work)
    (work / "curves.json").write_text(json.dumps(log, indent=1))
    draw_curves(log, work / "curves.svg")
    say(f"written: {arguments.output}; curves: {work / 'curves.svg'}")


def draw_curves(log: list[dict], path: pathlib.Path) -> None:
    """Loss and acceptance over steps as a picture; said where matplotlib is not there."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        say("no picture of the curves: it needs matplotlib (pip install 'specjax[plots]')")
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    stages = sorted({entry["stage"] for entry in log})
    start = 0
    for stage in stages:
        entries = [entry for entry in log if entry["stage"] == stage]
        steps = [start + entry["step"] for entry in entries]
        for position in range(len(entries[0]["training_loss"])):
            left.plot(steps, [entry["training_loss"][position] for entry in entries], color=f"C{position}")
        # A draft model has one loss and is evaluated at several places.
        for position in range(len(entries[0]["acceptance_by_position"])):
            label = f"token {position + 1}" if stage == stages[-1] else None
            right.plot(steps, [entry["acceptance_by_position"][position] for entry in entries], color=f"C{position}", label=label)
        start = steps[-1]
    left.set(xlabel="step", ylabel="training loss")
    right.set(xlabel="step", ylabel="accepted, held-out texts", ylim=(0, None))
    right.legend()
    figure.savefig(path, metadata={"Date": None})


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)


class Clock:
    """Progress with the time that is left."""

    def __init__(self, name: str):
        self.name, self.start = name, time.perf_counter()

    def __call__(self, done: int, total: int) -> None:
        seconds = time.perf_counter() - self.start
        say(f"{self.name}: {done} of {total}, about {seconds / done * (total - done):.0f} s left")
