import dataclasses

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

import specjax
from specjax import SamplingParams
from specjax.checkpoints.tokenizer import Tokenizer
from specjax.drafters import draft_model, prompt_lookup
from specjax.statistics import total
from tests import hash_model as tiny

TABLE = tiny.random_table(0)
WORDS = {f"w{index}": index for index in range(tiny.VOCAB)}
PROMPT = [1, 2, 3]
EXPECTED = tiny.greedy(TABLE, PROMPT, 20)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def tokenizer():
    backend = tokenizers.Tokenizer(models.WordLevel(WORDS, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend, chat_template="{% for message in messages %}{{ message.content }} {% endfor %}")


def words(ids):
    return " ".join(f"w{index}" for index in ids)


@pytest.fixture(scope="module")
def target():
    return tiny.model(TABLE, tokenizer=tokenizer())


@pytest.fixture(scope="module")
def perfect(target):
    return draft_model(target, 4)


def test_prompts_in_three_forms(target):
    chat = [{"role": "system", "content": "w1 w2"}, {"role": "user", "content": "w3"}]
    for prompts in (["w1 w2 w3", PROMPT, chat], ["w1 w2 w3", np.array(PROMPT), tuple(PROMPT)]):
        completions = specjax.generate(target, prompts, GREEDY)
        assert [c.token_ids for c in completions] == [EXPECTED] * 3
    (alone,) = specjax.generate(target, "w1 w2 w3", GREEDY)
    assert alone.token_ids == EXPECTED


def test_the_fields_of_a_completion(target):
    seeded = dataclasses.replace(GREEDY, seed=9, max_tokens=2)
    first, second, third = specjax.generate(target, [PROMPT] * 3, [GREEDY, seeded, GREEDY])
    assert first.text == words(EXPECTED)
    assert (first.finish_reason, first.logprobs) == ("length", None)
    assert (second.token_ids, second.text, second.seed) == (EXPECTED[:2], words(EXPECTED[:2]), 9)
    assert 0 <= first.seed < 2**32
    assert first.seed != third.seed
    assert first.stats.num_tokens == first.stats.num_drafts == 20
    assert first.stats.overlap is None
    assert first.stats.decode_seconds > 0
    assert specjax.generate(tiny.model(TABLE), [PROMPT] * 3, GREEDY)[0].text is None


def test_a_reported_seed_repeats_the_run(target):
    sampled = SamplingParams(max_tokens=20)
    drawn = specjax.generate(target, [PROMPT] * 3, sampled)
    assert len({tuple(c.token_ids) for c in drawn}) == 3
    again = specjax.generate(target, [PROMPT] * 3, [dataclasses.replace(sampled, seed=c.seed) for c in drawn])
    assert [c.token_ids for c in again] == [c.token_ids for c in drawn]


def test_unseeded_requests_differ():
    uniform = tiny.model(np.zeros_like(TABLE))
    params = SamplingParams(max_tokens=8)
    outputs = {tuple(specjax.generate(uniform, [PROMPT], params)[0].token_ids) for _ in range(20)}
    assert len(outputs) == 20


def test_a_padded_vocabulary_is_never_emitted():
    # The two ids behind the vocabulary would win everywhere, in the target and in the draft.
    table = np.zeros_like(TABLE)
    table[:, tiny.VOCAB :] = 100
    padded = tiny.model(table)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=20, seed=1)
        for completion in specjax.generate(padded, [PROMPT] * 3, params, drafter=draft_model(padded, 4), rule="gumbel"):
            assert max(completion.token_ids) < tiny.VOCAB
            assert completion.stats.draft_acceptance_rate == 1.0


def test_the_stop_token_is_in_the_ids_but_not_in_the_text(target, perfect):
    params = dataclasses.replace(GREEDY, stop_token_ids=(EXPECTED[6],))
    kept = EXPECTED[: EXPECTED.index(EXPECTED[6]) + 1]
    for drafter in (None, perfect):
        completion = specjax.generate(target, [PROMPT] * 3, params, drafter=drafter, rule="gumbel")[1]
        assert (completion.token_ids, completion.finish_reason) == (kept, "stop")
        assert completion.text == words(kept[:-1])


