"""What all drafters share that draw a tree of a fixed shape from outputs of their own.

Level by level: the outputs at all nodes of one depth that have children, then the children of each. Where the outputs come from
is the drafter's own affair: a pass of a model, heads that spoke of all depths at once.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax.choices import Choices
from specjax.drafters.base import Context
from specjax.drafters.draw import DRAWN, draw_children, evenly, most_likely, only_where, softened
from specjax.sampling.path import tree_paths
from specjax.tree import ROOT, Draft, DraftTree, Law

LAWS = (Law.WITHOUT_REPLACEMENT, Law.INDEPENDENT, Law.COUPLED, Law.DETERMINISTIC)
"""What children can be drawn by."""


@dataclasses.dataclass(frozen=True)
class Level:
    """The nodes of one depth that have children.

    Attributes:
      depth: theirs; 0 is the root's.
      inner: the nodes.
      fed: the draft nodes that a model is fed to know the outputs at ``inner``: these and their ancestors; empty for the root.
      mask: [fed, fed] bool, which of them each attends to.
    """

    depth: int
    inner: tuple[int, ...]
    fed: tuple[int, ...]
    mask: np.ndarray = dataclasses.field(compare=False)

    @property
    def inner_of_fed(self) -> np.ndarray:
        """Where ``inner`` stand in ``fed``."""
        return np.array([self.fed.index(node) for node in self.inner])


@functools.lru_cache(maxsize=64)
def levels(tree: DraftTree) -> tuple[Level, ...]:
    """The levels of a tree, from the root down.

    Example:
      >>> [(level.inner, level.fed) for level in levels(DraftTree((-1, 0, 0, 1, 3)))]
      [((0,), ()), ((1,), (1,)), ((3,), (1, 3))]
    """
    found = []
    by_depth = sorted(tree.inner_nodes, key=lambda node: tree.depths[node])
    for depth, nodes in itertools.groupby(by_depth, lambda node: tree.depths[node]):
        inner = tuple(nodes)
        fed = tuple(sorted({ancestor for node in inner for ancestor in tree.paths[node]}))
        found.append(Level(depth, inner, fed, tree.ancestor_mask[np.ix_(fed, fed)]))
    return tuple(found)


class TreeDrafting:
    """Draws a tree; for frozen dataclasses with these two fields.

    Attributes:
      tree: topology of every proposal.
      laws: a law for every draft node; None until a run fixes one.
    """

    tree: DraftTree
    laws: tuple[Law, ...] | None
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]

    @property
    def fixed_laws(self) -> tuple[Law, ...]:
        """``laws``, which a run has fixed before anything is drawn."""
        assert self.laws is not None, "with_law comes first"
        return self.laws

    @property
    def law_choices(self) -> tuple[Law, ...]:
        """See :class:`specjax.drafters.Drafter`; of a tree whose laws are fixed only those."""
        return LAWS if self.laws is None else tuple(dict.fromkeys(self.laws))

    def with_law(self, law):
        """See :meth:`specjax.drafters.Drafter.with_law`; a tree whose laws are fixed already keeps them."""
        return self if self.laws is not None else dataclasses.replace(self, laws=(law,) * self.tree.num_nodes)

    def asked(self, num_draft: jax.Array) -> jax.Array:
        """[B, N] bool, the first ``num_draft`` [B] nodes."""
        return jnp.arange(self.tree.num_nodes)[None, :] < num_draft[:, None]

    def nothing_drawn(self, context: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What :meth:`draw_tree` returns, of nothing: tokens [B, N], valid [B, N] and log q [B, P, V]."""
        batch = context.lengths.shape[0]
        return (
            jnp.zeros((batch, self.tree.num_nodes), jnp.int32),
            jnp.zeros((batch, self.tree.num_nodes), bool),
            jnp.zeros((batch, len(self.tree.inner_nodes), context.logits_width), context.logits_dtype),
        )

    def draft(self, tokens: jax.Array, valid: jax.Array, log_probs: jax.Array) -> Draft:
        """The proposal of what was drawn."""
        return Draft(tokens, valid, log_probs, self.tree, self.fixed_laws).checked()

    def draw_tree(
        self,
        context: Context,
        choices: Choices,
        asked: jax.Array,
        carried: Any,
        log_probs_at: Callable[[Level, Any, jax.Array, Context], tuple[jax.Array, Any]],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Draws what is asked.

        Args:
          context: of the round.
          choices: where randomness comes from.
          asked: [B, N] bool, the nodes that are to be drafted.
          carried: what ``log_probs_at`` hands on from level to level.
          log_probs_at: from a level, what is carried, the tokens [B, N] so far and the context (greedy rows at temperature 1 in
            it) to log q [B, inner, V] at the level's nodes and what is carried on.

        Returns:
          tokens [B, N] int32, valid [B, N] bool and log q [B, P, V].
        """
        tree, batch = self.tree, asked.shape[0]
        tokens, valid, log_probs = self.nothing_drawn(context)
        greedy, soft_context = context.sampling.temperature <= 0, softened(context)
        for level in levels(tree):
            places = np.array(level.inner)
            children = np.array([child for node in level.inner for child in tree.children[node]])
            nothing = (
                jnp.zeros((batch, len(children)), jnp.int32),
                jnp.zeros((batch, len(children)), bool),
                jnp.zeros((batch, len(level.inner), context.logits_width), context.logits_dtype),
                carried,
            )

            def draw(nothing, level=level, tokens=tokens, valid=valid):
                ranking, carried = log_probs_at(level, nothing[-1], tokens, soft_context)
                level_log_probs = jnp.where(greedy[:, None, None], most_likely(ranking), ranking)
                return *self._children(choices, level, asked, valid, level_log_probs, ranking, greedy), carried

            # Nothing for a level that no budget reaches.
            needed = jnp.any(asked[:, children - 1])
            drawn, possible, level_log_probs, carried = jax.lax.cond(needed, draw, lambda nothing: nothing, nothing)
            tokens = tokens.at[:, children - 1].set(drawn)
            valid = valid.at[:, children - 1].set(possible)
            log_probs = log_probs.at[:, tree.inner_index[places]].set(level_log_probs)
        return tokens, valid & asked, log_probs

    def _children(self, choices, level, asked, valid, log_probs, ranking, greedy):
        """Tokens [B, children] of the children of the level's nodes, which are drafted [B, children], log q [B, inner, V].

        Args:
          choices: where randomness comes from.
          level: the level.
          asked: [B, N], what is to be drafted.
          valid: [B, N], what was drafted at smaller depths.
          log_probs: [B, inner, V], log q at the nodes.
          ranking: [B, inner, V], the same before it was made one-hot for greedy rows.
          greedy: [B] bool.
        """
        tree = self.tree
        noise = None
        if any(self.fixed_laws[child - 1] is Law.COUPLED for node in level.inner for child in tree.children[node]):
            noise = self._noise(choices, level.depth, log_probs)
        drawn, drafted, proposed = [], [], []
        for place, node in enumerate(level.inner):
            nodes = tree.children[node]
            drawing = asked[:, nodes[0] - 1] & (valid[:, node - 1] if node > ROOT else True)
            laws = [self.fixed_laws[child - 1] for child in nodes]
            row_log_probs = only_where(drawing, log_probs[:, place])
            tokens, possible = draw_children(choices, laws, nodes, row_log_probs, noise, ranking[:, place], greedy)
            drawn.append(tokens)
            drafted.append(possible & drawing[:, None])
            node_log_probs = log_probs[:, place]
            if len(nodes) > 1 and any(law in DRAWN for law in laws):
                # A one-hot q would leave nothing to the second child.
                even = evenly(tokens, possible, node_log_probs.shape[-1], node_log_probs.dtype)
                node_log_probs = jnp.where(greedy[:, None], even, node_log_probs)
            proposed.append(node_log_probs)
        return jnp.concatenate(drawn, axis=1), jnp.concatenate(drafted, axis=1), jnp.stack(proposed, axis=1)

    def _noise(self, choices, depth, log_probs):
        """[B, V] shared noise of children of nodes at ``depth``; 0 in rows whose ``log_probs`` [B, nodes, V] are all certain."""
        shape, dtype = (log_probs.shape[0], log_probs.shape[-1]), log_probs.dtype
        certain = jnp.all(jnp.max(log_probs, axis=-1) == 0, axis=-1)
        noise = jax.lax.cond(jnp.all(certain), lambda: jnp.zeros(shape, dtype), lambda: choices.gumbel(depth, shape[1], dtype))
        return jnp.where(certain[:, None], 0, noise)


def paths_at(tree: DraftTree, level: Level, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Path tokens [B, inner, D] and path lengths [inner] of a level's nodes; see :func:`specjax.sampling.path.tree_paths`."""
    path_tokens, path_lengths = tree_paths(tree, tokens)
    places = np.array(level.inner)
    return path_tokens[:, places], path_lengths[places]
