"""Stop strings through the whole of generation: where they cut, and what they leave alone."""

import dataclasses

import pytest

import specjax
from specjax import SamplingParams
from specjax.decoding import run_rounds
from specjax.drafters import draft_model, prompt_lookup, stacked
from tests import hash_model as tiny

TABLE = tiny.random_table(0)
PROMPTS = [[1, 2, 3], [*range(4, 20), 1, 2], [7]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PLAIN = [tiny.greedy(TABLE, prompt, 24) for prompt in PROMPTS]


Pieces = tiny.Pieces
TARGET = tiny.model(TABLE, tokenizer=Pieces())
TEXTS = [Pieces().decode(tokens) for tokens in PLAIN]
PERFECT = draft_model(tiny.model(TABLE), 4)
CLOSE = draft_model(tiny.model(TABLE + 0.7 * tiny.random_table(1)), 4)
DRAFTERS = {"none": None, "perfect": PERFECT, "close": CLOSE, "lookup": prompt_lookup(4, prompt_lookup_min=1)}
STACK = stacked(DRAFTERS["lookup"], PERFECT)
EVERY_DRAFTER = pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)


def run(params, drafter, prompts=PROMPTS, target=TARGET):
    return specjax.generate(target, prompts, params, drafter=drafter, rule="gumbel")


def cut(row, stop):
    """Tokens and text by the definition: the first tokens whose text, but for half a character at its end, has ``stop``."""
    for count in range(1, len(PLAIN[row]) + 1):
        place = Pieces().decode(PLAIN[row][:count]).rstrip("\ufffd").find(stop)
        if place >= 0:
            return PLAIN[row][:count], TEXTS[row][:place], "stop"
    return PLAIN[row], TEXTS[row], "length"


@EVERY_DRAFTER
def test_case_29_the_cut_is_that_of_plain_decoding_for_every_draft(drafter):
    # Stop strings that begin anywhere in the text and are of all lengths, different in every row.
    for begin, size in ((0, 1), (1, 3), (3, 6), (8, 2), (9, 9), (17, 5), (26, 4), (30, 12)):
        stops = [text[begin + row : begin + row + size] for row, text in enumerate(TEXTS)]
        params = [dataclasses.replace(GREEDY, stop=stop) for stop in stops]
        completions = run(params, drafter)
        expected = [cut(row, stop) for row, stop in enumerate(stops)]
        assert [(c.token_ids, c.text, c.finish_reason) for c in completions] == expected
        assert [reason for *_, reason in expected] == ["stop"] * 3


@EVERY_DRAFTER
def test_the_other_rows_of_the_batch_are_left_alone(drafter):
    alone = run(GREEDY, drafter)
    params = [GREEDY, dataclasses.replace(GREEDY, stop=[TEXTS[1][7:12], "never"]), GREEDY]
    together = run(params, drafter)
    assert len(together[1].token_ids) < 12
    for row in (0, 2):
        assert together[row].token_ids == alone[row].token_ids == PLAIN[row]
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens_per_pos", "num_tested", "overlap"):
            assert getattr(together[row].stats, name) == getattr(alone[row].stats, name), name


@pytest.mark.parametrize("drafter", [*DRAFTERS.values(), STACK], ids=[*DRAFTERS, "stack"])
def test_statistics_are_those_of_a_stop_token_at_the_same_place(drafter):
    """Cases 129 and 133: what stands behind the cut is not emitted, and not counted but as drafted."""
    for place in (0, 2, 4, 6, 8):
        # The text of all tokens up to this one, which occurs there for the first time.
        stops = [Pieces().decode(tokens[: place + 1]).rstrip("\ufffd") for tokens in PLAIN]
        by_text = run([dataclasses.replace(GREEDY, stop=stop) for stop in stops], drafter)
        lengths = [len(c.token_ids) for c in by_text]
        assert lengths == [place + 1] * 3
        assert all(tokens.index(tokens[place]) == place for tokens in PLAIN)
        ends = [tokens[n - 1] for tokens, n in zip(PLAIN, lengths, strict=True)]
        by_token = run([dataclasses.replace(GREEDY, stop_token_ids=(end,)) for end in ends], drafter)
        for one, other in zip(by_text, by_token, strict=True):
            assert one.token_ids == other.token_ids
            assert one.stats.overlap == (None if other.stats.overlap is None else pytest.approx(other.stats.overlap, rel=1e-5))
            for name in (
                "num_tokens",
                "num_drafts",
                "num_draft_tokens",
                "num_accepted_tokens_per_pos",
                "num_tested",
                "by_source",
            ):
                assert getattr(one.stats, name) == getattr(other.stats, name), name


