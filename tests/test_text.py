import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.text import REPLACEMENT, IncrementalDecoder

TEXT = "naïve 日本語 👍🏽 → end"


def of_bytes(ids):
    return bytes(ids).decode("utf-8", errors="replace")


def of_words(ids):
    """A space stands between words only, and ids from 100 on are special tokens without text."""
    return " ".join(("the", "cat", "sat", ",")[index] for index in ids if index < 100)


def of_pieces(ids):
    """Pieces carry the space before them; the one at the start of a text is left out, as is every special token."""
    text = "".join((" the", " cat", "s", " ", "  x")[index] for index in ids if index < 100)
    return text[1:] if text.startswith(" ") else text


def of_clean_up(ids):
    """A comma takes the space before it away: earlier text changes with what follows."""
    return of_words(ids).replace(" ,", ",")


def pieces_of(decode, ids, sizes):
    decoder, start, pieces = IncrementalDecoder(decode), 0, []
    for size in sizes:
        pieces.append(decoder.push(ids[start : start + size]))
        start += size
    return [*pieces, decoder.push(ids[start:]), decoder.finish()]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_characters_of_several_tokens_come_whole(size):
    ids = list(TEXT.encode())
    pieces = pieces_of(of_bytes, ids, [size] * (len(ids) // size))
    assert "".join(pieces) == TEXT
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("sizes", [[1, 2], [2, 1], [1, 1, 1], [3]])
def test_a_character_is_held_back_until_it_is_complete(sizes):
    pieces = pieces_of(of_bytes, list("語".encode()), sizes)
    assert pieces == [*[""] * (len(sizes) - 1), "語", "", ""]


def test_an_end_inside_a_character_is_one_replacement_at_the_end():
    pieces = pieces_of(of_bytes, [*b"ok ", *"👍".encode()[:2]], [1] * 5)
    assert "".join(pieces) == "ok " + REPLACEMENT
    assert pieces[-1] == REPLACEMENT


def test_a_broken_character_in_the_middle_is_given_out_with_what_follows():
    assert "".join(pieces_of(of_bytes, [*b"a", 0xE8, *b"bc"], [1] * 4)) == f"a{REPLACEMENT}bc"


def test_a_token_that_reads_differently_behind_another():
    assert of_words([0]) + of_words([1]) == "thecat"
    assert pieces_of(of_words, [0, 1, 2], [1, 1, 1])[:3] == ["the", " cat", " sat"]


def test_a_special_token_without_text_keeps_the_space_behind_it():
    assert of_pieces([0, 100, 100, 1]) == "the cat"
    assert pieces_of(of_pieces, [0, 100, 100, 1], [1] * 4)[:4] == ["the", "", "", " cat"]


def test_text_that_was_given_out_is_never_given_out_again():
    # The comma changes the end of what stands before it; what is new is still added once.
    assert "".join(pieces_of(of_clean_up, [0, 3, 1], [1, 1, 1])) == of_clean_up([0, 3, 1]) == "the, cat"


def test_nothing_at_all():
    decoder = IncrementalDecoder(of_bytes)
    assert (decoder.push([]), decoder.finish(), decoder.finish()) == ("", "", "")


SIZES = st.lists(st.integers(0, 5), max_size=12)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(max_size=12) | st.binary(max_size=12), SIZES)
def test_pieces_of_bytes_join_to_the_whole(text, sizes):
    ids = list(text.encode() if isinstance(text, str) else text)
    pieces = pieces_of(of_bytes, ids, sizes)
    if isinstance(text, str):
        assert "".join(pieces) == text
    else:
        # Any bytes: no character is lost or doubled.
        assert "".join(pieces) == of_bytes(ids)


@pytest.mark.parametrize("decode", [of_words, of_pieces])
@settings(max_examples=300, deadline=None, derandomize=True)
@given(ids=st.lists(st.sampled_from([0, 1, 2, 3, 100]), max_size=12), sizes=SIZES)
def test_pieces_of_words_join_to_the_whole(decode, ids, sizes):
    assert "".join(pieces_of(decode, ids, sizes)) == decode(ids)
