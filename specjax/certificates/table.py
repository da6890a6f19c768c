"""Every rule with every law and shape: certified, or refused with a reason."""

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from specjax.certificates.certificate import certify
from specjax.certificates.comparison import Certificate
from specjax.row_trees import TreeBounds
from specjax.tree import NO_PARENT, ROOT, DraftTree, Law
from specjax.verification import CHAIN, ROW_TREE, RULES, SHAPES, TREE, Rule, why_not

T = TypeVar("T")
R = TypeVar("R")

MOST_THREADS = 4
"""More would wait for Python, which traces in one thread at a time."""


def fork(depth: int) -> DraftTree:
    """The smallest tree of this depth: two children of the root, of which the first goes on.

    Raises:
      ValueError: ``depth`` is below 1.

    Example:
      >>> fork(3).parents
      (-1, 0, 0, 1, 3)
    """
    if depth < 1:
        raise ValueError(f"fork: depth is {depth!r}; it must be at least 1")
    return DraftTree((NO_PARENT, ROOT, ROOT, 1, *range(3, depth + 1))[: depth + 2])


@dataclasses.dataclass(frozen=True)
class Cell:
    """One rule, for drafts of one law and shape.

    Attributes:
      rule: the rule.
      law: how all draft tokens are drawn.
      shape: one of ``SHAPES``.
    """

    rule: Rule
    law: Law
    shape: str

    @property
    def refusal(self) -> str | None:
        """Why the rule does not take such drafts; None if it does."""
        return why_not(self.rule, self.shape, self.law)

    def certify(self, *, vocab_size: int = 3, depth: int = 2, rounds: int = 2, seed: int = 0) -> Certificate:
        """The certificate of a draft model that drafts so; arguments as for :func:`specjax.certify`.

        Raises:
          ValueError: the rule refuses such drafts.

        Example:
          >>> Cell(RULES["match"], Law.DETERMINISTIC, CHAIN).certify(vocab_size=2, depth=1, rounds=1).lossless
          True
        """
        # As many nodes in both kinds of trees.
        tree = {CHAIN: None, TREE: fork(depth), ROW_TREE: TreeBounds(num_nodes=depth + 1, depth=depth)}[self.shape]
        return certify(self.rule, vocab_size=vocab_size, depth=depth, rounds=rounds, seed=seed, law=self.law, tree=tree)


def in_threads(function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[T, R]]:
    """(item, result) of each of ``items``, in their order; several at a time, as most of a certificate's time is compiling.

    Example:
      >>> list(in_threads(abs, [3, -2]))
      [(3, 3), (-2, 2)]
    """
    with concurrent.futures.ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        try:
            yield from zip(items, pool.map(function, items), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)


def cells(rules: Iterable[Rule] | None = None) -> list[Cell]:
    """All cells of the table of ``rules``; None is all built-in ones.

    Example:
      >>> [cell.law.value for cell in cells([RULES["kseq"]]) if cell.refusal is None]
      ['independent', 'independent']
    """
    rules = RULES.values() if rules is None else rules
    return [Cell(rule, law, shape) for rule in rules for law in Law for shape in SHAPES]
