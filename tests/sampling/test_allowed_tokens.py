import json
import re
import string
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from specjax.checkpoints.tokenizer import Tokenizer
from specjax.sampling import AllowedTokens, PathDistribution, SamplingArrays, SamplingParams, tree_paths
from specjax.sampling.allowed_tokens import advance
from specjax.tree import DraftTree

# After the start 0 or 1; behind a 0 only 1s, and the end 2; behind a 1 only the end.
TABLE = AllowedTokens([[1, 2, -1, -1], [-1, 1, 3, -1], [-1, -1, 3, -1], [-1, -1, 3, -1]])


def probabilities(states, paths, tree, width=6, vocab_size=5, **settings):
    """[B, T, width] of equal logits behind rows in these states."""
    batch, none = len(states), jnp.zeros((len(states),), jnp.int32)
    behind = PathDistribution.create(
        SamplingArrays.stack([SamplingParams(**settings)] * batch, [0] * batch),
        jnp.zeros((batch, 4), jnp.int32), none + 1, none + 1, jnp.full((batch, 1), 2), vocab_size,
        width=width, states=jnp.asarray(states, jnp.int32), next_state=TABLE.next_state,
    )  # fmt: skip
    logits = jnp.zeros((batch, tree.size, width))
    return np.exp(behind.log_probs(logits, *tree_paths(tree, jnp.asarray(paths, jnp.int32))))


def test_every_node_is_in_the_state_of_its_own_path():
    tree = DraftTree((-1, 0, 0, 1))
    probs = probabilities([0, 1], [[0, 1, 1], [1, 2, 2]], tree)
    allowed = [[set(np.flatnonzero(node).tolist()) for node in row] for row in probs]
    assert allowed[0] == [{0, 1}, {1, 2}, {2}, {1, 2}]
    assert allowed[1] == [{1, 2}, {1, 2}, {2}, {2}]


def test_behind_a_forbidden_token_stands_a_distribution():
    """Nothing is looked at there; but a NaN would spread."""
    probs = probabilities([0], [[3, 0]], DraftTree.chain(2))
    np.testing.assert_allclose(probs[0, 1], [0.2] * 5 + [0], rtol=1e-6)


def test_a_minimum_length_that_the_grammar_does_not_allow_is_nan():
    assert np.isnan(probabilities([2], np.zeros((1, 0)), DraftTree.chain(0), min_tokens=4)).all()


def test_states_of_committed_text():
    tokens = jnp.asarray([[0, 1, 1, 2], [0, 1, 1, 2], [1, 0, 2, 2], [5, 0, 0, 0]])
    start = jnp.zeros((4,), jnp.int32)
    assert advance(TABLE.next_state, start, tokens, jnp.asarray([0, 4, 2, 1])).tolist() == [0, 3, -1, -1]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([1, 2], r"next_state is int64\[2\]; it must be integers \[states, vocabulary\]"),
        ([[0.0, 1.0]], r"next_state is float64\[1, 2\]"),
        (np.zeros((0, 3), int), r"next_state is int64\[0, 3\]"),
        ([[0, 1]], r"next_state\[0, 1\] is 1; it must be from 0 to 0, or -1"),
        ([[0, -2]], r"next_state\[0, 1\] is -2"),
        ([[1, 0], [-1, -1]], r"state 1 can be reached and allows no token"),
        ([[-1, -1]], r"state 0 can be reached and allows no token"),
    ],
)
def test_wrong_tables(table, message):
    with pytest.raises(ValueError, match=f"AllowedTokens: {message}"):
        AllowedTokens(table)


def test_a_state_that_cannot_be_reached_may_allow_nothing():
    assert AllowedTokens([[0, 0], [-1, -1]]).num_states == 2


def test_tables_of_few_sizes():
    """A grammar with some states more is no reason to compile again."""
    assert [AllowedTokens(np.zeros((n, 2), int)).next_state.shape[0] for n in (1, 8, 9, 64, 65, 129)] == [8, 8, 16, 64, 128, 192]


