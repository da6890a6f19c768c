"""Trees from measured accuracies: which nodes a draft of so many should have, and how many pay.

All of it runs on the host, once, before anything is compiled. Letters in shapes: D depths, R ranks (candidates of one node),
N draft nodes.

What is measured is ``accuracies`` [D, R]: entry (d, r) is the chance that, where a draft has been right up to depth d, the token
that is next is the draft's candidate of rank r. These are chances of events that exclude each other (of one place only one
candidate is right), so a row adds up to at most 1; cumulative top-k accuracies, as they are often published, are to be
differenced first. A node is then accepted with the product of the accuracies on its path, and a round emits::

    expected tokens = 1 + sum over the draft nodes of the product of accuracies down to the node

The 1 is the correction or bonus token.

* :func:`greedy_product_tree` adds the best next node (Medusa, Cai et al. 2024, arXiv:2401.10774, section 2.3.3).
* :func:`sequoia_tree` finds the best tree of a size and depth by dynamic programming (Sequoia, Chen et al. 2024,
  arXiv:2402.12374, section 3.1).
* :func:`best_tree` chooses size and depth for the hardware: most expected tokens per second with the *measured* cost of a verify
  pass by size (Sequoia, section 3.3). A CPU, where every token of a pass costs, and a TPU get different trees.

Children stand in the order of their ranks: child j of a node is its j-th best candidate.
"""

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence

import numpy as np

from specjax.numeric import is_real, is_whole
from specjax.tree import DraftTree

SLACK = 1e-6
"""By how much chances of exclusive events may add up to more than 1: they are measured and rounded."""


def expected_tokens(tree: DraftTree, accuracies) -> float:
    """Expected tokens per round of a tree, the correction or bonus token included.

    Args:
      tree: what is drafted.
      accuracies: [D, R], or [R] for the same at every depth; at least as deep as the tree and with a rank for every child.

    Raises:
      ValueError: names the argument, its value and what would be right.

    Example:
      >>> expected_tokens(DraftTree((-1, 0, 0, 1)), [0.5, 0.25])  # 1 + 0.5 + 0.25 + 0.5 * 0.5
      2.0
    """
    if not isinstance(tree, DraftTree):
        raise ValueError(f"expected_tokens: tree is {tree!r:.200}; it must be a DraftTree")
    table = _table("expected_tokens", "accuracies", accuracies, tree.depth)
    widest = max(map(len, tree.children))
    if table.shape[0] < tree.depth or table.shape[1] < widest:
        raise ValueError(
            f"expected_tokens: accuracies have shape {table.shape}; a tree of depth {tree.depth} with up to {widest} children "
            f"needs at least ({tree.depth}, {widest})"
        )
    chance = [1.0] * tree.size
    for node, children in enumerate(tree.children):
        for rank, child in enumerate(children):
            chance[child] = chance[node] * float(table[tree.depths[node], rank])
    return math.fsum(chance)


def greedy_product_tree(accuracies, num_nodes: int) -> DraftTree:
    """The tree that grows by the node most likely to be accepted, until it has ``num_nodes``.

    A node comes after its parent and after its better-ranked siblings. Where accuracies fall with the rank this is the best
    tree of its size; of equal nodes the shallower, then the better-ranked come first.

    Args:
      accuracies: [D, R], by depth and rank.
      num_nodes: N, draft nodes.

    Raises:
      ValueError: names the argument, its value and what would be right.

    Example:
      >>> greedy_product_tree([[0.6, 0.3], [0.5, 0.1]], num_nodes=4).parents  # 0.6, 0.3, 0.6 * 0.5, 0.3 * 0.5
      (-1, 0, 0, 1, 2)
    """
    table = _table("greedy_product_tree", "accuracies", accuracies)
    depth, width = table.shape
    _check_num_nodes("greedy_product_tree", num_nodes, depth, width)
    # Value, depth, path, and value of the parent: the best first, of equals the shallower, then the better-ranked.
    frontier: list[tuple[float, int, tuple[int, ...], float]] = [(-float(table[0, 0]), 1, (0,), 1.0)]
    chosen: list[tuple[int, ...]] = []
    while len(chosen) < num_nodes:
        value, level, path, before = heapq.heappop(frontier)
        chosen.append(path)
        rank = path[-1] + 1
        if rank < width:
            heapq.heappush(frontier, (-before * float(table[level - 1, rank]), level, (*path[:-1], rank), before))
        if level < depth:
            heapq.heappush(frontier, (value * float(table[level, 0]), level + 1, (*path, 0), -value))
    return DraftTree.from_choices(chosen)


