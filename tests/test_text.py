import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.text import REPLACEMENT, CompletionText, IncrementalDecoder

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


def test_what_stands_before_an_unfinished_character_is_not_held_back():
    decoder = IncrementalDecoder(of_bytes)
    ids = "a語b".encode()
    assert [decoder.push(ids[:2]), decoder.push(ids[2:3]), decoder.push(ids[3:]), decoder.finish()] == ["a", "", "語b", ""]


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


# The text of a completion, up to the first stop string


def through(stop, ids, sizes=(), decode=of_bytes, **settings):
    """(text, tokens taken, whether a stop string ended it), and the pieces, of ids that come in portions of these sizes."""
    text = CompletionText(decode, stop, **settings)
    taken, start, pieces = 0, 0, []
    for size in [*sizes, len(ids)]:
        taken += text.push(ids[start : start + size])
        start += size
        pieces.append(text.take())
        if text.stopped:
            break
    text.finish()
    return (text.whole, taken, text.stopped), [*pieces, text.take()]


def test_case_27_tokens_behind_the_one_that_completes_the_stop_string_are_not_taken():
    tokens = (" ha", " x", " y")

    def decode(ids):
        return "".join(tokens[index] for index in ids)

    assert through([" ha ha ha"], [0, 0, 0, 1, 2], decode=decode)[0] == ("", 3, True)
    assert through([" ha ha ha"], [0, 0, 0, 1, 2], decode=decode, include_stop=True)[0] == (" ha ha ha", 3, True)
    assert through([" ha ha ha"], [0, 0, 1, 0, 0], decode=decode)[0] == (" ha ha x ha ha", 5, False)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["cd", "b"], ("a", 2)),  # the earlier one, whatever their order
        (["bcd", "c"], ("ab", 3)),  # the one that is complete first, though it begins later
        (["c", "abc"], ("", 3)),  # complete at the same character: the longer
        (["xyz"], ("abcdef", 6)),
    ],
)
def test_of_several_stop_strings_the_one_that_is_complete_first_wins(stop, expected):
    assert through(stop, b"abcdef")[0][:2] == expected


def test_a_stop_string_inside_a_token_cuts_the_token_s_text():
    def decode(ids):
        return "".join(("one, two", "; three;", " four")[index] for index in ids)

    assert through([", t"], [0, 1, 2], decode=decode)[0] == ("one", 1, True)
    assert through([";"], [0, 1, 2], decode=decode)[0] == ("one, two", 2, True)
    assert through([";"], [0, 1, 2], decode=decode, include_stop=True)[0] == ("one, two;", 2, True)


def test_a_stop_string_before_an_unfinished_character_of_the_same_token():
    # The second token ends the stop string and begins a character that never comes.
    def decode(ids):
        return b"".join((b"x EN", b"D\xe8", b"\xaa", b"\x9e!")[index] for index in ids).decode(errors="replace")

    assert through(["END"], [0, 1, 2, 3], decode=decode)[0] == ("x ", 2, True)
    # One that ends in that character is complete with the token that completes the character.
    assert through(["D語"], [0, 1, 2, 3], decode=decode)[0] == ("x EN", 4, True)


def test_a_stop_string_is_not_looked_for_in_what_stands_for_half_a_character_while_more_may_come():
    assert through([REPLACEMENT], "語!".encode())[0] == ("語!", 4, False)
    assert through([REPLACEMENT], "a語".encode()[:3])[0] == ("a", 3, True)


@pytest.mark.parametrize(
    ("least", "expected"), [(1, ("", 2)), (2, ("ab", 4)), (3, ("ab", 4)), (4, ("abab", 6)), (6, ("ababab", 6))]
)
def test_a_stop_string_within_the_first_tokens_is_passed_over(least, expected):
    assert through(["ab"], b"ababab", min_tokens=least)[0] == (*expected, least < 6)


def test_the_beginning_of_a_stop_string_is_held_back():
    assert through(["</s>"], b"a</b></s>z", [1] * 8)[1] == ["a", "", "", "</b", ">", "", "", "", "", ""]
    # At the end it is certain.
    assert through(["</s>"], b"a</s", [1] * 3)[1] == ["a", "", "", "", "</s"]
    # What is kept anyway is not held back.
    assert through(["cd"], b"abcde", [1] * 4, include_stop=True)[1] == ["a", "b", "c", "d", ""]


def expected_cut(text, stop, include, least):
    """By the definition: the first character that ends a stop string, and the longest one that ends there."""
    for end in range(1, len(text) + 1):
        ending = [len(s) for s in stop if text[:end].endswith(s)]
        if ending and len(text[:end].encode()) > least:
            return text[: end if include else end - max(ending)], len(text[:end].encode()), True
    return text, len(text.encode()), False


STOPS = st.lists(st.text("abé", min_size=1, max_size=4), max_size=3)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.text("abé", max_size=14), STOPS, SIZES, st.booleans(), st.integers(0, 8))
def test_case_29_the_cut_does_not_depend_on_the_portions(text, stop, sizes, include, least):
    result, pieces = through(stop, list(text.encode()), sizes, include_stop=include, min_tokens=least)
    assert result == expected_cut(text, stop, include, least)
    assert "".join(pieces) == result[0]
