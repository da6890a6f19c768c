"""Models and drafters small enough to go through all of their outcomes."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from specjax.cache import KVBlock, KVCache
from specjax.drafters.base import BoundDrafter, Stateless
from specjax.drafters.draw import draw_children, only_where
from specjax.models.base import ModelOutput
from specjax.models.loaded import Model
from specjax.tree import ROOT, Draft, DraftTree, Law

NUM_DISTRIBUTIONS = 997
"""Rows of a table model's table; a prime, so that contexts spread over them."""


@dataclasses.dataclass(frozen=True)
class TableModel:
    """A model whose next token depends on its whole context, through its cache and block alone.

    There is a random number for every (position, token); keys and values hold half of it each. A pass adds up what is visible,
    as attention would, and the sum chooses a row of a table of logits: an entry that is missing, stale, doubled, seen where it
    should be hidden, or at a wrong position, changes the distribution.

    Parameters are ``numbers`` [positions, V] int32 and ``table`` [NUM_DISTRIBUTIONS, V], logits.
    """

    vocab_size: int

    def apply(self, params, tokens, positions, cache, block_mask):
        """See :meth:`specjax.models.base.ModelFunctions.apply`."""
        batch, num_tokens = tokens.shape
        dtype = cache.keys[0].dtype
        numbers = params["numbers"]
        numbers = jnp.take(jnp.ravel(numbers), positions * numbers.shape[1] + tokens, mode="clip")
        half = (numbers / 2).astype(dtype)
        block = KVBlock(keys=(half[:, None, :, None],), values=(half[:, None, :, None],))
        if block_mask is None:
            block_mask = np.tril(np.ones((num_tokens, num_tokens), bool))
        within = jnp.broadcast_to(block_mask, (batch, num_tokens, num_tokens))
        committed = jnp.arange(cache.capacity)[None, :] < cache.lengths[:, None]
        cached = jnp.sum(jnp.where(committed, (cache.keys[0] + cache.values[0])[:, 0, :, 0], 0), axis=1)
        total = cached[:, None] + jnp.sum(jnp.where(within, numbers[:, None, :], 0), axis=2)
        hidden = params["table"][total.astype(jnp.int32) % NUM_DISTRIBUTIONS]
        return ModelOutput(hidden=hidden, features=jnp.zeros((batch, num_tokens, 0, self.vocab_size), dtype), block=block)

    def unembed(self, params, hidden):
        """See :meth:`specjax.models.base.ModelFunctions.unembed`."""
        del params
        return hidden

    def init_cache(self, params, batch, capacity):
        """See :meth:`specjax.models.base.ModelFunctions.init_cache`."""
        return KVCache.zeros(1, batch, num_kv_heads=1, capacity=capacity, head_dim=1, dtype=params["table"].dtype)


def table_model(vocab_size: int, seed: int, max_positions: int = 64) -> Model:
    """A :class:`TableModel` of random conditional distributions.

    Example:
      >>> table_model(vocab_size=3, seed=0).vocab_size
      3
    """
    random = np.random.default_rng(seed)
    params = {
        "numbers": random.integers(NUM_DISTRIBUTIONS, size=(max_positions, vocab_size), dtype=np.int32),
        "table": random.normal(scale=1.5, size=(NUM_DISTRIBUTIONS, vocab_size)),
    }
    return Model(functions=TableModel(vocab_size), params=params, vocab_size=vocab_size, max_positions=max_positions)


def constant_model(probabilities, max_positions: int = 64) -> Model:
    """A model whose next token has these ``probabilities`` (V) in every context.

    Example:
      >>> constant_model([0.5, 0.5]).vocab_size
      2
    """
    vocab_size = len(probabilities)
    params = {
        "numbers": np.zeros((max_positions, vocab_size), np.int32),
        "table": np.tile(_logs(np.asarray(probabilities, np.float64)), (NUM_DISTRIBUTIONS, 1)),
    }
    return Model(functions=TableModel(vocab_size), params=params, vocab_size=vocab_size, max_positions=max_positions)


def _logs(probabilities):
    with np.errstate(divide="ignore"):  # log(0) = -inf is meant
        return np.log(probabilities)


@dataclasses.dataclass(frozen=True)
class CountingTree(Stateless):
    """Drafts a tree of any shape, deterministically: the children of a token t are t + 1, t + 2, ... (modulo V)."""

    tree: DraftTree
    law_choices = (Law.DETERMINISTIC,)

    def propose(self, params, state, context, choices, num_draft):
        """See :meth:`specjax.drafters.Drafter.propose`."""
        del params, choices
        newest = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
        # Every step down adds 1 and the rank among the siblings.
        steps = np.zeros(self.tree.size, np.int32)
        for children in self.tree.children:
            for rank, child in enumerate(children):
                steps[child] = steps[self.tree.parents[child]] + 1 + rank
        nodes = jnp.arange(self.tree.num_nodes)[None, :]
        draft = Draft(
            tokens=(newest + jnp.asarray(steps[1:])[None, :]) % context.vocab_size,
            valid=nodes < num_draft[:, None],
            parent_log_probs=None,
            tree=self.tree,
            laws=(Law.DETERMINISTIC,) * self.tree.num_nodes,
        )
        return draft, state


def counting_tree(tree: DraftTree) -> BoundDrafter:
    """A :class:`CountingTree` drafter.

    Example:
      >>> counting_tree(DraftTree((-1, 0, 0, 1))).functions.tree.depth
      2
    """
    return BoundDrafter(CountingTree(tree), name="counting_tree")