def words(*tokens):
    """A tokenizer of these tokens, an unknown and an end token."""
    spelled = ["<unk>", "</s>", *tokens]
    backend = tokenizers.Tokenizer(models.WordLevel({token: id for id, token in enumerate(spelled)}, unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer(backend, eos_token="</s>")


def texts(allowed, tokenizer, longest):
    """All texts that end within ``longest`` tokens."""
    found, table = set(), np.asarray(allowed.next_state)

    def go(state, text, left):
        for id in np.flatnonzero(table[state] >= 0).tolist():
            if id == tokenizer.eos_token_id:
                found.add(text)
            elif left:
                go(int(table[state, id]), text + tokenizer.vocabulary()[id], left - 1)

    go(0, "", longest)
    return found


def test_regular_expressions():
    tokenizer = words("a", "b", "ab", "c")
    allowed = AllowedTokens.from_regex("(ab)*c?", tokenizer)
    assert texts(allowed, tokenizer, 3) == {"", "ab", "abab", "ababab", "c", "abc", "ababc"}


def test_nothing_leads_nowhere():
    """x could be followed by a y only, for which there is no token."""
    tokenizer = words("a", "b")
    allowed = AllowedTokens.from_regex("a(b|[^b])b", words("a", "b", "é"))
    assert texts(allowed, words("a", "b", "é"), 3) == {"abb", "aab", "aéb"}
    assert texts(AllowedTokens.from_regex("b|a", tokenizer), tokenizer, 2) == {"a", "b"}


def test_characters_over_several_tokens():
    """Byte-level vocabularies: é is two tokens, and a leading space has a letter of its own."""
    letters = {"Ã": 0, "©": 1, "a": 2, "Ġa": 3, "<end>": 4}
    backend = tokenizers.Tokenizer(models.BPE(letters, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    tokenizer = Tokenizer(backend, eos_token="<end>")
    assert tokenizer.token_bytes() == [b"\xc3", b"\xa9", b"a", b" a", None]
    allowed = AllowedTokens.from_regex("é a|a", tokenizer)
    assert [allowed.accepts(ids) for ids in ([0, 1, 3, 4], [2, 4], [0, 3], [3], [0, 1, 4], [4])] == [True, True] + [False] * 4


def test_bytes_of_a_vocabulary_with_fallback():
    names = {"<unk>": 0, "</s>": 1, "▁a": 2, "<0xC3>": 3, "b": 4}
    backend = tokenizers.Tokenizer(models.BPE(names, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "</s>"])
    assert Tokenizer(backend).token_bytes() == [None, None, b" a", b"\xc3", b"b"]


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
}


def test_documents_of_a_schema():
    tokenizer = words(*string.printable[:95], "true", '{"n"')
    allowed = AllowedTokens.from_json_schema(SCHEMA, tokenizer)
    assert allowed.next_state.shape[1] == tokenizer.size
    ids = {token: id for id, token in enumerate(tokenizer.vocabulary())}
    good = [ids[token] for token in ['{"n"', *': -12, "ok": ', "true", "}", "</s>"]]
    assert allowed.accepts(good)
    assert not allowed.accepts(good[:-2] + good[-1:])
    assert not allowed.accepts([ids[token] for token in '{"n": a'])
    # Whatever is allowed step by step is a document in the end.
    random, table = np.random.default_rng(0), np.asarray(allowed.next_state)
    state, text = 0, ""
    while True:
        choices = np.flatnonzero(table[state] >= 0)
        id = int(choices[-1] if len(text) > 40 else random.choice(choices))
        state = int(table[state, id])
        if id == tokenizer.eos_token_id:
            break
        text += tokenizer.vocabulary()[id]
    assert set(json.loads(text)) == {"n", "ok"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AllowedTokens.from_regex("(", words("a")), r"pattern is '\('; Failed"),
        (lambda: AllowedTokens.from_regex("b", words("a")), "pattern is 'b'; .*missing tokens"),
        (lambda: AllowedTokens.from_regex("a", words("a"), ()), "end_token_ids is empty"),
        (lambda: AllowedTokens.from_regex("a", words("a"), (9,)), r"end_token_ids is \(9,\); ids .* are from 0 to 2"),
        (lambda: AllowedTokens.from_json_schema({"type": "nope"}, words("a")), "schema is .*nope.*; Unsupported type"),
        (lambda: AllowedTokens.from_json_schema("{", words("a")), "schema is {;"),
    ],
)  # fmt: skip
def test_wrong_patterns(make, message):
    with pytest.raises(ValueError, match=f"AllowedTokens: {message}"):
        make()


def test_a_missing_extra_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'specjax[grammar]'")):
        AllowedTokens.from_regex("a", words("a"))
