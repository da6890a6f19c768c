"""Acceptance statistics, and what they say about speed.

Names are vLLM's. ``num_drafts`` counts every round of a row, empty drafts included; all nodes of a tree count as drafted and
positions are depths; ``mean_acceptance_length`` is emitted tokens over rounds, the correction or bonus token included; a rate
with nothing drafted is 0.0.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class SourceStats:
    """What became of the drafts of one of the drafters that a stack is made of.

    Attributes:
      num_drafts: rounds in which it drafted something.
      num_draft_tokens: tokens that it drafted.
      num_accepted_tokens: those that were accepted and emitted.
      num_tokens: tokens emitted in these rounds, corrections and bonus tokens included.

    Example:
      >>> SourceStats(num_drafts=2, num_draft_tokens=8, num_accepted_tokens=6, num_tokens=8).mean_acceptance_length
      4.0
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_tokens: int = 0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per round."""
        return self.num_tokens / self.num_drafts if self.num_drafts else 0.0

    def to_dict(self) -> dict:
        """Counts and rates, ready for JSON."""
        rates = ("draft_acceptance_rate", "mean_acceptance_length")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in rates}


@dataclasses.dataclass(frozen=True)
class Stats:
    """Statistics of one request, or of several summed.

    Attributes:
      num_drafts: rounds.
      num_draft_tokens: tokens drafted.
      num_accepted_tokens: drafted tokens that were accepted and emitted.
      num_accepted_tokens_per_pos: the same by depth in the draft.
      num_tokens: tokens emitted.
      num_tested: places where a drafted token was tested; the rest of a draft lies behind its first rejection.
      overlap_sum: sum of sum(min(p, q)) over the tested places; None where q is not known.
      by_source: counts by the drafter that a draft came from, for a drafter that is made of several; rounds that drafted nothing
        belong to none.
      prefill_seconds: time of the prompt passes of the batch that the request ran in.
      decode_seconds: time of its rounds, compilation apart.
      compile_seconds: time of compilation before them.
      plain_round_seconds: median time of a round that drafted nothing; None where rounds were not timed one by one, or none was
        of this kind.
      drafting_round_seconds: median time of a round that drafted something, likewise.

    Example:
      >>> stats = Stats(num_drafts=4, num_draft_tokens=16, num_accepted_tokens=8, num_accepted_tokens_per_pos=(4, 2, 1, 1),
      ...               num_tokens=12)
      >>> stats.draft_acceptance_rate, stats.mean_acceptance_length
      (0.5, 3.0)
      >>> Stats().draft_acceptance_rate
      0.0
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_tokens: int = 0
    num_tested: int = 0
    overlap_sum: float | None = None
    by_source: dict[str, SourceStats] = dataclasses.field(default_factory=dict)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    compile_seconds: float = 0.0
    plain_round_seconds: float | None = None
    drafting_round_seconds: float | None = None

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per round."""
        return self.num_tokens / self.num_drafts if self.num_drafts else 0.0

    @property
    def tested_acceptance_rate(self) -> float:
        """Accepted over tested: the alpha of the speedup formula."""
        return self.num_accepted_tokens / self.num_tested if self.num_tested else 0.0

    @property
    def overlap(self) -> float | None:
        """Mean of sum(min(p, q)) over the tested places: what token verification accepts in expectation. None: unknown."""
        return None if self.overlap_sum is None or not self.num_tested else self.overlap_sum / self.num_tested

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over the time of the rounds."""
        return self.num_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def to_dict(self) -> dict:
        """Counts and rates, ready for JSON."""
        rates = ("draft_acceptance_rate", "mean_acceptance_length", "tested_acceptance_rate", "overlap", "tokens_per_second")
        values = dataclasses.asdict(self)
        values.pop("overlap_sum")
        values["num_accepted_tokens_per_pos"] = list(self.num_accepted_tokens_per_pos)
        values["by_source"] = {name: source.to_dict() for name, source in self.by_source.items()}
        return values | {name: getattr(self, name) for name in rates}


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """Times of one completion, in seconds.

    Attributes:
      queue_time: from its submission until it moved into a slot.
      time_to_first_token: from its submission until the host had its first tokens.
      time_per_output_token: mean over the tokens behind the first ones; None if none came behind them.
      e2e_latency: from its submission to its end.
    """

    queue_time: float
    time_to_first_token: float
    time_per_output_token: float | None
    e2e_latency: float


def total(stats: Iterable[Stats]) -> Stats:
    """The sum of several requests' statistics. Times are those of the longest: the requests of a batch ran together.

    Example:
      >>> total([Stats(num_drafts=1, num_tokens=2, decode_seconds=3.0), Stats(num_drafts=2, num_tokens=3, decode_seconds=3.0)])
      ... # doctest: +ELLIPSIS
      Stats(num_drafts=3, ..., num_tokens=5, ..., decode_seconds=3.0, ...)
    """
    stats = list(stats)
    depth = max((len(s.num_accepted_tokens_per_pos) for s in stats), default=0)
    by_depth = np.zeros(depth, int)
    for s in stats:
        by_depth[: len(s.num_accepted_tokens_per_pos)] += np.array(s.num_accepted_tokens_per_pos, int)
    known = [s.overlap_sum for s in stats if s.overlap_sum is not None]
    counts: dict[str, Any] = {
        name: sum(getattr(s, name) for s in stats)
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_tokens", "num_tested")
    }
    times: dict[str, Any] = {
        name: max((getattr(s, name) for s in stats), default=0.0)
        for name in ("prefill_seconds", "decode_seconds", "compile_seconds")
    }
    return Stats(
        num_accepted_tokens_per_pos=tuple(by_depth.tolist()),
        overlap_sum=sum(known) if known and len(known) == len(stats) else None,
        by_source=_summed_by_source(stats),
        **counts,
        **times,
    )


