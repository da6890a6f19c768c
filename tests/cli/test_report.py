"""What is printed beside the text."""

import io

import pytest
from rich.console import Console

from specjax import Completion, Piece, Stats
from specjax.cli.report import print_comparison, print_statistics, print_text
from specjax.statistics import SourceStats


def completion(token_ids, **counts):
    stats = Stats(num_tokens=len(token_ids), **counts)
    return Completion(text="", token_ids=token_ids, finish_reason="stop", logprobs=None, seed=0, stats=stats)


def printed(plain, speculative):
    console = Console(file=io.StringIO(), width=200, highlight=False)
    print_comparison(plain, speculative, num_draft=3, propose_seconds=0.001, console=console)
    return console.file.getvalue()


PLAIN = completion([5, 6, 7, 8], num_drafts=4, decode_seconds=4.0, plain_round_seconds=1.0)
COUNTS = {
    "num_drafts": 2,
    "num_draft_tokens": 6,
    "num_accepted_tokens": 2,
    "num_accepted_tokens_per_pos": (2, 0, 0),
    "num_tested": 4,
    "decode_seconds": 2.0,
    "drafting_round_seconds": 1.0,
}


def test_comparison_shows_both_speeds_and_the_acceptance():
    text = printed(PLAIN, completion([5, 6, 7, 8], **COUNTS))
    assert "Both runs gave the same 4 tokens." in text
    assert "Accepted by position in the draft: 2 0 0" in text
    assert "Measured speedup 2.00 (2.0 over 1.0 tokens/s)." in text
    assert "lost" not in text


@pytest.mark.parametrize(("tokens", "place"), [([5, 6, 9, 8], 3), ([5, 6, 7], 4), ([1], 1)])
def test_comparison_says_where_the_tokens_differ(tokens, place):
    assert f"differ from token {place} on" in printed(PLAIN, completion(tokens, **COUNTS))


def test_text_is_printed_piece_by_piece(capsys):
    whole = completion([1, 2])
    pieces = [Piece("[bold]one", [1]), Piece(" two", [2], whole)]
    assert print_text(pieces) is whole
    assert capsys.readouterr().out == "[bold]one two\n"


def test_acceptance_by_source():
    sources = {"prompt_lookup": SourceStats(2, 6, 4, 6), "draft_model([b])": SourceStats()}
    console = Console(file=io.StringIO(), width=200, highlight=False)
    print_statistics(completion([5, 6], by_source=sources), console)
    lines = console.file.getvalue().splitlines()
    (found,) = [line for line in lines if "from prompt_lookup" in line]
    (drawn,) = [line for line in lines if "from draft_model([b])" in line]
    assert "2 rounds, 4 of 6 tokens accepted, 3.00 tokens per round" in found
    assert "0 rounds, 0 of 0 tokens accepted " in drawn
    assert "from prompt_lookup: 2 rounds" in printed(PLAIN, completion([5, 6, 7, 8], by_source=sources, **COUNTS))
    assert "from" not in printed(PLAIN, completion([5, 6, 7, 8], **COUNTS)).replace("from token", "")
