"""Two drafters in one: the second drafts for the rows where the first proposes nothing.

A lookup costs nothing and is right where the text repeats itself; elsewhere it has nothing to say, and a model drafts. Both
observe everything, so the model's cache is right when its turn comes; it runs only in rounds where a row needs it.

A round has one tree for all rows, which holds both. The chain of the first lies on the leftmost path of the second's tree and
goes on below its end::

    first    0 - 1 - 2 - 3          then      0            both      0
                                             / \\                    / \\
                                            1   2                  1   2
                                           / \\                    / \\
                                          3   4                  3   4         first  1 3 5
                                                                 |             then   1 2 3 4
                                                                 5

The law of a node is the second drafter's in every row. A row that the first drafted has at most one child per node, and stores a
q that is certain of this child: "drawn" from such a q by any law it is the same token, so every rule that is right for the law is
right for the row. Which of the two drafts is decided by the committed text alone, before anything is drawn.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters.base import BoundDrafter, Context, Drafter, bind, feature_layers_of, source_depths, sources_of
from specjax.tree import NO_SOURCE, ROOT, Draft, DraftTree, Law


def overlay(length: int, tree: DraftTree) -> tuple[DraftTree, tuple[int, ...], tuple[int, ...]]:
    """A tree that holds ``tree`` and a chain of ``length`` draft nodes on its leftmost path.

    Returns:
      The tree (``tree`` itself where the chain fits in, else numbered by depth), its nodes that are the chain's, in order, and
      its nodes that are those of ``tree``, in order.

    Example:
      >>> both, chain, nodes = overlay(3, DraftTree((-1, 0, 0, 1, 1)))
      >>> both.parents, chain, nodes
      ((-1, 0, 0, 1, 1, 3), (1, 3, 5), (1, 2, 3, 4))
    """
    leftmost = [ROOT]
    while tree.children[leftmost[-1]]:
        leftmost.append(tree.children[leftmost[-1]][0])
    added = [tree.size + place for place in range(length + 1 - len(leftmost))]
    if not added:
        return tree, tuple(leftmost[1 : length + 1]), tuple(range(1, tree.size))
    parents = [*tree.parents, leftmost[-1], *added[:-1]]
    depths = DraftTree(tuple(parents)).depths
    # By depth, so that a budget cuts no more than it must; siblings keep their order.
    order = sorted(range(len(parents)), key=lambda node: depths[node])
    place = {node: number for number, node in enumerate(order)} | {-1: -1}
    both = DraftTree(tuple(place[parents[node]] for node in order))
    return both, tuple(place[node] for node in [*leftmost[1:], *added]), tuple(place[node] for node in range(1, tree.size))


@flax.struct.dataclass
class StackedState:
    """What the two drafters carry.

    Attributes:
      first: state of the first.
      then: state of the second.
    """

    first: Any
    then: Any


@dataclasses.dataclass(frozen=True)
class Stacked:
    """The drafter's functions; see :func:`stacked`. Parameters are the pair of theirs.

    Attributes:
      first: asked first; its drafts are deterministic chains.
      then: drafts for the rows where the first proposes nothing.
      sources: names of the drafters that a draft may come from.
    """

    first: Drafter
    then: Drafter
    sources: tuple[str, ...]

    @functools.cached_property
    def _overlay(self):
        return overlay(self.first.tree.num_nodes, _fixed_tree(self.then))

    @property
    def tree(self) -> DraftTree:
        """The tree of both."""
        return self._overlay[0]

    @property
    def passes(self) -> tuple[tuple[int, ...], ...]:
        """See :class:`specjax.drafters.Drafter`: rounds that one of the two drafted alone verify its nodes alone."""
        tree, *parts = self._overlay
        parts = {tuple(sorted(nodes)) for nodes in parts if 0 < len(nodes) < tree.num_nodes}
        return tuple(sorted(parts, key=lambda nodes: (len(nodes), nodes)))

    @property
    def source_depths(self) -> tuple[int, ...]:
        """See :class:`specjax.drafters.Drafter`."""
        return (*source_depths(self.first), *source_depths(self.then))

    @property
    def law_choices(self) -> tuple[Law, ...]:
        """The second drafter's; what the first drafts takes any law."""
        return tuple(self.then.law_choices) if self.then.tree.num_nodes else (Law.DETERMINISTIC,)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers that the first reads, then those of the second."""
        return (*feature_layers_of(self.first), *feature_layers_of(self.then))

    def with_law(self, law):
        """See :meth:`specjax.drafters.Drafter.with_law`."""
        return dataclasses.replace(self, then=self.then.with_law(law)) if self.then.tree.num_nodes else self

    def init(self, params, batch, capacity):
        """See :meth:`specjax.drafters.Drafter.init`."""
        return StackedState(self.first.init(params[0], batch, capacity), self.then.init(params[1], batch, capacity))

    def observe(self, params, state, tokens, features, counts):
        """See :meth:`specjax.drafters.Drafter.observe`; each of the two sees no more of a round at once than it is made for."""
        width = tokens.shape[1]
        whole = width > self.tree.depth + 1  # a chunk of a prompt

        split = len(feature_layers_of(self.first))
        # A model that shows layers unasked shows them to both.
        shown = (features[:, :, :split], features[:, :, split:]) if self.feature_layers else (features, features)

        def seen_by(drafter, params, state, features):
            piece = width if whole else min(width, drafter.tree.depth + 1)
            if piece == width:
                return drafter.observe(params, state, tokens, features, counts)
            short = -width % piece
            padded = jnp.pad(tokens, ((0, 0), (0, short))), jnp.pad(features, ((0, 0), (0, short), (0, 0), (0, 0)))

            def one(carry):
                start, state = carry
                some = (jax.lax.dynamic_slice_in_dim(array, start, piece, axis=1) for array in padded)
                return start + piece, drafter.observe(params, state, *some, jnp.clip(counts - start, 0, piece))

            # Mostly the first piece holds all that was accepted, and a model reads no other.
            return jax.lax.while_loop(lambda carry: (carry[0] == 0) | jnp.any(counts > carry[0]), one, (jnp.int32(0), state))[1]

        return StackedState(
            seen_by(self.first, params[0], state.first, shown[0]), seen_by(self.then, params[1], state.then, shown[1])
        )

    def propose(self, params, state, context: Context, choices, num_draft):
        """See :meth:`specjax.drafters.Drafter.propose`."""
        _, chain, nodes = self._overlay
        found, first = self.first.propose(params[0], state.first, context, choices, _asked(chain, num_draft))
        found = found.checked()
        if any(law is not Law.DETERMINISTIC for law in found.laws):
            laws = [law.value for law in found.laws]
            raise ValueError(f"drafter {self.first!r:.200} drew by {laws}; the first of a stack must draft deterministically")
        is_found = jnp.any(found.valid, axis=1)
        asked = jnp.where(is_found, 0, _asked(nodes, num_draft))
        drawn, then = self.then.propose(params[1], state.then, context, choices, asked)
        return self._joined(is_found, found, drawn.checked()), StackedState(first, then)

    def _joined(self, is_found, found: Draft, drawn: Draft) -> Draft:
        """The draft of both: ``found`` by the first in the rows ``is_found`` [B], and ``drawn`` by the second in the others."""
        tree, chain, nodes = self._overlay

        def on_tree(places, values):
            return jnp.zeros((values.shape[0], tree.num_nodes), values.dtype).at[:, np.array(places, int) - 1].set(values)

        law_of = dict(zip(nodes, drawn.laws, strict=True))
        laws = [Law.DETERMINISTIC]  # of the root, if the second never drafts
        for node, parent in enumerate(tree.parents[1:], 1):
            laws.append(law_of.get(node, laws[parent]))
        drawn_by = jnp.where(jnp.any(drawn.valid, axis=1), _num_sources(self.first) + _source(drawn), NO_SOURCE)
        return Draft(
            tokens=jnp.where(is_found[:, None], on_tree(chain, found.tokens), on_tree(nodes, drawn.tokens)),
            valid=jnp.where(is_found[:, None], on_tree(chain, found.valid), on_tree(nodes, drawn.valid)),
            parent_log_probs=self._log_probs(is_found, found.tokens, drawn.parent_log_probs, laws[1:]),
            tree=tree,
            laws=tuple(laws[1:]),
            source=jnp.where(is_found, _source(found), drawn_by).astype(jnp.int32),
        )

    def _log_probs(self, is_found, tokens, log_probs, laws):
        """[B, P, V] log q of the whole tree, certain of the ``tokens`` in the rows ``is_found``; None where no law asks for it.

        Args:
          is_found: [B].
          tokens: [B, chain], what was found.
          log_probs: those of the second drafter, at its own inner nodes.
          laws: of all draft nodes.
        """
        if log_probs is None or all(law is Law.DETERMINISTIC for law in laws):
            return None
        tree, chain, nodes = self._overlay
        row_of = {(ROOT, *nodes)[node]: row for row, node in enumerate(_fixed_tree(self.then).inner_nodes)}
        if len(row_of) < len(tree.inner_nodes):
            nothing = jnp.zeros_like(log_probs[:, 0])
            rows = [log_probs[:, row_of[node]] if node in row_of else nothing for node in tree.inner_nodes]
            log_probs = jnp.stack(rows, axis=1)
        parents = tree.inner_index[[tree.parents[node] for node in chain]]

        def certain(log_probs):
            is_token = jnp.arange(log_probs.shape[-1])[None, None, :] == tokens[..., None]
            one_hot = jnp.where(is_token, 0, -jnp.inf).astype(log_probs.dtype)
            return log_probs.at[:, parents].set(jnp.where(is_found[:, None, None], one_hot, log_probs[:, parents]))

        return jax.lax.cond(jnp.any(is_found), certain, lambda log_probs: log_probs, log_probs)

    def reset(self, state, rows):
        """See :meth:`specjax.drafters.Drafter.reset`."""
        return StackedState(self.first.reset(state.first, rows), self.then.reset(state.then, rows))


def _fixed_tree(drafter: Drafter) -> DraftTree:
    """The tree of a drafter that has the same one for all rows."""
    assert isinstance(drafter.tree, DraftTree)
    return drafter.tree


def _asked(nodes: tuple[int, ...], num_draft: jax.Array) -> jax.Array:
    """[B] how many of ``nodes`` may be drafted in their order, if the first ``num_draft`` [B] of the whole tree may."""
    if not nodes:
        return jnp.zeros_like(num_draft)
    # A node is out of reach behind one that is.
    needed = np.maximum.accumulate(np.array(nodes, np.int32))
    return jnp.sum(jnp.asarray(needed)[None, :] <= num_draft[:, None], axis=1, dtype=jnp.int32)


def _num_sources(drafter: Drafter) -> int:
    """How many drafters a draft of ``drafter`` may come from."""
    return len(sources_of(drafter)) or 1


def _source(draft: Draft) -> jax.Array | int:
    """[B] which of its drafter's sources each row of ``draft`` comes from."""
    return 0 if draft.source is None else draft.source