def sequoia_tree(acceptance, num_nodes: int, max_depth: int | None = None) -> tuple[DraftTree, float]:
    """The tree of ``num_nodes`` draft nodes and at most ``max_depth`` levels with the most expected tokens, and these.

    With G(k, m, b) the most that m nodes can give, the first of them at depth k with b children::

        G(k, 1, 0) = 1
        G(k, m, b) = max over y of G(k, y, b - 1) + p(k, b) max over c of G(k + 1, m - y, c)

    Args:
      acceptance: [R], chance that the child of each rank is the accepted one, or [D, R] where it depends on the depth.
      num_nodes: N, draft nodes.
      max_depth: levels at most; None: as many as ``acceptance`` or the nodes allow.

    Raises:
      ValueError: names the argument, its value and what would be right.

    Example:
      >>> tree, tokens = sequoia_tree([0.7, 0.1], num_nodes=3)
      >>> tree.parents, round(tokens, 3)  # a chain: 1 + 0.7 + 0.49 + 0.343
      ((-1, 0, 1, 2), 2.533)
      >>> sequoia_tree([0.4, 0.3], num_nodes=3, max_depth=2)[0].parents
      (-1, 0, 0, 1)
    """
    name = "sequoia_tree"
    if max_depth is not None:
        _check_count(name, "max_depth", max_depth)
    _check_count(name, "num_nodes", num_nodes)
    table = _table(name, "acceptance", acceptance, num_nodes if max_depth is None else max_depth)
    if max_depth is not None and max_depth > len(table):
        raise ValueError(f"{name}: max_depth is {max_depth}; acceptance is given for {len(table)} depths")
    depth = min(len(table), num_nodes) if max_depth is None else max_depth
    _check_num_nodes(name, num_nodes, depth, table.shape[1])
    programme = _Programme(table[:depth], num_nodes)
    return programme.tree(num_nodes), float(programme.values[num_nodes])


class _Programme:
    """The dynamic programme of :func:`sequoia_tree` for all sizes at once.

    Args:
      table: [depth, R], acceptance by depth and rank.
      most: largest number of draft nodes.
    """

    def __init__(self, table: np.ndarray, most: int):
        # Indices are numbers of nodes, the one on top included; what cannot be built is -inf.
        alone = np.full(most + 2, -np.inf)
        alone[1] = 1.0
        # [m, y]: m nodes, of which y are left once the last child and all below it are taken away.
        below = np.arange(most + 2)[:, None] - np.arange(most + 2)[None, :]
        self._left: list[list[np.ndarray]] = []
        self._width: list[np.ndarray] = []
        deeper = alone
        for chances in reversed(table):
            best, width, left, value = alone.copy(), np.zeros(most + 2, int), [], alone
            for rank, chance in enumerate(chances):
                with_child = np.where(np.isneginf(deeper), -np.inf, chance * np.where(np.isneginf(deeper), 0, deeper))
                totals = np.where(below > 0, value[None, :] + with_child[np.maximum(below, 0)], -np.inf)
                left.append(np.argmax(totals, axis=1))
                value = np.max(totals, axis=1)
                width = np.where(value > best, rank + 1, width)
                best = np.maximum(value, best)
            self._left.insert(0, left)
            self._width.insert(0, width)
            deeper = best
        self.values = deeper[1:]
        """[most + 1], expected tokens of the best tree of so many draft nodes; -inf where there is none."""

    def tree(self, num_nodes: int) -> DraftTree:
        """The best tree of ``num_nodes`` draft nodes."""
        choices = []
        pending: list[tuple[tuple[int, ...], int]] = [((), num_nodes + 1)]
        while pending:
            path, size = pending.pop()
            level = len(path)
            width = int(self._width[level][size]) if level < len(self._width) else 0
            for rank in reversed(range(width)):
                left = int(self._left[level][rank][size])
                choices.append((*path, rank))
                pending.append(((*path, rank), size - left))
                size = left
        return DraftTree.from_choices(choices)


