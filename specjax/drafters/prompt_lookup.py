"""Prompt lookup: the text so far is searched for its own last tokens, and what followed them there is proposed.

Prompt lookup decoding (Saxena 2023) costs next to nothing and wins where the answer repeats its prompt: summaries, edits,
code. Which of several matches counts is a choice:

* longer n-grams first (``prompt_lookup_max`` down to ``prompt_lookup_min`` tokens), prompt and generated tokens alike;
* of several matches of one length the most recent.

The match may overlap the end it is compared with. Where the proposal reaches the end of the text it goes on with itself:
a text that ends in a loop is continued around the loop. Nothing is drafted where nothing matches::

    history   1 2 3 9 1 2 4 9 1 2         n = 2: the last tokens are 1 2
              . . . . ^^^ 4 9 1 2         most recent earlier match: propose 4 9 1 2, then 4 9 1 2 again
"""

import dataclasses

import jax
import jax.numpy as jnp

from specjax.drafters.base import BoundDrafter, Context, check_num_speculative_tokens
from specjax.tree import Draft, DraftTree, Law

LONGEST = 64
"""Longest n-gram that can be looked for: each of its tokens is a pass over the text."""


def find_continuation(tokens: jax.Array, length: jax.Array, longest: int, shortest: int) -> tuple[jax.Array, jax.Array]:
    """Where the continuation of the most recent match of a text's last tokens starts.

    Args:
      tokens: [S] int32, one row of history.
      length: scalar int32, how many of them are there.
      longest: n-gram length tried first.
      shortest: n-gram length tried last, at least 1.

    Returns:
      found (bool) and start (int32): the token at ``start`` followed the match.

    Example:
      >>> found, start = find_continuation(jnp.array([1, 2, 3, 9, 1, 2, 4, 9, 1, 2]), jnp.int32(10), 3, 2)
      >>> bool(found), int(start)
      (True, 6)
    """
    capacity = tokens.shape[0]
    place = jnp.arange(capacity)
    # run[s] counts how many tokens that end at s equal the text's last ones.
    matching = jnp.ones((capacity,), bool)
    run = jnp.zeros((capacity,), jnp.int32)
    for back in range(longest):
        wanted = jnp.take(tokens, length - 1 - back, mode="clip")
        earlier = jnp.roll(tokens, back)  # earlier[s] = tokens[s - back]
        matching &= (earlier == wanted) & (place >= back)
        run += matching
    ends_before_the_last = place < length - 1
    run = jnp.where(ends_before_the_last, run, 0)
    best = jnp.max(run)
    # Most recent of the longest.
    end = jnp.max(jnp.where(run == best, place, -1))
    return best >= shortest, (end + 1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class PromptLookup:
    """The drafter's functions; see :func:`prompt_lookup`."""

    num_speculative_tokens: int
    longest: int
    shortest: int
    law_choices = (Law.DETERMINISTIC,)

    @property
    def tree(self) -> DraftTree:
        """A chain."""
        return DraftTree.chain(self.num_speculative_tokens)

    def with_law(self, law):
        """See :meth:`specjax.drafters.Drafter.with_law`."""
        if law not in self.law_choices:
            raise ValueError(f"prompt_lookup: law is {law.value!r}; it can only draft deterministically")
        return self

    def init(self, params, batch, capacity):
        """See :meth:`specjax.drafters.Drafter.init`; the token history of the context is all it needs."""
        del params, batch, capacity
        return ()

    def observe(self, params, state, tokens, features, counts):
        """See :meth:`specjax.drafters.Drafter.observe`."""
        del params, tokens, features, counts
        return state

    def propose(self, params, state, context: Context, choices, num_draft):
        """See :meth:`specjax.drafters.Drafter.propose`."""
        del params, choices

        def row(tokens, length):
            found, start = find_continuation(tokens, length, self.longest, self.shortest)
            period = jnp.maximum(length - start, 1)
            ahead = jnp.arange(self.num_speculative_tokens) % period
            return found, jnp.take(tokens, start + ahead, mode="clip")

        found, drafted = jax.vmap(row)(context.tokens, context.lengths)
        asked = jnp.arange(self.num_speculative_tokens)[None, :] < num_draft[:, None]
        draft = Draft(
            tokens=drafted,
            # An id beyond the vocabulary can stand in a prompt of raw ids; it cannot be emitted, so it is not drafted.
            valid=asked & found[:, None] & (drafted < context.vocab_size),
            parent_log_probs=None,
            tree=self.tree,
            laws=(Law.DETERMINISTIC,) * self.num_speculative_tokens,
        )
        return draft, state

    def reset(self, state, rows):
        """See :meth:`specjax.drafters.Drafter.reset`."""
        del rows
        return state


def prompt_lookup(num_speculative_tokens: int = 7, *, prompt_lookup_max: int = 3, prompt_lookup_min: int = 2) -> BoundDrafter:
    """A drafter that looks for the last tokens of the text earlier in it.

    Args:
      num_speculative_tokens: K, draft tokens per round, 0 to 32.
      prompt_lookup_max: longest n-gram that is looked for.
      prompt_lookup_min: shortest n-gram that is looked for, 1 to ``prompt_lookup_max``.

    Raises:
      ValueError: names the argument, its value and the range.

    Example:
      >>> prompt_lookup(num_speculative_tokens=4).functions.tree.num_nodes
      4
    """
    num_speculative_tokens = check_num_speculative_tokens(num_speculative_tokens)
    for name, value in (("prompt_lookup_min", prompt_lookup_min), ("prompt_lookup_max", prompt_lookup_max)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LONGEST:
            raise ValueError(f"prompt_lookup: {name} is {value!r}; it must be a whole number from 1 to {LONGEST}")
    if not 1 <= prompt_lookup_min <= prompt_lookup_max:
        raise ValueError(
            f"prompt_lookup: prompt_lookup_min is {prompt_lookup_min}; it must be from 1 to prompt_lookup_max "
            f"({prompt_lookup_max})"
        )
    functions = PromptLookup(num_speculative_tokens, prompt_lookup_max, prompt_lookup_min)
    return BoundDrafter(functions, name="prompt_lookup")
