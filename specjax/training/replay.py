"""What a head would have accepted on texts that the target wrote greedily: counted, without generating anything.

The places where the target's own best token is the text's (greedy texts) are walked as decoding would walk them: at every root
the head's ranks of the tokens that follow decide how far a chain or a tree gets. Behind a correct guess the text *is* the draft,
so one pass over the text holds all that is needed, at every depth.
"""

import dataclasses

import numpy as np

from specjax.training.batches import Batches
from specjax.training.losses import NO_RANK
from specjax.tree import ROOT, DraftTree


@dataclasses.dataclass(frozen=True, eq=False)
class Ranks:
    """Where the tokens of a text stand in a draft's order, seen from every root.

    Attributes:
      ranks: for each text [D, T] integers: ``ranks[d, r]`` is the rank that the guess for the token d + 1 places after root r
        gives to the token that came there; ``NO_RANK`` where there is none.
      first_roots: for each text the first root, its answer's first token, which the target drew at the end of the prompt.
    """

    ranks: list[np.ndarray]
    first_roots: list[int]

    @property
    def depth(self) -> int:
        """D."""
        return self.ranks[0].shape[0]

    def accuracies(self, num_ranks: int) -> np.ndarray:
        """[D, num_ranks] how often the token of each rank is the one, given that all before it on the path were there."""
        counts, totals = np.zeros((self.depth, num_ranks)), np.zeros(self.depth)
        for ranks, first in zip(self.ranks, self.first_roots, strict=True):
            reached = np.ones(ranks.shape[1] - first, bool)
            for d in range(self.depth):
                here = ranks[d, first:]
                there = reached & (np.arange(len(here)) < len(here) - d - 1)
                totals[d] += there.sum()
                counts[d] += np.bincount(here[there & (here < num_ranks)], minlength=num_ranks)
                # Whoever goes deeper came along a path that a tree can hold.
                reached = there & (here < num_ranks)
        return counts / np.maximum(totals, 1)[:, None]

    def tokens_per_round(self, tree: DraftTree) -> float:
        """Mean tokens of a round, the bonus or correction token included, walking each text from root to root."""
        num_tokens = num_rounds = 0
        for ranks, first in zip(self.ranks, self.first_roots, strict=True):
            root, end = first, ranks.shape[1] - 1
            while root < end:
                node, depth = ROOT, 0
                while depth < ranks.shape[0] and root + depth < end:
                    rank = ranks[depth, root]
                    children = tree.children[node]
                    if rank >= len(children):
                        break
                    node, depth = children[rank], depth + 1
                num_rounds += 1
                emitted = min(depth + 1, end - root)
                num_tokens += emitted
                root += emitted
        return num_tokens / max(num_rounds, 1)


def rank_texts(ranks_of_batch, batches: Batches) -> Ranks:
    """Ranks of all texts.

    Args:
      ranks_of_batch: from a batch to ranks [B, D, T], ``[:, d, t]`` that of token t seen from root t - d - 1.
      batches: texts with states.
    """
    ranks, first_roots = {}, {}
    for rows, size in batches.plan(None):
        by_token = np.asarray(ranks_of_batch(batches.batch(rows, size)))
        for place, row in enumerate(rows):
            length = int(batches.texts.lengths[row])
            shifted = np.full((by_token.shape[1], length), NO_RANK)
            for d in range(by_token.shape[1]):
                shifted[d, : max(0, length - d - 1)] = by_token[place, d, d + 1 : length]
            ranks[row] = shifted
            # The root of the first round is the answer's first token.
            first_roots[row] = int(batches.texts.prompt_lengths[row])
    order = sorted(ranks)
    return Ranks([ranks[row] for row in order], [first_roots[row] for row in order])
