"""``--drafter``: what its names mean, and how they are put together.

A new drafter is a line of ``DRAFTERS`` and a function that makes it.
"""

import dataclasses
import re
from collections.abc import Callable

from specjax.cli.options import MAX_SPECULATIVE_TOKENS, CallError


@dataclasses.dataclass(frozen=True)
class Kind:
    """One name that ``--drafter`` takes.

    Attributes:
      make: from the text behind "=" (None without), K (None if it was not given), the dtype asked for, the target and the mesh
        over which draft models are split (None: they are not) to the drafter.
      shape: from the text behind "=" to a tree such as it proposes, and the laws that it can draw by, known before a model is
        loaded. Imports JAX.
      argument: what stands behind "=", "" for nothing.
      needs_argument: whether it must be given.
      may_lack: whether it may propose nothing, so that another drafter can stand behind it.
    """

    make: Callable
    shape: Callable
    argument: str = ""
    needs_argument: bool = True
    may_lack: bool = False


def _lookup(argument, length, dtype, target, mesh):
    from specjax.drafters import prompt_lookup

    del argument, dtype, target, mesh
    return prompt_lookup(**_given(length))


def _lookup_shape(argument):
    from specjax.drafters import PromptLookup
    from specjax.tree import DraftTree

    del argument
    return DraftTree.chain(1), PromptLookup.law_choices


def _draft(argument, length, dtype, target, mesh):
    from specjax import in_vocabulary_of, load_model
    from specjax.checkpoints.common_tokens import same_tokens
    from specjax.checkpoints.heads import load_head
    from specjax.cli.report import STANDARD_ERROR
    from specjax.drafters import draft_model

    split = mesh is not None
    if _is_trained(argument):
        return draft_model(load_head(argument), split=split, **_given(length))
    model = load_model(argument, dtype=dtype, mesh=mesh)
    if not same_tokens(target, model):
        name = model.name
        model, common = in_vocabulary_of(target, model)
        STANDARD_ERROR.print(f"draft {name}: {common}", markup=False)
    return draft_model(model, split=split, **_given(length))


def _draft_shape(argument):
    from specjax.drafters import DraftModel
    from specjax.tree import DraftTree

    shape = DraftTree.chain(1), DraftModel.law_choices
    if not _is_trained(argument):
        return shape
    tree, laws = _trained_shape("draft", argument)
    return shape if tree.is_chain else (tree, laws)


def _is_trained(argument):
    """Whether a name or folder is that of something trained for a target, of any kind, and not of a model."""
    from pathlib import Path

    from specjax.checkpoints.heads import CARD, shipped_heads

    return argument in shipped_heads() or (Path(argument).expanduser() / CARD).exists()


def _trained_shape(kind, argument):
    from specjax.checkpoints.heads import read_card
    from specjax.drafters.tree_drafting import LAWS
    from specjax.tree import DraftTree

    card = read_card(argument)
    if card["kind"] != kind:
        raise ValueError(f"{argument} was trained as {card['kind']}: --drafter {card['kind']}={argument}")
    tree = card["tree"]
    return DraftTree.chain(1) if tree is None else DraftTree(tuple(tree)), LAWS


def _head(kind):
    def make(argument, length, dtype, target, mesh):
        from specjax import drafters
        from specjax.checkpoints.heads import find_head, load_head
        from specjax.checkpoints.medusa_files import load_medusa

        del dtype, mesh
        if argument is None:
            head = find_head(kind, target)
        elif _is_public(kind, argument):
            head = load_medusa(argument, target)
        else:
            head = load_head(argument)
        return getattr(drafters, kind)(head, **_given(length))

    return make


def _head_shape(kind):
    def shape(argument):
        from specjax.drafters.tree_drafting import LAWS
        from specjax.tree import DraftTree

        if argument is None or _is_public(kind, argument):
            return DraftTree.chain(1), LAWS
        return _trained_shape(kind, argument)

    return shape


def _is_public(kind, argument):
    """Whether a folder is a public checkpoint of Medusa heads."""
    from pathlib import Path

    return kind == "medusa" and Path(argument).is_dir() and not _is_trained(argument)


def _given(length):
    return {} if length is None else {"num_speculative_tokens": length}


DRAFTERS = {
    "lookup": Kind(_lookup, _lookup_shape, may_lack=True),
    "draft": Kind(_draft, _draft_shape, argument="MODEL"),
    "medusa": Kind(_head("medusa"), _head_shape("medusa"), argument="FOLDER", needs_argument=False),
    "eagle": Kind(_head("eagle"), _head_shape("eagle"), argument="FOLDER", needs_argument=False),
}
"""What proposes tokens, by name; beside these there are none and auto."""

AUTO = "auto"
"""Prompt lookup, and behind it the trained head that pays on this machine, if one does."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One drafter of a call.

    Attributes:
      name: key of ``DRAFTERS``.
      argument: the text behind "=", or None.
    """

    name: str
    argument: str | None = None


