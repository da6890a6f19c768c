"""The tokenizer of a folder: tokenizer.json and what stands beside it."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from specjax.checkpoints.tokenizer import Tokenizer, surround

# Vocabularies in other forms; a folder that has only these holds a tokenizer that would be lost silently.
OTHER_FORMS = ("tokenizer.model", "vocab.json", "spiece.model", "tekken.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
      ValueError: the file is missing, or no valid JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: truncated or damaged JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds {type(value).__name__}; it must be an object")
    return value


def read_tokenizer(folder: str | Path) -> Tokenizer | None:
    """The tokenizer of a folder; None where the folder has none in any form.

    tokenizer_config.json and special_tokens_map.json say which tokens begin and end a text; the chat template lies in
    chat_template.jinja or in tokenizer_config.json.

    Raises:
      ValueError: only a form other than tokenizer.json, a damaged file, or tokens that contradict one another.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.exists():
        for name in OTHER_FORMS:
            if (folder / name).exists():
                raise ValueError(f"{folder}: has {name} but no tokenizer.json, the only form that can be read")
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    # The library raises plain Exception.
    except Exception as error:
        raise ValueError(f"{path}: truncated or damaged tokenizer: {error}") from None
    options = _optional(folder / "tokenizer_config.json")
    _add_missing(folder, backend, options)
    named = _optional(folder / "special_tokens_map.json")
    named |= {key: value for key, value in options.items() if value is not None}
    special = {key: text for key in named if key.endswith("_token") and (text := _text(named[key])) is not None}
    bos, eos = special.pop("bos_token", None), special.pop("eos_token", None)
    if options.get("add_bos_token") is not None or options.get("add_eos_token") is not None:
        wanted = {}
        for key, token in (("bos", bos), ("eos", eos)):
            wanted[key] = token if options.get(f"add_{key}_token") else None
            if options.get(f"add_{key}_token") and token is None:
                raise ValueError(f"{folder / 'tokenizer_config.json'}: add_{key}_token is true, but there is no {key}_token")
        surround(backend, wanted["bos"], wanted["eos"])
    try:
        return Tokenizer(backend, bos, eos, _chat_template(folder, options), special)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _text(token: Any) -> str | None:
    """A token is written as text or as an object with its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _add_missing(folder: Path, backend: tokenizers.Tokenizer, options: dict[str, Any]) -> None:
    """Adds tokens that tokenizer_config.json lists and tokenizer.json does not have."""
    listed = options.get("added_tokens_decoder") or {}
    for id, token in sorted((int(id), token) for id, token in listed.items()):
        content = token["content"]
        if backend.token_to_id(content) is None:
            flags = ("lstrip", "rstrip", "normalized", "single_word", "special")
            backend.add_tokens([AddedToken(content, **{flag: token[flag] for flag in flags if flag in token})])
        if (ours := backend.token_to_id(content)) != id:
            raise ValueError(f"{folder / 'tokenizer_config.json'}: token {content!r} has id {id}; in tokenizer.json it is {ours}")


def _chat_template(folder: Path, options: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = options.get("chat_template")
    # Several templates: the default one is for conversations without tools.
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        if "default" not in named:
            where = folder / "tokenizer_config.json"
            raise ValueError(f"{where}: chat_template has {sorted(named)}; one must be called 'default'")
        template = named["default"]
    return template
