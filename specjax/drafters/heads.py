"""Trained heads as drafters: :func:`medusa` and :func:`eagle`; a distilled draft model goes through ``draft_model``."""

import dataclasses

from specjax.drafters.base import BoundDrafter, check_num_speculative_tokens
from specjax.drafters.eagle import Eagle, GrowingEagle
from specjax.drafters.medusa import Medusa
from specjax.drafters.tree_growing import check_growth
from specjax.models.eagle_head import EagleHead
from specjax.models.loaded import Model
from specjax.models.medusa_heads import MedusaHeads
from specjax.models.trained_head import TrainedHead, target_functions
from specjax.row_trees import TreeBounds
from specjax.tree import DraftTree

DEFAULT_LENGTH = 4
"""Draft tokens per round of an autoregressive head if neither call nor head says anything."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class HeadDrafter(BoundDrafter):
    """A drafter whose parameters are a trained head's and, beside them, some of its target's.

    Attributes:
      head: what was trained, of any kind.
    """

    head: TrainedHead

    def check_target(self, target: Model) -> None:
        """Raises ValueError if the head was trained for another target."""
        self.head.target.check(target, self.name)

    def params_for(self, target: Model):
        """See :meth:`BoundDrafter.params_for`; the head is brought to the target's dtype.

        Beside an int8 target it is in the dtype of the states that it reads.
        """
        dtype = target_functions(target).embedding_matrix(target.params).dtype
        return {"own": self.head.params_in(dtype), "shared": self.head.shared(target)}


def medusa(heads: TrainedHead, num_speculative_tokens: int | None = None, *, tree: DraftTree | None = None) -> BoundDrafter:
    """A drafter of Medusa heads (Cai et al. 2024, arXiv:2401.10774).

    Args:
      heads: from :func:`specjax.load_head`, or trained by ``specjax.training``.
      num_speculative_tokens: K for a chain, at most the number of heads.
      tree: a shape with branches; a node's depth is the head that its token comes from. If neither is given, the heads' own tree,
        else a chain of all of them.

    Raises:
      ValueError: names the argument, its value and what would be right.
    """
    if not isinstance(heads, TrainedHead) or not isinstance(heads.functions, MedusaHeads):
        raise ValueError(f"medusa: heads is {heads!r:.200}; it must be trained Medusa heads (see specjax.load_head)")
    config = heads.functions.config
    tree = _tree("medusa", heads, num_speculative_tokens, tree, config.num_heads)
    if tree.depth > config.num_heads:
        raise ValueError(f"medusa: the tree is {tree.depth} deep; there are {config.num_heads} heads, one for each depth")
    functions = Medusa(heads.functions, heads.feature_layers, tree)
    return HeadDrafter(functions, name=f"medusa({heads.target.name})", head=heads)


def eagle(
    head: TrainedHead,
    num_speculative_tokens: int | None = None,
    *,
    tree: DraftTree | TreeBounds | None = None,
    branching: int | None = None,
) -> BoundDrafter:
    """A drafter that runs an autoregressive head (Li et al. 2024, arXiv:2401.15077).

    Args:
      head: from :func:`specjax.load_head`, or trained by ``specjax.training``.
      num_speculative_tokens: K for a chain, 0 to 32.
      tree: a shape with branches; or bounds, within which the tree is shaped for every row while it is drafted, of the tokens
        that are most likely (EAGLE-2, Li et al. 2024, arXiv:2406.16858). If neither is given, the head's own tree, else a chain
        of 4.
      branching: with bounds, how many tokens behind a node become candidates, and how many nodes of a depth go on; at most 8 and
        no more than there are nodes unless given.

    Raises:
      ValueError: names the argument, its value and what would be right.
    """
    if not isinstance(head, TrainedHead) or not isinstance(head.functions, EagleHead):
        raise ValueError(f"eagle: head is {head!r:.200}; it must be a trained autoregressive head (see specjax.load_head)")
    name = f"eagle({head.target.name})"
    if isinstance(tree, TreeBounds):
        if num_speculative_tokens is not None:
            raise ValueError(f"eagle: num_speculative_tokens is {num_speculative_tokens!r} beside a tree; give one of them")
        grown = GrowingEagle(head.functions, head.feature_layers, tree, check_growth("eagle", tree, branching))
        return HeadDrafter(grown, name=name, head=head)
    if branching is not None:
        raise ValueError(f"eagle: branching is {branching!r}; it is for trees within bounds (specjax.row_trees.TreeBounds)")
    tree = _tree("eagle", head, num_speculative_tokens, tree, DEFAULT_LENGTH)
    return HeadDrafter(Eagle(head.functions, head.feature_layers, tree), name=name, head=head)


def _tree(owner: str, head: TrainedHead, num_speculative_tokens, tree, default: int) -> DraftTree:
    if num_speculative_tokens is not None and tree is not None:
        raise ValueError(f"{owner}: num_speculative_tokens is {num_speculative_tokens!r} beside a tree; give one of them")
    if tree is not None:
        if not isinstance(tree, DraftTree) or tree.num_nodes == 0:
            raise ValueError(f"{owner}: tree is {tree!r}; it must be a DraftTree of at least one draft node")
        return tree
    if num_speculative_tokens is None:
        return head.tree or DraftTree.chain(default)
    return DraftTree.chain(check_num_speculative_tokens(num_speculative_tokens))
