"""Prompts of a benchmark: those that come with the library, written for it, or those of a file."""

import dataclasses
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

KINDS = ("chat", "code", "math", "summary", "translation", "extraction")
"""Kinds of the built-in prompts. They differ in how much of an answer stands in its prompt: little in chat, all in extraction."""

NO_KIND = "all"
"""Kind of a prompt whose line names none."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One conversation's user's side.

    Attributes:
      kind: category that results are counted by.
      turns: what the user says, one after the other; at least one.
    """

    kind: str
    turns: tuple[str, ...]


def built_in_prompts() -> list[Prompt]:
    """The prompts that come with the library: 11 of each of the six ``KINDS``.

    Example:
      >>> prompts = built_in_prompts()
      >>> len(prompts), sorted({prompt.kind for prompt in prompts}) == sorted(KINDS)
      (66, True)
    """
    text = resources.files(__package__).joinpath("prompts.jsonl").read_text(encoding="utf-8")
    return _prompts("prompts.jsonl", text)


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of a file of JSON lines, each an object with ``prompt`` (a text) or ``turns`` (a list of texts).

    ``category`` (a text) may stand beside it. Other fields are not looked at: files of prompts carry ids and reference answers.

    Args:
      path: of the file, UTF-8. Empty lines are skipped.

    Raises:
      ValueError: the file cannot be read, holds no prompt, or has a line that is none; names the line.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    return _prompts(path, text)


def _prompts(path, text: str) -> list[Prompt]:
    lines = enumerate(text.splitlines(), 1)
    found = [_prompt(f"{path}, line {number}", line) for number, line in lines if line.strip()]
    if not found:
        raise ValueError(f"{path} holds no prompt; each line is a JSON object with prompt or turns")
    return found


def _prompt(where: str, line: str) -> Prompt:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON: {error}") from None
    if not isinstance(fields, dict) or ("prompt" in fields) == ("turns" in fields):
        has = f"it has {sorted(fields)}" if isinstance(fields, dict) else f"it is {fields!r:.80}"
        raise ValueError(f"{where}: {has}; it must be an object with one of prompt (a text) and turns (a list of texts)")
    name = "prompt" if "prompt" in fields else "turns"
    turns = [fields[name]] if name == "prompt" else fields[name]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where}: {name} is {fields[name]!r:.80}; it must be {_WANTED[name]}, none of them empty")
    kind = fields.get("category", NO_KIND)
    if not isinstance(kind, str) or not kind:
        raise ValueError(f"{where}: category is {kind!r:.80}; it must be a text")
    return Prompt(kind, tuple(turns))


_WANTED = {"prompt": "a text", "turns": "a list of texts"}


def some_of_each(prompts: Sequence[Prompt], most: int | None) -> list[Prompt]:
    """At most ``most`` prompts of each kind, spread evenly over those of the kind; None takes all.

    Example:
      >>> [prompt.kind for prompt in some_of_each(built_in_prompts(), 1)]
      ['chat', 'code', 'math', 'summary', 'translation', 'extraction']
    """
    if most is None:
        return list(prompts)
    by_kind: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_kind.setdefault(prompt.kind, []).append(index)
    taken: set[int] = set()
    for places in by_kind.values():
        count = min(most, len(places))
        taken.update(places[number * len(places) // count] for number in range(count))
    return [prompt for index, prompt in enumerate(prompts) if index in taken]


def is_chat(model) -> bool:
    """Whether a prompt is a user's turn to ``model``: it has a chat template."""
    return bool(getattr(model.tokenizer, "chat_template", None))


def check_turns(model, prompts: Sequence[Prompt]) -> None:
    """Raises ValueError if a prompt has several turns and ``model`` no chat template to tell them apart."""
    if not is_chat(model) and any(len(prompt.turns) > 1 for prompt in prompts):
        raise ValueError(f"model {model.name!r} has no chat template; prompts of several turns need one")


def conversations(model, prompts: Sequence[Prompt], answer) -> list[tuple[str, list[int]]]:
    """(kind, token ids) of every turn, the turns before it answered by ``answer``: every case is asked the very same.

    Args:
      model: whose chat template and tokenizer are used; a model without chat template gets the text as it is.
      prompts: that are to be answered.
      answer: from token ids to a text; called only for turns that another follows.
    """
    check_turns(model, prompts)
    asked = []
    for prompt in prompts:
        if not is_chat(model):
            asked.append((prompt.kind, model.tokenizer.encode(prompt.turns[0])))
            continue
        messages: list[dict] = []
        for place, turn in enumerate(prompt.turns):
            messages.append({"role": "user", "content": turn})
            ids = model.tokenizer.encode_chat(messages)
            asked.append((prompt.kind, ids))
            if place + 1 < len(prompt.turns):
                messages.append({"role": "assistant", "content": answer(ids)})
    return asked
