"""The tokenizer inside a GGUF file.

A file carries vocabulary, merges and the *name* of how text is cut before merging (``tokenizer.ggml.pre``). What the names
stand for is written down here from the models' own tokenizer.json files. llama.cpp's cutting, which the names were made for,
differs in details (it does not normalise for qwen2); what the model was trained with decides.
"""

import dataclasses
import enum
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import models as tokenizer_models

from specjax.checkpoints.gguf_file import GGUFFile
from specjax.checkpoints.tokenizer import Tokenizer, surround
from specjax.checkpoints.tokenizer_scores import backend_of_scores


class TokenKind(enum.IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# {digits} is how many digits stay together.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before merging.

    Attributes:
      pattern: cuts out each match; None: by GPT-2's expression.
      digits_apart: every digit is a piece of its own, before all else.
      normalise: compose characters first (NFC).
      ignore_merges: a piece that is a token is taken whole, whatever the merges say.
      add_bos: whether a beginning-of-sequence token is wanted where the file does not say.
    """

    pattern: str | None = None
    digits_apart: bool = False
    normalise: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits_apart=True),
    "qwen2": PreTokenizer(pattern=WORDS.replace("{digits}", ""), normalise=True),
    "llama-bpe": PreTokenizer(pattern=WORDS.replace("{digits}", "{1,3}"), ignore_merges=True, add_bos=True),
}
# Names of one and the same cutting.
ALIASES = {"gpt2": "gpt-2", "llama3": "llama-bpe", "llama-v3": "llama-bpe"}

# Tokens that end a turn or a text in published models. Files name one or two of theirs by key; a model may use others.
END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "</s>")
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def read_tokenizer(file: GGUFFile) -> Tokenizer | None:
    """The tokenizer of a GGUF file; None where the file has none.

    Raises:
      ValueError: a kind of vocabulary or a pre-tokenizer that is not known, or a damaged vocabulary.
    """
    found = file.metadata
    kind = found.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model is {kind!r}; supported: 'gpt2' (byte-level), 'llama' (SentencePiece)"
        )
    tokens, kinds = _vocabulary(file)
    if kind == "gpt2":
        pre = _pre_tokenizer(file)
        backend, add_bos = _backend(file, pre, tokens, kinds), pre.add_bos
    else:
        backend, add_bos = _backend_of_scores(file, tokens, kinds), True
    special = {
        key: tokens[id]
        for key, id in (
            (key, found.get(f"tokenizer.ggml.{stem}_token_id"))
            for key, stem in (
                ("bos_token", "bos"),
                ("eos_token", "eos"),
                ("unk_token", "unknown"),
                ("pad_token", "padding"),
            )
        )
        if id is not None and _known_id(file, key, id, kinds)
    }
    bos, eos = special.pop("bos_token", None), special.pop("eos_token", None)
    wanted = {}
    for key, token, default in (("bos", bos, add_bos), ("eos", eos, False)):
        wanted[key] = bool(found.get(f"tokenizer.ggml.add_{key}_token", default))
        if wanted[key] and token is None:
            raise ValueError(f"{file.path}: tokenizer.ggml.add_{key}_token is set, but there is no {key}_token_id")
    surround(backend, bos if wanted["bos"] else None, eos if wanted["eos"] else None)
    return Tokenizer(backend, bos, eos, found.get("tokenizer.chat_template"), special)


def stop_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Ids that end a generation: those that the file names by key, then control tokens that published models end with."""
    tokens, kinds = _vocabulary(file)
    ids = [file.metadata[key] for key in END_KEYS if _known_id(file, key, file.metadata.get(key), kinds)]
    control = {tokens[id]: id for id, kind in enumerate(kinds) if kind == TokenKind.CONTROL}
    return tuple(dict.fromkeys([*ids, *(control[token] for token in END_TOKENS if token in control)]))


def _known_id(file, key, id, kinds) -> bool:
    if id is None:
        return False
    if not 0 <= id < len(kinds) or kinds[id] == TokenKind.UNUSED:
        raise ValueError(f"{file.path}: the id of {key} is {id}, which the vocabulary of {len(kinds)} ids does not have")
    return True


def _vocabulary(file: GGUFFile) -> tuple[list[str], list[int]]:
    """Tokens and their kinds by id."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError(f"{file.path}: tokenizer.ggml.tokens is missing or empty")
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [TokenKind.NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ValueError(f"{file.path}: tokenizer.ggml.token_type has {len(kinds)} entries, there are {len(tokens)} tokens")
    return tokens, kinds


def _pre_tokenizer(file: GGUFFile) -> PreTokenizer:
    name: Any = file.metadata.get("tokenizer.ggml.pre")
    pre = PRE_TOKENIZERS.get(ALIASES.get(name, name))
    if pre is None:
        raise ValueError(
            f"{file.path}: tokenizer.ggml.pre is {name!r}; known are {', '.join(sorted({*PRE_TOKENIZERS, *ALIASES}))}, "
            "and a wrong one would give wrong ids"
        )
    return pre


def _used(file: GGUFFile, tokens, kinds) -> dict[str, int]:
    """Token to id. Unused ids pad the embedding; the model's own tokenizer does not know them."""
    vocabulary: dict[str, int] = {}
    for id, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind != TokenKind.UNUSED and vocabulary.setdefault(token, id) != id:
            raise ValueError(f"{file.path}: token {token!r} stands twice in the vocabulary, at ids {vocabulary[token]} and {id}")
    return vocabulary


def _added(vocabulary: dict[str, int], kinds) -> list[AddedToken]:
    """Tokens that are looked for in a text before anything else."""
    added = (TokenKind.CONTROL, TokenKind.USER_DEFINED)
    return [
        AddedToken(token, special=kinds[id] == TokenKind.CONTROL, normalized=False)
        for token, id in vocabulary.items()
        if kinds[id] in added
    ]


def _backend_of_scores(file: GGUFFile, tokens, kinds) -> tokenizers.Tokenizer:
    found = file.metadata
    for key, neutral in (
        ("pre", (None, "default")),
        ("remove_extra_whitespaces", (None, False)),
        ("precompiled_charsmap", (None,)),
    ):
        value = found.get(f"tokenizer.ggml.{key}")
        if value not in neutral:
            raise ValueError(
                f"{file.path}: tokenizer.ggml.{key} is {value!r:.80}; supported for tokenizer.ggml.model 'llama': {neutral[-1]!r}"
            )
    scores = found.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        count = "missing" if scores is None else f"{len(scores)} entries"
        raise ValueError(f"{file.path}: tokenizer.ggml.scores is {count}; there are {len(tokens)} tokens")
    vocabulary = _used(file, tokens, kinds)
    merged = {token: scores[id] for token, id in vocabulary.items() if kinds[id] == TokenKind.NORMAL}
    unknown = found.get("tokenizer.ggml.unknown_token_id")
    unknown = tokens[unknown] if _known_id(file, "unknown_token_id", unknown, kinds) else None
    space_before = bool(found.get("tokenizer.ggml.add_space_prefix", True))
    return backend_of_scores(vocabulary, merged, unknown, space_before, _added(vocabulary, kinds))


def _backend(file: GGUFFile, pre: PreTokenizer, tokens, kinds) -> tokenizers.Tokenizer:
    vocabulary = _used(file, tokens, kinds)
    merges = file.metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise ValueError(f"{file.path}: tokenizer.ggml.merges is missing")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for index, pair in enumerate(pairs):
        where = f"{file.path}: tokenizer.ggml.merges[{index}] is {merges[index]!r}"
        if len(pair) != 2:
            raise ValueError(f"{where}; it must be two tokens and a space")
        for token in (*pair, "".join(pair)):
            if token not in vocabulary:
                raise ValueError(f"{where}; {token!r} is not in the vocabulary")
    backend = tokenizers.Tokenizer(tokenizer_models.BPE(vocabulary, pairs, ignore_merges=pre.ignore_merges))
    if pre.normalise:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if pre.digits_apart:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(_added(vocabulary, kinds))
    return backend
