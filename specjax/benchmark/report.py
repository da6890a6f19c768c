"""What is made of measurements: rates, speedups, the formula's prediction; one row of a document for each case."""

import collections
import math
import statistics
from collections.abc import Sequence
from typing import Any

from specjax.benchmark.answers import Answers
from specjax.benchmark.cases import Case
from specjax.benchmark.clock import Spread
from specjax.benchmark.parts import RoundParts
from specjax.statistics import Stats, expected_tokens, total

DIGITS = 4
"""Significant digits of what is reported."""


def rates(answers: Answers, places: Sequence[int] | None = None) -> list[float]:
    """Tokens per second in each repeat.

    Args:
      answers: of one case.
      places: of the prompts that count; None: all. An engine's prompts are timed together.
    """
    places = range(len(answers.tokens)) if places is None else places
    tokens = sum(len(answers.tokens[place]) for place in places)
    together = all(len(seconds) == 1 for seconds in answers.seconds)
    return [tokens / (seconds[0] if together else sum(seconds[place] for place in places)) for seconds in answers.seconds]


def speedup(own: Sequence[float], base: Sequence[float]) -> Spread:
    """Ratio of the medians, and least and most ratio of what was measured in the same repeat.

    Example:
      >>> speedup([2.0, 4.0, 9.0], [1.0, 2.0, 3.0])
      Spread(median=2.0, least=2.0, most=3.0)
    """
    pairs = [one / other for one, other in zip(own, base, strict=True)]
    return Spread(statistics.median(own) / statistics.median(base), min(pairs), max(pairs))


def baselines(found: dict[Case, Answers]) -> dict[tuple, Case]:
    """The fastest plain decoding, over all dtypes, of every setting."""
    fastest: dict[tuple, Case] = {}
    for case, answers in found.items():
        if case.is_plain:
            other = fastest.get(case.setting)
            if other is None or statistics.median(rates(answers)) > statistics.median(rates(found[other])):
                fastest[case.setting] = case
    return fastest


def predicted(stats: Stats, num_nodes: int, by_formula: bool, full: float, empty: float) -> float:
    """The speedup that acceptance and costs allow: expected tokens of a round over what it costs in plain rounds.

    With a draft in every round this is :func:`specjax.statistics.predicted_speedup`; a drafter that proposes nothing in some
    rounds pays for those what an empty round costs, and emits one token in them.

    Args:
      stats: of the case, all prompts together.
      num_nodes: N, nodes of a whole draft. A draft that was cut counts as the part of one that it is.
      by_formula: whether the expected tokens of a draft are the formula's, from one acceptance rate for all places, as for
        chains; else those that were measured.
      full: cost of a round with a whole draft, in rounds of the fastest plain decoding.
      empty: cost of a round in which nothing was drafted.

    Example:
      >>> stats = Stats(num_drafts=10, num_draft_tokens=40, num_accepted_tokens=24, num_tested=30, num_tokens=34)
      >>> round(predicted(stats, 4, True, full=0.2 + 1.0, empty=1.0), 2)  # predicted_speedup(0.8, 4, draft_cost=0.05)
      2.8
    """
    if not stats.num_drafts:
        return 0.0
    share = min(1.0, stats.num_draft_tokens / (stats.num_drafts * num_nodes)) if num_nodes else 0.0
    tokens = stats.mean_acceptance_length
    if by_formula:
        tokens = share * expected_tokens(stats.tested_acceptance_rate, num_nodes) + 1 - share
    return tokens / (share * full + (1 - share) * empty)


def predictions(
    case: Case, stats: Stats, parts: RoundParts, plain_parts: RoundParts, stacked: bool, fastest: bool = False
) -> float:
    """:func:`predicted` of a case.

    Args:
      case: which.
      stats: all its prompts together.
      parts: of its round.
      plain_parts: of plain decoding in its dtype.
      stacked: whether its drafts come from several drafters.
      fastest: whether it is the plain decoding that speedups are over.
    """
    unit = parts.plain_round.median
    own_plain = plain_parts.round.median / plain_parts.plain_round.median
    if case.is_plain:
        return 1.0 if fastest else 1 / own_plain
    empty = own_plain + parts.parts["draft"] / unit
    by_formula = case.tree.is_chain and not stacked and not case.adaptive
    return predicted(stats, case.tree.num_nodes, by_formula, parts.round.median / unit, empty)