@dataclasses.dataclass(frozen=True)
class TableDrafter(Stateless):
    """Drafts from a table of distributions, without a model behind it: a chain or tree by any laws that compiles fast.

    Which row of the table is q at a node depends on the committed length and on the tokens from the root down to the node.
    Parameters are ``table`` [rows, width], log-probabilities; and with a reduced vocabulary ``offsets`` [width] int32: its id i
    is the target's id i + offsets[i], as EAGLE-3 drafts store it.

    Attributes:
      tree: topology of every proposal.
      laws: a law for every draft node; None until a run fixes one.
    """

    tree: DraftTree
    laws: tuple[Law, ...] | None = None
    law_choices = (Law.WITHOUT_REPLACEMENT, Law.INDEPENDENT, Law.COUPLED, Law.DETERMINISTIC)

    @property
    def fixed_laws(self) -> tuple[Law, ...]:
        """``laws``, which a run has fixed before anything is drawn."""
        assert self.laws is not None, "with_law comes first"
        return self.laws

    def with_law(self, law):
        """See :meth:`specjax.drafters.Drafter.with_law`; laws that are fixed already stay."""
        return self if self.laws is not None else dataclasses.replace(self, laws=(law,) * self.tree.num_nodes)

    def propose(self, params, state, context, choices, num_draft):
        """See :meth:`specjax.drafters.Drafter.propose`."""
        tree, batch = self.tree, num_draft.shape[0]
        newest = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)[:, 0]
        # What was drafted down to each node, in one number.
        paths = {ROOT: 7 * context.lengths + newest}
        tokens = jnp.zeros((batch, tree.num_nodes), jnp.int32)
        valid = jnp.arange(tree.num_nodes)[None, :] < num_draft[:, None]
        log_probs = []
        for node in tree.inner_nodes:
            own = params["table"].astype(context.logits_dtype)[paths[node] % len(params["table"])]
            nodes = tree.children[node]
            drawing = valid[:, nodes[0] - 1] & (valid[:, node - 1] if node > ROOT else True)
            drawn, possible, recorded = self._children(params, context, choices, nodes, only_where(drawing, own))
            index = np.array(nodes) - 1
            tokens = tokens.at[:, index].set(drawn)
            valid = valid.at[:, index].set(valid[:, index] & possible)
            log_probs.append(recorded)
            paths |= {child: 31 * paths[node] + drawn[:, rank] + 1 for rank, child in enumerate(nodes)}
        return Draft(tokens, valid, jnp.stack(log_probs, axis=1), tree, self.fixed_laws).checked(), state

    def _children(self, params, context, choices, nodes, log_probs):
        """Children ``nodes`` drawn from ``log_probs`` [B, width], which of them there are, and log q [B, V] as it is stored."""
        laws = [self.fixed_laws[node - 1] for node in nodes]
        noise = None
        if Law.COUPLED in laws:
            noise = choices.gumbel(self.tree.depths[nodes[0]] - 1, context.logits_width, context.logits_dtype)
        if "offsets" not in params:
            return *draw_children(choices, laws, nodes, log_probs, noise), log_probs
        of_target = jnp.arange(log_probs.shape[1], dtype=jnp.int32) + params["offsets"]
        drawn, possible = draw_children(choices, laws, nodes, log_probs, None if noise is None else noise[:, of_target])
        return of_target[drawn], possible, widened(log_probs, of_target, context.logits_width)


def random_table(vocab_size: int, seed: int) -> np.ndarray:
    """[NUM_DISTRIBUTIONS, V] log-probabilities.

    Example:
      >>> np.exp(random_table(vocab_size=3, seed=0)).sum(axis=1).round(12).tolist() == [1.0] * NUM_DISTRIBUTIONS
      True
    """
    return _normalised(np.exp(np.random.default_rng(seed).normal(scale=1.5, size=(NUM_DISTRIBUTIONS, vocab_size))))


def _normalised(table: np.ndarray) -> np.ndarray:
    return _logs(table / table.sum(axis=1, keepdims=True))


def widened(log_probs, of_target, vocab_size: int):
    """log q [B, V] of the target's ids, from that of a reduced vocabulary [B, width] whose ids are the target's ``of_target``.

    Example:
      >>> widened(jnp.array([[-1.0, -2.0]]), jnp.array([0, 2]), 3).tolist()
      [[-1.0, -inf, -2.0]]
    """
    return jnp.full((log_probs.shape[0], vocab_size), -jnp.inf, log_probs.dtype).at[:, of_target].set(log_probs)


def table_drafter(
    tree: DraftTree, table=None, *, vocab_size: int = 3, seed: int = 0, laws=None, offsets=None, kind=TableDrafter
) -> BoundDrafter:
    """A :class:`TableDrafter`.

    Args:
      tree: topology of every proposal, at least one draft node.
      table: [rows, width] probabilities; None: random ones.
      vocab_size: width of the random table.
      seed: of the random table.
      laws: a law for every draft node; None: whatever the run fixes.
      offsets: [width] of a reduced vocabulary.
      kind: the class, for drafters that do something else with the same table.

    Example:
      >>> table_drafter(DraftTree.chain(2), [[0.5, 0.5]]).functions.tree.depth
      2
    """
    params = {"table": random_table(vocab_size, seed) if table is None else _normalised(np.asarray(table, np.float64))}
    if offsets is not None:
        params["offsets"] = np.asarray(offsets, np.int32)
    return BoundDrafter(kind(tree, None if laws is None else tuple(laws)), params, name="table_drafter")