def _summed_by_source(stats: list[Stats]) -> dict[str, SourceStats]:
    names = dict.fromkeys(name for s in stats for name in s.by_source)
    counts = [field.name for field in dataclasses.fields(SourceStats)]
    found = {name: [s.by_source[name] for s in stats if name in s.by_source] for name in names}
    return {name: SourceStats(*(sum(getattr(f, count) for f in found[name]) for count in counts)) for name in names}


def expected_tokens(acceptance: float, num_draft: int) -> float:
    """Expected tokens per round, (1 - a^(K+1)) / (1 - a), where every draft token is accepted with chance ``acceptance``.

    Leviathan et al. 2023 (arXiv:2211.17192), equation 1; the correction or bonus token is included.

    Example:
      >>> expected_tokens(0.5, 3)
      1.875
      >>> expected_tokens(1.0, 3)
      4.0
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"expected_tokens: acceptance is {acceptance}; it must be in [0, 1]")
    return float(sum(acceptance**i for i in range(num_draft + 1)))


def predicted_speedup(acceptance: float, num_draft: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Expected speedup over plain decoding (Leviathan et al. 2023, arXiv:2211.17192, theorem 3.8).

    Args:
      acceptance: chance that a tested draft token is accepted.
      num_draft: K.
      draft_cost: time of drafting one token over the time of a plain step of the target, c.
      verify_cost: time of the verify pass over the time of a plain step. The published formula takes 1, which holds where a
        pass is bound by reading the weights; on a CPU it is measured.

    Example:
      >>> round(predicted_speedup(0.8, 4, draft_cost=0.05), 2)
      2.8
    """
    return expected_tokens(acceptance, num_draft) / (num_draft * draft_cost + verify_cost)


def explain(plain: Stats, speculative: Stats, num_draft: int = 0, propose_seconds: float | None = None) -> list[str]:
    """Plain sentences on what speculation gained or lost, and why.

    Args:
      plain: statistics without speculation, its rounds timed one by one.
      speculative: statistics with it, same prompt and settings.
      num_draft: K, draft tokens per round.
      propose_seconds: measured time of one proposal (``specjax.decoding.propose_seconds``); None: not measured.
    """
    speedup = speculative.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0
    lines = [
        f"{speculative.num_draft_tokens} tokens were drafted and {speculative.num_accepted_tokens} accepted "
        f"({speculative.draft_acceptance_rate:.0%}); a round emitted {speculative.mean_acceptance_length:.2f} tokens.",
        f"Measured speedup {speedup:.2f} ({speculative.tokens_per_second:.1f} over {plain.tokens_per_second:.1f} tokens/s).",
    ]
    if speculative.overlap is not None:
        lines.append(
            f"Draft and target distributions overlap by {speculative.overlap:.2f} where a token was tested; "
            f"{speculative.tested_acceptance_rate:.2f} of the tested tokens were accepted."
        )
    step, drafting = plain.plain_round_seconds, speculative.drafting_round_seconds
    if num_draft and propose_seconds is not None and step and drafting:
        acceptance = speculative.tested_acceptance_rate
        draft_cost = propose_seconds / num_draft / step
        verify_cost = max(drafting - propose_seconds, 0.0) / step
        published = predicted_speedup(acceptance, num_draft, draft_cost)
        measured = predicted_speedup(acceptance, num_draft, draft_cost, verify_cost)
        lines.append(
            f"Drafting a token costs {draft_cost:.3f} of a plain step (of {step * 1e3:.0f} ms), verifying {num_draft} costs "
            f"{verify_cost:.2f}. With {acceptance:.0%} of the tested tokens accepted the published formula, which counts "
            f"verifying as one plain step, predicts a speedup of {published:.2f} for rounds that draft {num_draft}; with the "
            f"measured verify pass it is {measured:.2f}."
        )
    if speedup < 1:
        lines.append(_why_lost(speculative, step, drafting))
    return lines


def _why_lost(speculative: Stats, step: float | None, drafting: float | None) -> str:
    if not speculative.num_draft_tokens:
        return "Speculation gained nothing: nothing was drafted, so every round was a plain step with a search before it."
    length = speculative.mean_acceptance_length
    if not step or not drafting:
        price = "fewer than a verify pass and the drafting cost in plain steps"
    else:
        price = f"while a round that drafts costs {drafting / step:.2f} plain steps"
    return (
        f"Speculation lost here: a round emitted only {length:.2f} tokens, {price}. Fewer draft tokens, or none, suit such text."
    )
