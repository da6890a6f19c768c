"""The distribution of enumerated outputs beside the target's."""

import dataclasses
import math

import numpy as np

from specjax.certificates.enumerator import Branches
from specjax.decoding.state import Finish

TOLERANCE = 1e-12
"""Largest error of a lossless rule: what remains is float64's rounding."""


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What an enumeration found.

    Attributes:
      lossless: whether ``max_error`` is at most 1e-12.
      max_error: the largest difference between the probability of an output, of any length, and the target's; for rules certified
        by identity, the share of outputs that differ from plain decoding's.
      expected_tokens: mean number of tokens that a round emits.
      counterexample: in words, the smallest output that is wrong; None if there is none.
    """

    lossless: bool
    max_error: float
    expected_tokens: float
    counterexample: str | None


def compare(branches: Branches, starts, laws, noise, rounds: int, stops: tuple[int, ...]) -> Certificate:
    """What the outputs in ``branches`` say.

    Args:
      branches: the last states, with their origins among ``starts``.
      starts: prompts, each with how many tokens may follow it.
      laws: for each start the target's law of its outputs.
      noise: [starts, positions, V] shared noise with which plain decoding's tokens are expected; None: the target's law is.
      rounds: how many the outputs took.
      stops: ids behind which nothing may come.
    """
    errors, counterexamples, emitted = np.zeros(len(starts)), [], 0.0
    by_origin: list[list[tuple[tuple[int, ...], float, int]]] = [[] for _ in starts]
    for row, origin in enumerate(branches.origins):
        place = slice(len(starts[origin].prompt), branches.state.lengths[row])
        output = tuple(int(token) for token in branches.state.tokens[row, place])
        by_origin[origin].append((output, branches.probabilities[row], branches.state.finish[row]))
        emitted += branches.probabilities[row] * len(output)
    for origin, (start, outputs) in enumerate(zip(starts, by_origin, strict=True)):
        found = [(output, probability) for output, probability, _ in outputs]
        if noise is not None:
            wrong = [_differs(found, laws[start].plain(noise[origin, len(start.prompt) :]))]
        else:
            wrong = [_deviates(found, laws[start])]
        wrong.append(_ends_wrongly(outputs, stops))
        errors[origin] = max(error for error, _ in wrong)
        for _, counterexample in wrong:
            if counterexample is not None:
                length, words = counterexample
                counterexamples.append((length, origin, f"after the prompt {start.prompt}, {words}"))
    max_error = float(np.mean(errors) if noise is not None else np.max(errors))
    return Certificate(
        lossless=max_error <= TOLERANCE,
        max_error=max_error,
        expected_tokens=float(emitted / len(starts) / rounds),
        counterexample=min(counterexamples)[2] if counterexamples else None,
    )


def _ends_wrongly(outputs, stops: tuple[int, ...]):
    """Probability of an output that goes on behind a stop id, or does not count as stopped at one; and the shortest such."""
    wrong = []
    for output, probability, finish in outputs:
        first = next((place for place, token in enumerate(output) if token in stops), None)
        if (first is not None) != (finish == Finish.STOP) or first not in (None, len(output) - 1):
            wrong.append((len(output), output, probability))
    if not wrong:
        return 0.0, None
    length, output, _ = min(wrong)
    share = float(sum(probability for *_, probability in wrong))
    return share, (length, f"{output} does not end at the first of the ids {stops}")


def _differs(found, plain: tuple[int, ...]):
    """Probability of an output that plain decoding does not emit, and the shortest such."""
    wrong = [(output, probability) for output, probability in found if output != plain[: len(output)]]
    share = float(sum(probability for _, probability in wrong))
    if not wrong:
        return share, None
    output, probability = min(wrong, key=lambda pair: (len(pair[0]), pair[0]))
    words = f"{output} comes with probability {probability:.6g}; with the same noise plain decoding emits {plain[: len(output)]}"
    return share, (len(output), words)


def _deviates(found, law):
    """Largest difference in the probability of an output of any length, and the shortest that differs."""
    actual = np.zeros(law.vocab_size**law.length)
    for output, probability in found:
        places, completions = law.completed(output)
        actual[places] += probability * completions
    expected = np.prod(law.conditional, axis=1)
    error, counterexample = 0.0, None
    for length in range(law.length + 1):
        has = actual.reshape(law.vocab_size**length, -1).sum(axis=1)
        wants = expected.reshape(law.vocab_size**length, -1).sum(axis=1)
        differences = np.abs(has - wants)
        # A NaN is an error, not a comparison that is false.
        error = max(error, math.inf if np.isnan(differences).any() else float(differences.max()))
        wrong = np.flatnonzero(~(differences <= TOLERANCE))
        if counterexample is None and len(wrong):
            number = int(wrong[0])
            output = tuple(int(digit) for digit in np.unravel_index(number, (law.vocab_size,) * length)) if length else ()
            words = f"{output} has probability {has[number]:.6g} instead of {wants[number]:.6g}"
            counterexample = (length, words)
    return error, counterexample