def forced(prompt, tokens):
    """A table whose most likely tokens after ``prompt`` are these."""
    table = TABLE.copy()
    before = tiny.states([*prompt, *tokens])[len(prompt) - 1 :]
    for state, token in zip(before, tokens, strict=False):
        table[state, token] += 1000
    return table


@pytest.mark.parametrize("include", [False, True])
def test_case_27_text_ids_and_logprobs_are_cut_at_the_same_token(include):
    table = forced(PROMPTS[0], [0, 0, 0, 1, 2])
    target = tiny.model(table, tokenizer=Pieces([b" ha", b" x", b" y", *[b" z"] * (tiny.VOCAB - 3)]))
    params = dataclasses.replace(GREEDY, stop=" ha ha ha", include_stop_str_in_output=include, logprobs=1)
    settings = [params, dataclasses.replace(params, stop="y", max_tokens=9), dataclasses.replace(params, logprobs=None)]
    completions = run(settings, draft_model(tiny.model(table), 4), [PROMPTS[0]] * 3, target)
    assert [completions[1].text.strip("y"), len(completions[1].logprobs)] == [" ha ha ha x ", 5]
    completion = completions[0]
    assert completion.stats.num_drafts == 1  # all five in one step
    assert completion.token_ids == [0, 0, 0]
    assert [list(entry) for entry in completion.logprobs] == [[0]] * 3
    assert completion.text == (" ha ha ha" if include else "")
    assert completion.finish_reason == "stop"
    stats = completion.stats
    assert (stats.num_tokens, stats.num_draft_tokens, stats.num_accepted_tokens_per_pos) == (3, 4, (1, 1, 1, 0))


def test_case_29_a_stop_string_inside_an_accepted_run_of_twenty():
    # The prompt begins to repeat itself, and the target goes on with it.
    prompts = [[*range(row, row + 25), row, row + 1] for row in range(3)]
    runs = [prompt[2:24] for prompt in prompts]
    table = TABLE + sum(forced(prompt, tokens) - TABLE for prompt, tokens in zip(prompts, runs, strict=True))
    target = tiny.model(table, tokenizer=Pieces())
    texts = [Pieces().decode(tokens) for tokens in runs]
    params = [dataclasses.replace(GREEDY, stop=text[15 + row : 20]) for row, text in enumerate(texts)]
    completions, plain = run(params, prompt_lookup(20), prompts, target), run(params, None, prompts, target)
    assert [(c.stats.num_drafts, c.stats.num_draft_tokens) for c in completions] == [(1, 20)] * 3
    assert [(c.text, c.token_ids, c.finish_reason) for c in completions] == [(c.text, c.token_ids, "stop") for c in plain]
    assert [text[: 15 + row] for row, text in enumerate(texts)] == [c.text for c in completions]
    assert max(len(c.token_ids) for c in completions) < 20


@EVERY_DRAFTER
def test_a_stop_string_that_is_complete_with_the_last_token_of_the_budget(drafter):
    stops = [text[6:10].rstrip("\ufffd") for text in TEXTS]
    whole = [len(cut(row, stop)[0]) for row, stop in enumerate(stops)]
    params = [dataclasses.replace(GREEDY, max_tokens=n, stop=stop) for n, stop in zip(whole, stops, strict=True)]
    assert [(len(c.token_ids), c.finish_reason) for c in run(params, drafter)] == [(n, "stop") for n in whole]
    one_less = [dataclasses.replace(p, max_tokens=p.max_tokens - 1) for p in params]
    assert [(len(c.token_ids), c.finish_reason) for c in run(one_less, drafter)] == [(n - 1, "length") for n in whole]


