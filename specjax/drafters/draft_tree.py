"""A small model drafts a tree: at every inner node the children are drawn from its output there.

The model's cache holds committed tokens only. Level by level the nodes that have children go through the model with their
ancestors, as a block behind the cache with the tree's mask; a pass over a few more tokens costs little where a
pass is bound by reading the weights, and nothing has to be cut out of the cache afterwards::

    level 0   the committed text up to the root        children of the root are drawn
    level 1   1 2                                      children of 1 and 2
    level 2   1 2, and their children that go on       children of those
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters.base import Context
from specjax.drafters.draw import draw_children, most_likely, only_where
from specjax.drafters.model_drafter import ModelDrafter
from specjax.sampling.path import tree_paths
from specjax.tree import ROOT, Draft, DraftTree, Law

LAWS = (Law.WITHOUT_REPLACEMENT, Law.INDEPENDENT, Law.COUPLED, Law.DETERMINISTIC)
"""What children can be drawn by."""


@dataclasses.dataclass(frozen=True)
class DraftTreeModel(ModelDrafter):
    """The drafter's functions; see :func:`specjax.drafters.draft_model`.

    Attributes:
      tree: topology of every proposal.
      laws: a law for every draft node; None until a run fixes one.
    """

    tree: DraftTree = dataclasses.field(default_factory=lambda: DraftTree.chain(1))
    laws: tuple[Law, ...] | None = None

    @property
    def steady_width(self) -> int:
        """See :class:`ModelDrafter`; accepted tokens were never in the cache."""
        return self.tree.depth + 1

    @property
    def most_emitted(self) -> int:
        """See :class:`ModelDrafter`."""
        return self.tree.depth + 1

    @property
    def law_choices(self) -> tuple[Law, ...]:
        """See :class:`specjax.drafters.Drafter`; of a tree whose laws are fixed only those."""
        return LAWS if self.laws is None else tuple(dict.fromkeys(self.laws))

    def with_law(self, law):
        """See :meth:`specjax.drafters.Drafter.with_law`; a tree whose laws are fixed already keeps them."""
        return self if self.laws is not None else dataclasses.replace(self, laws=(law,) * self.tree.num_nodes)

    def propose(self, params, state, context: Context, choices, num_draft):
        """See :meth:`specjax.drafters.Drafter.propose`."""
        tree, batch = self.tree, num_draft.shape[0]
        deep_enough = jnp.asarray(tree.depths[1:])[None, :] <= self.room(state, context)[:, None]
        asked = (jnp.arange(tree.num_nodes)[None, :] < num_draft[:, None]) & deep_enough
        nothing = (
            jnp.zeros((batch, tree.num_nodes), jnp.int32),
            jnp.zeros((batch, tree.num_nodes), bool),
            jnp.zeros((batch, len(tree.inner_nodes), context.logits_width), context.logits_dtype),
            state.cache,
        )
        tokens, valid, log_probs, cache = jax.lax.cond(
            jnp.any(asked),
            lambda nothing: self._draft(params, context, choices, asked, *nothing),
            lambda nothing: nothing,
            nothing,
        )
        return Draft(tokens, valid & asked, log_probs, tree, self.laws).checked(), state.replace(cache=cache)

    def _draft(self, params, context, choices, asked, tokens, valid, log_probs, cache):
        tree, batch = self.tree, asked.shape[0]
        cache, root_hidden = self.feed_up_to_root(params, cache, context, jnp.any(asked, axis=1))
        greedy, soft_context = context.sampling.temperature <= 0, self.softened(context)
        by_depth = sorted(tree.inner_nodes, key=lambda node: tree.depths[node])
        for _, inner in itertools.groupby(by_depth, lambda node: tree.depths[node]):
            inner = list(inner)
            children = np.array([child for node in inner for child in tree.children[node]])
            nothing = (
                jnp.zeros((batch, len(children)), jnp.int32),
                jnp.zeros((batch, len(children)), bool),
                jnp.zeros((batch, len(inner), context.logits_width), context.logits_dtype),
            )

            def level(nothing, inner=inner, tokens=tokens, valid=valid):
                del nothing
                hidden = root_hidden if inner == [ROOT] else self._outputs(params, context, cache, tokens, inner)
                path_tokens, path_lengths = tree_paths(tree, tokens)
                places = np.array(inner)
                ranking = self.log_probs(params, hidden, soft_context, path_tokens[:, places], path_lengths[places])
                level_log_probs = jnp.where(greedy[:, None, None], most_likely(ranking), ranking)
                return *self._children(choices, inner, asked, valid, level_log_probs, ranking), level_log_probs

            # No pass for a level that no budget reaches.
            needed = jnp.any(asked[:, children - 1])
            drawn, possible, level_log_probs = jax.lax.cond(needed, level, lambda nothing: nothing, nothing)
            tokens = tokens.at[:, children - 1].set(drawn)
            valid = valid.at[:, children - 1].set(possible)
            log_probs = log_probs.at[:, tree.inner_index[inner]].set(level_log_probs)
        return tokens, valid, log_probs, cache

    def _children(self, choices, inner, asked, valid, log_probs, ranking):
        """Tokens [B, children] of the children of the nodes ``inner``, all of one depth, and which are drafted [B, children].

        Args:
          choices: where randomness comes from.
          inner: nodes with children.
          asked: [B, N], what is to be drafted.
          valid: [B, N], what was drafted at smaller depths.
          log_probs: [B, inner, V], log q at the nodes.
          ranking: [B, inner, V], the same before it was made one-hot for greedy rows.
        """
        tree = self.tree
        noise = None
        if any(self.laws[child - 1] is Law.COUPLED for node in inner for child in tree.children[node]):
            noise = self._noise(choices, tree.depths[inner[0]], log_probs)
        drawn, drafted = [], []
        for place, node in enumerate(inner):
            nodes = tree.children[node]
            drawing = asked[:, nodes[0] - 1] & (valid[:, node - 1] if node > ROOT else True)
            laws = [self.laws[child - 1] for child in nodes]
            row_log_probs = only_where(drawing, log_probs[:, place])
            tokens, possible = draw_children(choices, laws, nodes, row_log_probs, noise, ranking[:, place])
            drawn.append(tokens)
            drafted.append(possible & drawing[:, None])
        return jnp.concatenate(drawn, axis=1), jnp.concatenate(drafted, axis=1)

    def _noise(self, choices, depth, log_probs):
        """[B, V] shared noise of children of nodes at ``depth``; 0 in rows whose ``log_probs`` [B, nodes, V] are all certain."""
        shape, dtype = (log_probs.shape[0], log_probs.shape[-1]), log_probs.dtype
        certain = jnp.all(jnp.max(log_probs, axis=-1) == 0, axis=-1)
        noise = jax.lax.cond(jnp.all(certain), lambda: jnp.zeros(shape, dtype), lambda: choices.gumbel(depth, shape[1], dtype))
        return jnp.where(certain[:, None], 0, noise)

    def _outputs(self, params, context, cache, tokens, inner):
        """Hidden states [B, len(inner), E] at the nodes ``inner``, which go through the model with their ancestors."""
        tree = self.tree
        fed = sorted({ancestor for node in inner for ancestor in tree.paths[node]})
        mask = tree.ancestor_mask[np.ix_(fed, fed)]
        positions = context.lengths[:, None] - 1 + jnp.asarray(np.array(tree.depths)[fed], jnp.int32)[None, :]
        output = self.model.apply(params, tokens[:, np.array(fed) - 1], positions, cache, jnp.asarray(mask))
        return output.hidden[:, np.array([fed.index(node) for node in inner])]