def shape(case: Case) -> str:
    """Of its drafts: "none", "chain", "tree" or "growing tree"."""
    if not case.tree.num_nodes:
        return "none"
    if case.tree.is_chain:
        return "chain"
    return "tree" if hasattr(case.tree, "parents") else "growing tree"


def acceptance(stats: Stats) -> dict[str, Any]:
    """What became of the drafts; ``accepted_per_pos`` is the share of the rounds that accepted so deep."""
    return {
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "tested_acceptance_rate": stats.tested_acceptance_rate,
        "accepted_per_pos": [count / max(1, stats.num_drafts) for count in stats.num_accepted_tokens_per_pos],
    }


def places_by_kind(kinds: Sequence[str]) -> dict[str, list[int]]:
    """Which prompts are of each kind.

    Example:
      >>> places_by_kind(["a", "b", "a"])
      {'a': [0, 2], 'b': [1]}
    """
    places: dict[str, list[int]] = collections.defaultdict(list)
    for place, kind in enumerate(kinds):
        places[kind].append(place)
    return dict(places)


def result_row(case: Case, answers: Answers, base: Answers, kinds: Sequence[str], prompts: str) -> dict[str, Any]:
    """What is reported of a case, but for what its parts say.

    Args:
      case: which.
      answers: its own.
      base: those of the fastest plain decoding of its setting.
      kinds: of each prompt.
      prompts: what the prompts are called.
    """
    stats = total(answers.stats)
    own = Spread.of(rates(answers))
    gain = speedup(rates(answers), rates(base))
    by_kind = {}
    for kind, places in places_by_kind(kinds).items():
        by_kind[kind] = acceptance(total(answers.stats[place] for place in places))
        if case.slots == 1:
            mine, theirs = rates(answers, places), rates(base, places)
            by_kind[kind] |= {"tokens_per_second": statistics.median(mine), "speedup": speedup(mine, theirs).median}
    return {
        "prompts": prompts,
        "num_prompts": len(answers.tokens),
        "drafter": case.drafter,
        "rule": case.rule,
        "num_speculative_tokens": case.tree.num_nodes,
        "shape": shape(case),
        "adaptive": case.adaptive,
        "slots": case.slots,
        "temperature": case.temperature,
        "dtype": case.dtype,
        "tokens_per_second": own.median,
        "tokens_per_second_spread": [own.least, own.most],
        "speedup": gain.median,
        "speedup_spread": [gain.least, gain.most],
        "predicted_speedup": None,
        **acceptance(stats),
        "num_tokens": stats.num_tokens,
        "num_rounds": stats.num_drafts,
        "by_kind": by_kind,
        "repeats_equal": answers.repeatable,
        "compile_seconds": answers.compile_seconds,
        "prefill_seconds": answers.prefill_seconds,
    }


def round_row(parts: RoundParts, least_seconds: float) -> dict[str, Any]:
    """What is reported of a round.

    Args:
      parts: measured.
      least_seconds: that its one pass needs for reading alone.
    """
    return {
        "seconds": parts.round.median,
        "seconds_spread": [parts.round.least, parts.round.most],
        "plain_seconds": parts.plain_round.median,
        "num_drafted": parts.num_drafted,
        "num_cached": parts.num_cached,
        "parts": dict(parts.parts),
        # JSON has no infinity.
        "target_passes": [each if math.isfinite(each) else None for each in parts.target_passes],
        "least_seconds": least_seconds,
        "over_least": parts.round.median / least_seconds,
    }


def passes(row: dict) -> str:
    """The passes of the target in a round, in words.

    Example:
      >>> passes({"target_passes": [1.0, 1.0]}), passes({"target_passes": [1.0, None]})
      ('1', '1 to any number')
    """
    least, most = row["target_passes"]
    return f"{least:g}" if least == most else f"{least:g} to {'any number' if most is None else f'{most:g}'}"


def rounded(value: Any) -> Any:
    """Floats to ``DIGITS`` significant digits, in whatever JSON holds.

    Example:
      >>> rounded({"a": [1.23456, 7], "b": 0.000123456})
      {'a': [1.235, 7], 'b': 0.0001235}
    """
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