def test_an_end_token_before_and_behind_a_stop_string_in_one_accepted_run():
    stop, end = TEXTS[0][:4], PLAIN[0]
    expected = cut(0, stop)
    behind = len(expected[0])
    first = next(i for i in range(behind, 24) if end.index(end[i]) == i)
    params = dataclasses.replace(GREEDY, stop=stop)
    for drafter in (None, PERFECT):
        late = run([dataclasses.replace(params, stop_token_ids=(end[first],)), GREEDY, GREEDY], drafter)[0]
        assert (late.token_ids, late.text, late.finish_reason) == expected
        early = run([dataclasses.replace(params, stop_token_ids=(end[0],)), GREEDY, GREEDY], drafter)[0]
        assert (early.token_ids, early.text, early.finish_reason) == (end[:1], "", "stop")


def test_the_prompt_is_not_searched():
    # The last text of the prompt and the first of the answer together are no match either.
    stops = [Pieces().decode(p)[-1] + text[:3] for p, text in zip(PROMPTS, TEXTS, strict=True)]
    completions = run([dataclasses.replace(GREEDY, max_tokens=2, stop=stop) for stop in stops], None)
    assert [c.finish_reason for c in completions] == ["length"] * 3


@pytest.mark.parametrize("drafter", [None, CLOSE], ids=["none", "close"])
def test_the_pieces_of_a_stream_join_to_the_text_before_the_stop_string(drafter):
    for stop in (TEXTS[0][9:14], TEXTS[0][2:30], [TEXTS[0][8] + "never", TEXTS[0][10:13]], "never"):
        for include in (False, True):
            params = dataclasses.replace(GREEDY, stop=stop, include_stop_str_in_output=include)
            pieces = list(specjax.stream(TARGET, PROMPTS[0], params, drafter=drafter, rule="gumbel"))
            completion = pieces[-1].completion
            assert "".join(piece.text for piece in pieces) == completion.text
            assert [token for piece in pieces for token in piece.token_ids] == completion.token_ids
            if isinstance(stop, str) and not include:
                assert (completion.token_ids, completion.text, completion.finish_reason) == cut(0, stop)


def test_stop_strings_compile_nothing():
    run(GREEDY, PERFECT)
    traces = run_rounds._cache_size()
    run([dataclasses.replace(GREEDY, stop=[text[4:8], "x"]) for text in TEXTS], PERFECT)
    assert run_rounds._cache_size() == traces


def test_a_model_without_tokenizer_has_no_text_to_stop_in():
    with pytest.raises(ValueError, match=r"params\[0\]: stop is \('a',\), but model 'model' has no tokenizer"):
        specjax.generate(tiny.model(TABLE), PROMPTS, dataclasses.replace(GREEDY, stop="a"))


def test_a_stop_string_before_the_minimum_length_is_passed_over():
    """The row goes on, and ends at the first match that completes behind it, the same with drafts and without."""
    stop, least = TEXTS[0][1:3], 9
    assert len(cut(0, stop)[0]) < least
    params = dataclasses.replace(GREEDY, stop=stop, min_tokens=least)
    plain, drafted = run(params, None, PROMPTS[:1])[0], run(params, CLOSE, PROMPTS[:1])[0]
    assert plain.token_ids == drafted.token_ids
    assert (plain.text, plain.finish_reason) == (drafted.text, drafted.finish_reason)
    assert plain.token_ids == PLAIN[0][: len(plain.token_ids)]
    assert len(plain.token_ids) > least
    assert plain.finish_reason == ("length" if len(plain.token_ids) == 24 else "stop")
