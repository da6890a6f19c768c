"""SentencePiece's vocabularies in GGUF files: tokens with scores."""

import json

import numpy as np
import pytest

from specjax.checkpoints.gguf_file import GGUFFile
from specjax.checkpoints.tokenizer_gguf import read_tokenizer, stop_token_ids
from tests.checkpoints import tiny
from tests.models.test_parity import GOLDEN

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
# Scores fall in the order in which SentencePiece learned the tokens.
MERGED = ["\u2581", "a", "b", "c", "ab", "bc", "\u2581a", "abc", "\u2581ab", "aa"]


def vocabulary(**changes):
    special = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("  ", USER_DEFINED), ("\n\n", USER_DEFINED)]
    special += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    tokens = [*special, *((token, NORMAL) for token in MERGED)]
    keys = {
        "ggml.model": "llama",
        "ggml.tokens": [token for token, _ in tokens],
        "ggml.token_type": [kind for _, kind in tokens],
        "ggml.scores": [0.0] * len(special) + [-float(place) for place in range(len(MERGED))],
        "ggml.unknown_token_id": 0,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.add_space_prefix": False,
    }
    return keys | {key.replace("__", "."): value for key, value in changes.items()}


@pytest.fixture
def from_gguf(tmp_path):
    def read(**changes):
        path = tiny.write_gguf(tmp_path / "tiny.gguf", {"x": np.ones(32, np.float32)}, vocabulary=vocabulary(**changes))
        return read_tokenizer(GGUFFile(path))

    return read


def pieces(tokenizer, text):
    return [tokenizer.vocabulary()[id] for id in tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        # "ab" has the better score, so "bc" never comes about.
        ("abc", ["abc"]),
        ("bbc", ["b", "bc"]),
        ("a ab", ["a", "\u2581ab"]),
        # Of equal neighbours the leftmost pair goes first.
        ("aaa", ["aa", "a"]),
        # What is not in the vocabulary is spelled in bytes, also where it looks like the name of one.
        ("a\u00e9", ["a", "<0xC3>", "<0xA9>"]),
        ("<0x41>", [f"<0x{byte:02X}>" for byte in b"<0x41>"]),
        # Tokens that users defined go before all merges, with spaces as they are written.
        ("a  a", ["a", "  ", "a"]),
        ("a\n\na", ["a", "\n\n", "a"]),
        ("a</s>b", ["a", "</s>", "b"]),
    ],
)
def test_pieces(from_gguf, text, wanted):
    tokenizer = from_gguf()
    assert pieces(tokenizer, text) == wanted
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == f"<s>{text}"


def test_a_space_before_every_text(from_gguf):
    """The usual case: a text begins as a word inside a text does, and decoding takes the space away again."""
    tokenizer = from_gguf(ggml__add_space_prefix=None)
    assert pieces(tokenizer, "ab") == ["\u2581ab"]
    assert pieces(tokenizer, " ab") == ["\u2581", "\u2581ab"]
    assert tokenizer.decode(tokenizer.encode("ab c")) == "ab c"


def test_token_bytes(from_gguf):
    tokenizer = from_gguf()
    spelled = tokenizer.token_bytes()
    assert b"".join(spelled[id] for id in tokenizer.encode("a \u00e9  b", add_special_tokens=False)) == "a \u00e9  b".encode()
    assert spelled[1] is None


def test_special_tokens(from_gguf):
    tokenizer = from_gguf()
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    # The usual default of this kind of vocabulary.
    assert tokenizer.encode("a")[0] == 1
    assert from_gguf(ggml__add_bos_token=False).encode("a")[0] != 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ggml__scores": None}, "tokenizer.ggml.scores is missing; there are 271 tokens"),
        ({"ggml__scores": [0.0]}, "tokenizer.ggml.scores is 1 entries; there are 271 tokens"),
        ({"ggml__pre": "qwen2"}, "tokenizer.ggml.pre is 'qwen2'; supported for tokenizer.ggml.model 'llama': 'default'"),
        ({"ggml__remove_extra_whitespaces": True}, "remove_extra_whitespaces is True; supported for .*: False"),
    ],
)
def test_what_cannot_be_honoured(from_gguf, changes, match):
    with pytest.raises(ValueError, match=match):
        from_gguf(**changes)


def test_gemma(gemma_path):
    """Equal to SentencePiece itself on hard texts."""
    file = GGUFFile(gemma_path)
    tokenizer = read_tokenizer(file)
    for entry in json.loads((GOLDEN / "gemma-3-270m-tokenizer.json").read_text())["texts"]:
        ids = tokenizer.encode(entry["text"])
        assert ids == [2, *entry["ids"]], entry["text"]
        assert tokenizer.decode(ids) == entry["text"]
    assert stop_token_ids(file) == (1, 106)