def parse_drafter(text: str, num_speculative_tokens: int | None) -> tuple[Part, ...]:
    """What ``--drafter`` asks for: nothing, one drafter, or several stacked, asked in this order.

    Args:
      text: as it was given.
      num_speculative_tokens: K, if it was given.

    Raises:
      CallError: the length is out of range, or the text names no drafter, a stack that makes no sense, or one that contradicts
        ``num_speculative_tokens``.

    Example:
      >>> parse_drafter("lookup+draft=small+better.gguf", 4)
      (Part(name='lookup', argument=None), Part(name='draft', argument='small+better.gguf'))
      >>> parse_drafter("auto", None), parse_drafter("none", None)
      ((Part(name='auto', argument=None),), ())
    """
    length = num_speculative_tokens
    if length is not None and not 0 <= length <= MAX_SPECULATIVE_TOKENS:
        raise CallError(f"--num-speculative-tokens is {length}; it must be from 0 to {MAX_SPECULATIVE_TOKENS}")
    if text == "none":
        if length:
            raise CallError(f"--drafter none drafts nothing, so --num-speculative-tokens must be 0 or left out; it is {length}")
        return ()
    if text == "auto":
        return (Part(AUTO),)
    # A path may have a + too: only one before the name of a drafter separates.
    names = "|".join((*DRAFTERS, "none", "auto"))
    parts = [_part(part, text) for part in re.split(rf"\+(?=(?:{names})(?:=|\+|$))", text)]
    for place, part in enumerate(parts[:-1]):
        if part in parts[:place]:
            raise CallError(f"--drafter {text}: {part.name} is there twice; where it proposes nothing once, it does so again")
        if not DRAFTERS[part.name].may_lack:
            silent = ", ".join(name for name, kind in DRAFTERS.items() if kind.may_lack)
            raise CallError(
                f"--drafter {text}: {part.name} always proposes something, so what stands behind it would never be asked; put it "
                f"last ({silent} can come first)"
            )
    if parts[-1] in parts[:-1]:
        raise CallError(f"--drafter {text}: {parts[-1].name} is there twice; where it proposes nothing once, it does so again")
    return tuple(parts)


def _part(text: str, whole: str) -> Part:
    name, equals, argument = text.partition("=")
    if name in ("none", "auto") and not equals:
        raise CallError(f"--drafter {whole}: {name} stands alone; it cannot be stacked")
    kind = DRAFTERS.get(name)
    if kind is not None and kind.argument and not argument and (kind.needs_argument or equals):
        raise CallError(f"--drafter {whole}: {name} is incomplete: --drafter {name}={kind.argument}")
    if kind is None or (equals and not kind.argument):
        raise CallError(f"--drafter is {whole!r}; it must be {known_names()}, or several joined by +, such as lookup+draft=MODEL")
    return Part(name, argument or None)


def known_names() -> str:
    """The names as a sentence has them.

    Example:
      >>> known_names()
      'none, lookup, draft=MODEL, medusa[=FOLDER], eagle[=FOLDER] or auto'
    """
    names = ["none"]
    for name, kind in DRAFTERS.items():
        behind = f"={kind.argument}" if kind.argument else ""
        names.append(name + (behind if kind.needs_argument or not behind else f"[{behind}]"))
    return ", ".join(names) + " or auto"


def check_drafter(
    parts: tuple[Part, ...], num_speculative_tokens: int | None, rule: str, greedy: bool, allow_lossy: bool
) -> None:
    """Raises ValueError if ``rule`` does not fit these drafters, before a model is loaded."""
    from specjax.tree import DraftTree
    from specjax.verification import choose_rule

    # Of a stack the last decides: what others propose takes its laws.
    shapes = [_lookup_shape(None) if part.name == AUTO else DRAFTERS[part.name].shape(part.argument) for part in parts]
    tree, laws = shapes[-1] if parts else (DraftTree.chain(0), ())
    if num_speculative_tokens is not None:
        # Whoever asks for a length gets a chain, whatever the drafter proposes by itself.
        tree = DraftTree.chain(num_speculative_tokens)
    choose_rule(rule, tree, laws, greedy, allow_lossy)


def check_split_draft(parts: tuple[Part, ...], text: str, mesh: str | None) -> None:
    """Raises CallError if ``--split-draft`` asks for nothing that can be done, before a model is loaded.

    Args:
      parts: the drafters.
      text: how they were asked for.
      mesh: as it was given.
    """
    models = [part.argument for part in parts if part.name == "draft"]
    if not models:
        raise CallError(f"--split-draft is given, and --drafter {text} has no draft model to split; it must have draft=MODEL")
    if mesh is None:
        raise CallError(
            "--split-draft is given without --mesh, whose devices the draft model is split over; --mesh model=2 is one"
        )
    for argument in filter(_is_trained, models):
        raise CallError(
            f"--split-draft is given, and {argument} was distilled from the target, whose embedding and output matrix it shares: "
            "every device of a mesh has the whole of such a draft; leave --split-draft out"
        )


def _auto(length, target, rule):
    from specjax.checkpoints.heads import heads_of
    from specjax.cli.report import STANDARD_ERROR
    from specjax.decoding.auto import choose_drafter, measure_costs

    heads = heads_of(target)
    if length is not None or not heads:
        return _lookup(None, length, None, target, None)
    # Which trees a rule takes is known; that of auto takes all.
    drafter, reason = choose_drafter(target, heads, measure_costs(target), chains_only=rule != "auto")
    STANDARD_ERROR.print(f"drafter {drafter.name}: {reason}", markup=False)
    return drafter


def make_drafter(
    parts: tuple[Part, ...], num_speculative_tokens: int | None, dtype: str | None, target, rule: str = "auto", split_over=None
):
    """The drafter for the model ``target``, its own models loaded; None for none. K holds for every part.

    Draft models are split over the mesh ``split_over``; None: they are not.
    """
    from specjax.drafters import stacked

    if parts == (Part(AUTO),):
        return _auto(num_speculative_tokens, target, rule)

    made = [DRAFTERS[part.name].make(part.argument, num_speculative_tokens, dtype, target, split_over) for part in parts]
    drafter = made.pop() if made else None
    while made:
        drafter = stacked(made.pop(), drafter)
    return drafter
