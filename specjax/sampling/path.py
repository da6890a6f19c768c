"""The distribution of the next token behind a draft: every transform of the logits as the node's own path has it.

A penalty counts the tokens before it. Behind drafts these are the committed ones and, at each node, the draft tokens that lead
to it. Counted once per draft instead, every node but the root would be penalised wrongly::

    committed   ... 5 3                       node      root   x1     x2
    draft       x1 = 5, x2 = 5                has 5     once   twice  three times

Letters in shapes: B rows, S tokens of history, N draft nodes, T nodes with the root, D longest path, V vocabulary, M stop ids,
Q states of a grammar.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.row_trees import RowTrees
from specjax.sampling.allowed_tokens import advance, allowed_at
from specjax.sampling.params import NO_ID, SamplingArrays
from specjax.sampling.transforms import to_log_probs
from specjax.tree import DraftTree

LogitsProcessor = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""From ``tokens`` [S] (the first ``length`` are the text, drafts included), ``prompt_length``, ``length`` and ``logits`` [V] to
the logits [V] of the next token. Jittable and hashable; it is mapped over rows and nodes."""


def tree_paths(tree: DraftTree | RowTrees, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What was drafted before the output of every node: ``path_tokens`` [B, T, D] and ``path_lengths`` [T] or [B, T], both int32.

    Args:
      tree: topology.
      tokens: [B, N] int32, its tokens.

    Example:
      >>> path_tokens, path_lengths = tree_paths(DraftTree((-1, 0, 0, 1)), jnp.array([[7, 8, 9]]))
      >>> [path[:length] for path, length in zip(path_tokens[0].tolist(), path_lengths.tolist())]
      [[], [7], [8], [7, 9]]
    """
    if tree.num_nodes == 0:
        return jnp.zeros((tokens.shape[0], 1, 0), jnp.int32), jnp.zeros((1,), jnp.int32)
    if isinstance(tree, RowTrees):
        places = jnp.maximum(tree.path_table - 1, 0)
        at_places = jnp.take_along_axis(tokens, places.reshape(len(tokens), -1), axis=1)
        return at_places.reshape(places.shape).astype(jnp.int32), tree.depths
    places = np.maximum(tree.path_table - 1, 0)
    return tokens[:, places].astype(jnp.int32), jnp.asarray(tree.depths, jnp.int32)


@flax.struct.dataclass
class TokenCounts:
    """Which tokens a row's text holds.

    Attributes:
      seen: [B, V] bool, in prompt or output.
      output: [B, V] int32, how often in the output.
    """

    seen: jax.Array
    output: jax.Array

    @classmethod
    def of_history(cls, tokens, prompt_lengths, lengths, width: int) -> "TokenCounts":
        """Counts of ``tokens`` [B, S], of which the first ``lengths`` [B] are there.

        Example:
          >>> counts = TokenCounts.of_history(jnp.array([[2, 0, 0, 1]]), jnp.array([1]), jnp.array([3]), width=3)
          >>> counts.seen.tolist(), counts.output.tolist()
          ([[True, False, True]], [[2, 0, 0]])
        """
        batch, size = tokens.shape
        place, rows = jnp.arange(size)[None, :], jnp.arange(batch)[:, None]
        nothing = jnp.zeros((batch, width), jnp.int32)
        # Places behind the end go to an id that is not there.
        there = place < lengths[:, None]
        seen = nothing.at[rows, jnp.where(there, tokens, width)].set(1, mode="drop") > 0
        in_output = there & (place >= prompt_lengths[:, None])
        output = nothing.at[rows, jnp.where(in_output, tokens, width)].add(1, mode="drop")
        return cls(seen, output)


@flax.struct.dataclass
class PathDistribution:
    """Answers what the next token is drawn from behind the committed text and any draft tokens after it.

    One serves a whole round: the target's verify pass and the drafters ask it, each with logits and paths of their own.

    Attributes:
      sampling: settings of the rows.
      tokens: [B, S] int32, prompt and committed tokens; valid below ``lengths``.
      prompt_lengths: [B] int32.
      lengths: [B] int32, committed length.
      stop_token_ids: [B, M] int32, ids that end the row; ``NO_ID`` fills.
      counts: of the committed text; all zero where no row has a penalty.
      states: [B] int32, the grammar's state behind the committed text; None without a grammar.
      next_state: [Q, V'] int32, the grammar's table; ids from V' on are forbidden.
      vocab_size: ids that may be emitted are below this.
      logits_processor: a user's own transform, or None.

    Example:
      >>> from specjax.sampling.params import SamplingParams
      >>> rows = SamplingArrays.stack([SamplingParams(temperature=0, frequency_penalty=0.15)], seeds=[0])
      >>> distribution = PathDistribution.create(rows, tokens=jnp.array([[2, 0, 0]]), prompt_lengths=jnp.array([1]),
      ...     lengths=jnp.array([2]), stop_token_ids=jnp.array([[-1]]), vocab_size=3)
      >>> logits = jnp.tile(jnp.array([1.0, 0.9, 0.8]), (1, 3, 1))
      >>> paths, lengths = tree_paths(DraftTree.chain(2), jnp.array([[1, 0]]))
      >>> jnp.argmax(distribution.log_probs(logits, paths, lengths), axis=-1).tolist()  # 0 is there; then 1 too; then 0 again
      [[1, 0, 2]]
    """

    sampling: SamplingArrays
    tokens: jax.Array
    prompt_lengths: jax.Array
    lengths: jax.Array
    stop_token_ids: jax.Array
    counts: TokenCounts
    states: jax.Array | None
    next_state: jax.Array | None
    vocab_size: int = flax.struct.field(pytree_node=False)
    logits_processor: LogitsProcessor | None = flax.struct.field(pytree_node=False, default=None)

    @classmethod
    def create(
        cls,
        sampling: SamplingArrays,
        tokens: jax.Array,
        prompt_lengths: jax.Array,
        lengths: jax.Array,
        stop_token_ids: jax.Array,
        vocab_size: int,
        *,
        width: int | None = None,
        states: jax.Array | None = None,
        next_state: jax.Array | None = None,
        logits_processor: LogitsProcessor | None = None,
    ) -> "PathDistribution":
        """The distribution behind a committed text, counted only if some row has a penalty.

        Args:
          sampling, tokens, prompt_lengths, lengths, stop_token_ids, vocab_size: as the attributes.
          width: V, width of the logits; None is ``vocab_size``.
          states, next_state: of a grammar, if there is one.
          logits_processor: as the attribute.
        """
        width = vocab_size if width is None else width

        def counted():
            return TokenCounts.of_history(tokens, prompt_lengths, lengths, width)

        def nothing():
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(counted))

        with jax.named_scope("settings"):
            counts = jax.lax.cond(jnp.any(_penalised_rows(sampling)), counted, nothing)
        text = (tokens, prompt_lengths, lengths, stop_token_ids, counts)
        return cls(sampling, *text, states, next_state, vocab_size, logits_processor)

    def of_rows(self, take: Callable) -> "PathDistribution":
        """The same of some rows: ``take`` is given everything that has rows as its first axis."""
        rows = take(self.replace(next_state=None))
        return rows.replace(next_state=self.next_state)

    def log_probs(self, logits: jax.Array, path_tokens: jax.Array, path_lengths: jax.Array) -> jax.Array:
        """Log-probabilities [B, T, V] of the next token at T nodes.

        Where everything is forbidden the row is NaN.

        Args:
          logits: [B, T, V], at least float32.
          path_tokens: [B, T, D] int32, the tokens after the committed text that lead to each node, its own included.
          path_lengths: [T] or [B, T] int32, how many there are.
        """
        batch, num_nodes, _ = logits.shape
        path_lengths = jnp.broadcast_to(path_lengths if path_lengths.ndim == 2 else path_lengths[None], (batch, num_nodes))
        if self.next_state is not None:
            assert self.states is not None  # a grammar's table comes with its states
            states = jnp.broadcast_to(self.states[:, None], (batch, num_nodes))
            states = advance(self.next_state, states, path_tokens, path_lengths)
            logits = jnp.where(allowed_at(self.next_state, states, logits.shape[-1]), logits, -jnp.inf)
        # One condition for all of them: a condition costs a copy of the logits where nobody asks.
        num_emitted = self.lengths[:, None] - self.prompt_lengths[:, None] + path_lengths
        early = num_emitted < self.sampling.min_tokens[:, None]
        biased = jnp.any(early) | jnp.any(self.sampling.bias_ids != NO_ID)
        asked = biased | jnp.any(_penalised_rows(self.sampling)) | (self.logits_processor is not None)

        def adjusted(logits):
            logits = self._biased(logits, early)
            if self.logits_processor is not None:
                logits = self._processed(self.logits_processor, logits, path_tokens, path_lengths)
            return self._penalised(logits, path_tokens, path_lengths)

        with jax.named_scope("settings"):
            logits = jax.lax.cond(asked, adjusted, lambda logits: logits, logits)
            return to_log_probs(logits, self.sampling, self.vocab_size)

    def _biased(self, logits, early):
        """Adds the biases, and forbids the ids that end the row where it is ``early`` [B, T] to end."""
        ends = _at_nodes(self.stop_token_ids, early, logits)
        ids = _at_nodes(self.sampling.bias_ids, jnp.ones_like(early), logits)
        biases = jnp.broadcast_to(self.sampling.biases[:, None, :], ids.shape).astype(logits.dtype)
        return _at(_at(logits, ends).set(-jnp.inf, mode="drop"), ids).add(biases, mode="drop")

    def _processed(self, process: LogitsProcessor, logits, path_tokens, path_lengths):
        depth = path_tokens.shape[2]

        def node(tokens, prompt_length, length, path, path_length, logits):
            place = jnp.arange(depth)
            # A path that is longer than what is left of the row is that of a node that cannot be drafted.
            place = jnp.where(place < path_length, length + place, tokens.shape[0])
            text = tokens.at[place].set(path, mode="drop")
            return process(text, prompt_length, length + path_length, logits)

        over_nodes = jax.vmap(node, in_axes=(None, None, None, 0, 0, 0))
        rows = (self.tokens, self.prompt_lengths, self.lengths, path_tokens, path_lengths, logits)
        # What is forbidden already stays so, whatever the function makes of it.
        return jnp.where(logits == -jnp.inf, logits, jax.vmap(over_nodes)(*rows))

    def _penalised(self, logits, path_tokens, path_lengths):
        sampling, dtype = self.sampling, logits.dtype

        def apply(logits, seen, output):
            repetition, frequency, presence = (
                setting[:, None, None].astype(dtype)
                for setting in (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
            )
            logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
            return logits - frequency * output.astype(dtype) - presence * (output > 0).astype(dtype)

        by_history = apply(logits, self.counts.seen[:, None], self.counts.output[:, None])
        # Only the few tokens of the path count differently at a node.
        on_path = jnp.arange(path_tokens.shape[2])[None, None, :] < path_lengths[..., None]
        same = (path_tokens[..., :, None] == path_tokens[..., None, :]) & on_path[..., None, :]
        before = jnp.take_along_axis(self.counts.output[:, None], path_tokens, axis=2, mode="clip")
        output = before + jnp.sum(same, axis=-1, dtype=jnp.int32)
        at_path = jnp.take_along_axis(logits, path_tokens, axis=2, mode="clip")
        by_path = apply(at_path, jnp.ones_like(on_path), output)
        ids = jnp.where(on_path, path_tokens, logits.shape[-1])
        return _at(by_history, ids).set(by_path, mode="drop")


def _penalised_rows(sampling: SamplingArrays) -> jax.Array:
    """[B] bool, the rows with a penalty."""
    return (sampling.repetition_penalty != 1) | (sampling.presence_penalty != 0) | (sampling.frequency_penalty != 0)


def _at_nodes(ids: jax.Array, nodes: jax.Array, logits: jax.Array) -> jax.Array:
    """[B, T, M] each row's ``ids`` [B, M] at its ``nodes`` [B, T] (bool); V, which a scatter drops, where none is."""
    return jnp.where(nodes[..., None] & (ids[:, None, :] != NO_ID), ids[:, None, :], logits.shape[-1])


def _at(values: jax.Array, ids: jax.Array):
    """The places ``ids`` [B, T, D] of ``values`` [B, T, V], to be set or added to."""
    rows, nodes = jnp.arange(ids.shape[0])[:, None, None], jnp.arange(ids.shape[1])[None, :, None]
    return values.at[rows, nodes, ids]