@pytest.mark.parametrize("stops", [(), (EXPECTED[6],)], ids=["length", "stop"])
def test_the_pieces_of_a_stream_join_to_the_completion(target, perfect, stops):
    params = dataclasses.replace(GREEDY, stop_token_ids=stops)
    for drafter in (None, perfect):
        pieces = list(specjax.stream(target, "w1 w2 w3", params, drafter=drafter, rule="gumbel"))
        (completion,) = specjax.generate(target, [PROMPT], params, drafter=drafter, rule="gumbel")
        assert "".join(piece.text for piece in pieces) == completion.text
        assert [token for piece in pieces for token in piece.token_ids] == completion.token_ids
        assert [piece.completion is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
        assert pieces[-1].completion.token_ids == completion.token_ids
        # A piece comes with every round.
        assert len(pieces) == completion.stats.num_drafts


def test_a_stream_without_a_tokenizer():
    pieces = list(specjax.stream(tiny.model(TABLE), PROMPT, dataclasses.replace(GREEDY, max_tokens=3)))
    assert [(piece.text, piece.token_ids) for piece in pieces] == [("", [token]) for token in EXPECTED[:3]]


def test_statistics_of_always_and_never(target, perfect):
    for completion in specjax.generate(target, [PROMPT] * 3, GREEDY, drafter=perfect, rule="gumbel"):
        stats = completion.stats
        assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 16, 16)
        assert (stats.draft_acceptance_rate, stats.tested_acceptance_rate, stats.mean_acceptance_length) == (1.0, 1.0, 5.0)
        assert stats.num_accepted_tokens_per_pos == (4, 4, 4, 4)
        assert stats.overlap == pytest.approx(1.0)
    never = draft_model(tiny.model(tiny.rejected_at(TABLE, PROMPT, EXPECTED, range(20))), 4)
    for completion in specjax.generate(target, [PROMPT] * 3, GREEDY, drafter=never, rule="gumbel"):
        stats = completion.stats
        assert (stats.draft_acceptance_rate, stats.tested_acceptance_rate, stats.mean_acceptance_length) == (0.0, 0.0, 1.0)
        # Never more than the budget can hold: 4 drafts in each of the first 16 rounds, then 3, 2, 1, 0.
        assert (stats.num_drafts, stats.num_draft_tokens, stats.num_tested) == (20, 16 * 4 + 3 + 2 + 1, 19)


def test_statistics_of_a_shortened_last_round(target, perfect):
    params = dataclasses.replace(GREEDY, max_tokens=7)
    stats = specjax.generate(target, [PROMPT] * 3, params, drafter=perfect, rule="gumbel")[0].stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 5, 5)


def test_statistics_leave_out_what_stands_behind_the_end(target, perfect):
    # Five tokens pass, the third is the end.
    params = dataclasses.replace(GREEDY, stop_token_ids=(EXPECTED[2],))
    stats = specjax.generate(target, [PROMPT] * 3, params, drafter=perfect, rule="gumbel")[0].stats
    assert (stats.num_tokens, stats.num_drafts, stats.num_draft_tokens) == (3, 1, 4)
    assert (stats.num_accepted_tokens_per_pos, stats.num_tested, stats.tested_acceptance_rate) == ((1, 1, 1, 0), 3, 1.0)


def test_statistics_where_nothing_is_drafted(target):
    # The first words of a text repeat nothing.
    params = dataclasses.replace(GREEDY, max_tokens=1)
    (completion,) = specjax.generate(target, [[1]], params, drafter=prompt_lookup(4))
    assert (completion.stats.num_draft_tokens, completion.stats.draft_acceptance_rate) == (0, 0.0)


def test_sums_over_requests(target):
    params = [dataclasses.replace(GREEDY, max_tokens=most) for most in (20, 3, 9)]
    close = draft_model(tiny.model(TABLE + 0.7 * tiny.random_table(1)), 4)
    completions = specjax.generate(target, [PROMPT, [5], [6, 7]], params, drafter=close, rule="gumbel")
    for completion in completions:
        stats = completion.stats
        assert stats.num_tokens == len(completion.token_ids)
        # Every round emits one token that was not drafted.
        assert stats.num_accepted_tokens + stats.num_drafts == stats.num_tokens
        assert stats.num_accepted_tokens == sum(stats.num_accepted_tokens_per_pos)
    summed = total(c.stats for c in completions)
    assert summed.num_tokens == 32
    assert summed.num_drafts == sum(c.stats.num_drafts for c in completions)
