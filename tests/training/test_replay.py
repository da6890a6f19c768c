"""Replay against decoding that is written out."""

import numpy as np

from specjax.training.losses import NO_RANK
from specjax.training.replay import Ranks
from specjax.tree import DraftTree

# One text of 8 tokens, the prompt ends before token 1. ranks[d, r]: rank of token r + d + 1 seen from root r.
RANKS = Ranks([np.array([[9, 0, 0, 1, 0, 2, 0, NO_RANK], [9, 0, 1, 0, 0, 0, NO_RANK, NO_RANK]])], [1])


def test_tokens_per_round():
    # Root 1: tokens 2 and 3 (rank 0, 0), bonus 4. Root 4: token 5; token 6 too, bonus 7.
    assert RANKS.tokens_per_round(DraftTree.chain(2)) == 6 / 2
    # Root 1: 2, bonus 3. Root 3: rank 1, correction 4. Root 4: 5, bonus 6. Root 6: 7.
    assert RANKS.tokens_per_round(DraftTree.chain(1)) == 6 / 4
    # No draft: one token each.
    assert RANKS.tokens_per_round(DraftTree.chain(0)) == 1
    # From root 1 a first child that is a leaf: 2, 3. From root 3 rank 1, which goes on: 4, 5 and 6. From root 6: 7.
    assert RANKS.tokens_per_round(DraftTree((-1, 0, 0, 2))) == 6 / 3


def test_accuracies():
    # First places, roots 1 to 6: ranks 0 0 1 0 2 0. Behind a first rank below 2, roots 1 to 4: 0 1 0 0 (root 5's was 2).
    assert RANKS.accuracies(2).tolist() == [[4 / 6, 1 / 6], [3 / 4, 1 / 4]]