@dataclasses.dataclass(frozen=True, eq=False)
class BoundStack(BoundDrafter):
    """A stacked drafter with the parameters of both.

    Attributes:
      parts: the two drafters.
    """

    functions: Stacked
    parts: tuple[BoundDrafter, ...] = ()

    def check_target(self, target) -> None:
        """Raises ValueError if drafts of either mean something else to ``target``."""
        for part in self.parts:
            part.check_target(target)

    def params_for(self, target):
        """See :meth:`BoundDrafter.params_for`: the pair of theirs."""
        return tuple(part.params_for(target) for part in self.parts)


def stacked(first: Any, then: Any) -> BoundStack:
    """A drafter that asks ``first``, and ``then`` for the rows where that proposes nothing.

    The tree is one for both, so a round verifies as many tokens as the larger needs. How often each drafted, and what became of
    it, is told by ``Stats.by_source``. Stacks may be stacked: ``stacked(a, stacked(b, c))``.

    Args:
      first: a drafter that proposes chains, can do so deterministically and sometimes proposes nothing, as ``prompt_lookup``.
      then: any drafter; rules choose among its laws.

    Raises:
      ValueError: names the argument, its value and what would be right.

    Example:
      >>> from specjax.certificates.tiny import table_model
      >>> from specjax.drafters import draft_model, prompt_lookup
      >>> drafter = stacked(prompt_lookup(3), draft_model(table_model(3, seed=1), tree=DraftTree((-1, 0, 0, 1, 1))))
      >>> drafter.functions.tree.parents
      (-1, 0, 0, 1, 1, 3)
    """
    for name, part in (("first", first), ("then", then)):
        if part is None or not bind(part).functions.law_choices:
            raise ValueError(f"stacked: {name} is {part!r:.200}; it must be a drafter that proposes something")
    first, then = bind(first), bind(then)
    for name, part in (("first", first), ("then", then)):
        if not isinstance(part.functions.tree, DraftTree):
            raise ValueError(
                f"stacked: {name} is {part.name}, which shapes a tree for every row; it must propose the same tree in all rows: "
                "both of a stack draft within one"
            )
    if not first.functions.tree.is_chain:
        raise ValueError(
            f"stacked: first is {first.name}, which proposes the tree {first.functions.tree.parents}; it must propose chains: "
            "a q is stored once for all children of a node and cannot be certain of several"
        )
    laws = [law.value for law in first.functions.law_choices]
    if Law.DETERMINISTIC not in first.functions.law_choices:
        raise ValueError(
            f"stacked: first is {first.name}, which draws by {laws}; it must be able to draft deterministically: the laws of a "
            "stack are those of the second drafter"
        )
    functions = Stacked(
        first.functions.with_law(Law.DETERMINISTIC), then.functions, _distinct([*_sources(first), *_sources(then)])
    )
    name = f"stacked({first.name}, {then.name})"
    return BoundStack(functions, (first.params, then.params), name=name, parts=(first, then))


def _sources(drafter: BoundDrafter) -> tuple[str, ...]:
    return sources_of(drafter.functions) or (drafter.name or type(drafter.functions).__name__,)


def _distinct(names: list[str]) -> tuple[str, ...]:
    """The names, those that came before numbered.

    Example:
      >>> _distinct(["lookup", "draft", "lookup"])
      ('lookup', 'draft', 'lookup (2)')
    """
    return tuple(
        name if name not in names[:place] else f"{name} ({names[: place + 1].count(name)})" for place, name in enumerate(names)
    )