@dataclasses.dataclass(frozen=True)
class TreeChoice:
    """A tree, and what is expected of it.

    Attributes:
      tree: what to draft; of no draft nodes where plain decoding is the fastest.
      expected_tokens: per round, the correction or bonus token included.
      seconds: of a round: drafting and the verify pass.
    """

    tree: DraftTree
    expected_tokens: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Expected tokens over the seconds of a round."""
        return self.expected_tokens / self.seconds


def best_tree(accuracies, verify_seconds: Mapping[int, float], draft_seconds: float | Sequence[float] = 0.0) -> TreeChoice:
    """The tree with the most expected tokens per second on hardware whose costs were measured; plain decoding if none is faster.

    Args:
      accuracies: [D, R], by depth and rank.
      verify_seconds: measured seconds of a verify pass by its size (T, tokens of the pass: the root and the draft nodes); 1, a
        step of plain decoding, among them. Sizes between two measured ones cost what lies between them in proportion; none
        larger than the largest is considered.
      draft_seconds: seconds that drafting takes for every level of the tree, or one number for each of D levels (heads that
        run together cost all at the first).

    Raises:
      ValueError: names the argument, its value and what would be right.

    Example:
      >>> accuracies = [[0.6, 0.2], [0.5, 0.2]]
      >>> flat = best_tree(accuracies, {1: 0.010, 7: 0.011})  # a pass costs the same, whatever its size
      >>> flat.tree.num_nodes, round(flat.expected_tokens, 2)
      (6, 2.36)
      >>> steep = best_tree(accuracies, {1: 0.010, 2: 0.014, 7: 0.040})
      >>> steep.tree.parents, round(steep.tokens_per_second / 100, 3)  # over plain decoding
      ((-1, 0), 1.143)
      >>> best_tree(accuracies, {1: 0.010, 2: 0.020}).tree.num_nodes
      0
    """
    table = _table("best_tree", "accuracies", accuracies)
    levels = _level_seconds(draft_seconds, len(table))
    sizes, seconds = _measured(verify_seconds)
    most = min(sizes[-1] - 1, _capacity(*table.shape))
    verify = np.interp(np.arange(1, most + 2), sizes, seconds)
    best = TreeChoice(DraftTree.chain(0), 1.0, float(verify[0]))
    for depth in range(1, min(len(table), most) + 1):
        candidate = _Programme(table[:depth], most)
        cost = verify + sum(levels[:depth])
        rates = candidate.values / cost
        num_nodes = int(np.argmax(rates))
        # Strictly better: of equals the smaller, for the accuracies are measured and the smaller asks less of them.
        if num_nodes and rates[num_nodes] > best.tokens_per_second:
            tree = candidate.tree(num_nodes)
            best = TreeChoice(tree, float(candidate.values[num_nodes]), float(cost[num_nodes]))
    return best


def _table(function: str, name: str, values, depth: int | None = None) -> np.ndarray:
    """[D, R] chances; ``depth`` says how often a single row of them is repeated, None that there must be D rows."""
    wanted = "an array [D, R]" if depth is None else "an array [R] or [D, R]"
    try:
        table = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{function}: {name} is {values!r:.200}; it must be {wanted} of numbers") from error
    if table.ndim == 1 and depth is not None and table.size:
        table = np.broadcast_to(table, (depth, table.size))
    elif table.ndim != 2 or not table.size:
        raise ValueError(f"{function}: {name} has shape {table.shape}; it must be {wanted}, not empty")
    if not np.all((table >= 0) & (table <= 1)):
        wrong = table[~((table >= 0) & (table <= 1))]
        raise ValueError(f"{function}: {name} holds {wrong[0]:g}; chances lie in [0, 1]")
    for level, total in enumerate(table.sum(axis=1)):
        if total > 1 + SLACK:
            raise ValueError(
                f"{function}: {name} at depth {level} add up to {total:.6g}; of one place only one candidate is right, so they "
                "add up to at most 1 (of top-k accuracies take the differences)"
            )
    return table


def _check_count(function: str, name: str, value) -> None:
    if not is_whole(value) or value < 1:
        raise ValueError(f"{function}: {name} is {value!r}; it must be a whole number of at least 1")


def _check_num_nodes(function: str, num_nodes, depth: int, width: int) -> None:
    _check_count(function, "num_nodes", num_nodes)
    most = _capacity(depth, width)
    if num_nodes > most:
        raise ValueError(f"{function}: num_nodes is {num_nodes}; a tree of {depth} levels and {width} ranks has at most {most}")


def _capacity(depth: int, width: int) -> int:
    """Draft nodes of the full tree."""
    return sum(width**level for level in range(1, depth + 1))


def _level_seconds(draft_seconds, depth: int) -> list[float]:
    single = is_real(draft_seconds)
    levels = [draft_seconds] * depth if single else draft_seconds
    fits = isinstance(levels, Sequence | np.ndarray) and not isinstance(levels, str) and len(levels) == depth
    if not fits or not all(is_real(s) and 0 <= s < math.inf for s in levels):
        raise ValueError(
            f"best_tree: draft_seconds is {draft_seconds!r:.200}; it must be a number of at least 0, or {depth}, one per level"
        )
    return [float(s) for s in levels]


def _measured(verify_seconds) -> tuple[list[int], list[float]]:
    """Sizes in order, and their seconds."""
    right = isinstance(verify_seconds, Mapping) and all(
        is_whole(size) and size >= 1 and is_real(seconds) and 0 < seconds < math.inf for size, seconds in verify_seconds.items()
    )
    if not right or 1 not in verify_seconds:
        raise ValueError(
            f"best_tree: verify_seconds is {verify_seconds!r:.200}; it must map sizes of a pass, 1 among them, to seconds above 0"
        )
    sizes = sorted(verify_seconds)
    return [int(size) for size in sizes], [float(verify_seconds[size]) for size in sizes]
