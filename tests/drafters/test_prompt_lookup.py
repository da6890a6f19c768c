import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import SamplingParams
from specjax.drafters import prompt_lookup
from specjax.drafters.prompt_lookup import find_continuation
from specjax.tree import Law
from tests import hash_model as tiny

NUM_DRAFT = 6
CAPACITY = 24


@functools.lru_cache
def propose_with(longest, shortest, num_draft=NUM_DRAFT):
    functions = prompt_lookup(num_draft, prompt_lookup_max=longest, prompt_lookup_min=shortest).functions
    return jax.jit(lambda context, asked: functions.propose((), (), context, None, asked)[0])


def propose(histories, asked=None, longest=3, shortest=1, num_draft=NUM_DRAFT):
    """What is proposed for every history, as a list."""
    context = tiny.context(histories, [SamplingParams()] * len(histories), capacity=CAPACITY)
    asked = jnp.asarray([num_draft] * len(histories) if asked is None else asked, jnp.int32)
    draft = propose_with(longest, shortest, num_draft)(context, asked).checked()
    tokens, valid = np.asarray(draft.tokens), np.asarray(draft.valid)
    return [row[ok].tolist() for row, ok in zip(tokens, valid, strict=True)]


def reference(history, longest, shortest, num_draft=NUM_DRAFT):
    """The same by plain loops: longest first, then most recent; around the loop where the text ends."""
    for size in range(longest, shortest - 1, -1):
        for start in range(len(history) - size - 1, -1, -1):
            if history[start : start + size] == history[len(history) - size :]:
                text = list(history)
                for _ in range(num_draft):
                    text.append(text[start + size + len(text) - len(history)])
                return text[len(history) :]
    return []


def test_which_match_wins():
    history = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2]
    # The most recent: 4 and not 3. Three tokens (9 1 2) match nearer still at the same place.
    assert propose([history], longest=2)[0][0] == 4
    assert propose([history], longest=3)[0][0] == 4
    # Longest first: 8 1 2 matches at the start, 1 2 also later.
    assert propose([[8, 1, 2, 3, 1, 2, 4, 8, 1, 2]], longest=3)[0][0] == 3
    assert propose([[8, 1, 2, 3, 1, 2, 4, 8, 1, 2]], longest=2)[0][0] == 4


def test_a_match_may_overlap_the_end():
    assert propose([[1, 1, 1]], longest=2) == [[1] * NUM_DRAFT]
    assert propose([[1, 1]], longest=2) == [[1] * NUM_DRAFT]


def test_a_text_that_ends_in_a_loop_is_continued_around_it():
    assert propose([[5, 1, 2, 3, 1, 2, 3]]) == [[1, 2, 3, 1, 2, 3]]


def test_nothing_matches_nothing_is_drafted():
    assert propose([[1], [1, 2, 3], [4, 1, 2, 3, 1, 2]], longest=3, shortest=3) == [[], [], []]
    assert propose([[1, 2, 1]], shortest=2) == [[]]
    assert propose([[1, 2, 1]], shortest=1) == [[2, 1, 2, 1, 2, 1]]


def test_what_stands_behind_the_length_is_not_read():
    context = tiny.context([[1, 2, 3]], [SamplingParams()], capacity=CAPACITY)
    tokens = context.tokens.at[0, 3:].set(jnp.array([1, 2, 3] * 7 + [1]))
    draft = propose_with(3, 1)(context.replace(tokens=tokens), jnp.array([NUM_DRAFT]))
    assert not draft.valid.any()
    # Nor what stands at the end of the array, one place before its beginning: 7 2 is there only once.
    assert context.tokens[0, -1] == 7
    assert propose([[2, 5, 7, 2]], longest=2, shortest=2) == [[]]


def test_only_as_many_as_are_asked_for():
    history = [1, 2, 3, 1, 2, 3]
    assert propose([history] * 3, asked=[0, 2, 6]) == [[], [1, 2], [1, 2, 3, 1, 2, 3]]


def test_a_full_history():
    history = [*range(10, 22), *range(10, 23)]
    assert len(history) == CAPACITY + 1
    history[-1] = 11
    history[-2] = 10
    assert propose([history]) == [reference(history, 3, 1)]
    assert propose([history])[0][:3] == [12, 13, 14]


def test_ids_beyond_the_vocabulary_are_not_drafted():
    # They can stand in a prompt of raw ids, but never be emitted; what follows them is not drafted either.
    assert propose([[1, 2, 3, tiny.VOCAB, 4, 1, 2]]) == [[3]]


def test_no_draft_tokens():
    assert propose([[1, 1, 1]], num_draft=0) == [[]]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=CAPACITY + 1), min_size=4, max_size=4),
    st.sampled_from([(3, 1), (3, 2), (2, 2)]),
)
def test_against_plain_loops(histories, sizes):
    assert propose(histories, None, *sizes) == [reference(history, *sizes) for history in histories]


def test_find_continuation_of_one_token():
    found, _ = find_continuation(jnp.array([5, 5, 5]), jnp.int32(1), 3, 1)
    assert not found


def test_wrong_settings_are_told():
    for value in (-1, 33, 2.0, True):
        with pytest.raises(ValueError, match=rf"num_speculative_tokens is {value!r}; it must be a whole number from 0 to 32"):
            prompt_lookup(value)
    with pytest.raises(ValueError, match="prompt_lookup_min is 0; it must be a whole number from 1 to 64"):
        prompt_lookup(4, prompt_lookup_max=3, prompt_lookup_min=0)
    for least, most in ((4, 3), (2, 1)):
        with pytest.raises(ValueError, match=rf"prompt_lookup_min is {least}; it must be from 1 to prompt_lookup_max \({most}\)"):
            prompt_lookup(4, prompt_lookup_max=most, prompt_lookup_min=least)
    with pytest.raises(ValueError, match="law is 'coupled'"):
        prompt_lookup(4).functions.with_law(Law.COUPLED)
