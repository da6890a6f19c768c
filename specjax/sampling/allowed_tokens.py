"""Grammars as state tables: which tokens may come next, and where each of them leads.

Compiled beforehand, a grammar costs a look-up per node inside a round, on the device, and every node of a draft is in the state
that its own path leads to::

    next_state        id 0   id 1   id 2 (end)
    state 0            1     -1      -1          starts here; only id 0
    state 1            1      0       2          anything
    state 2           -1     -1       2          ended

Letters in shapes: B rows, T nodes, D longest path, Q states, V vocabulary.
"""

import json
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

FORBIDDEN = -1
"""Entry of a table for a token that may not come; as a state, that of a text which has left the grammar."""

START = 0
"""The state behind every prompt."""


class AllowedTokens:
    """What a text may consist of, for ``generate(..., allowed_tokens=...)``.

    End tokens are transitions like all others: a row ends if it is allowed one and takes it, and where nothing else is allowed it
    has to.

    Attributes:
      next_state: [Q', V] int32 on the device: the table, with rows that nothing leads to behind it. The number of rows is rounded
        up, so that most tables of one vocabulary share compiled rounds.
      num_states: Q, states that were given.

    Raises:
      ValueError: names what is wrong with the table; every state that can be reached must allow something.

    Example:
      >>> table = AllowedTokens([[1, -1, -1], [1, 0, 2], [-1, -1, 2]])
      >>> table.num_states, table.accepts([0, 0, 1]), table.accepts([1])
      (3, True, False)
    """

    next_state: jax.Array
    num_states: int

    def __init__(self, next_state):
        table = np.asarray(next_state)
        if table.ndim != 2 or not table.size or not np.issubdtype(table.dtype, np.integer):
            raise ValueError(
                f"AllowedTokens: next_state is {table.dtype.name}{list(table.shape)}; it must be integers [states, vocabulary]"
            )
        count = len(table)
        wrong = np.argwhere((table < FORBIDDEN) | (table >= count))
        if len(wrong):
            state, token = wrong[0].tolist()
            raise ValueError(
                f"AllowedTokens: next_state[{state}, {token}] is {table[state, token]}; it must be from 0 to {count - 1}, "
                f"or {FORBIDDEN} where the token is forbidden"
            )
        stuck = ~np.any(table != FORBIDDEN, axis=1) & _reached(table)
        if stuck.any():
            raise ValueError(f"AllowedTokens: state {int(np.argmax(stuck))} can be reached and allows no token")
        rounded = 1 << (count - 1).bit_length() if count <= 64 else -(-count // 64) * 64
        padded = np.pad(table.astype(np.int32), ((0, max(8, rounded) - count), (0, 0)), constant_values=FORBIDDEN)
        self.next_state = jnp.asarray(padded)
        self.num_states = count

    @property
    def vocab_size(self) -> int:
        """V, columns of the table."""
        return self.next_state.shape[1]

    def accepts(self, ids: Iterable[int]) -> bool:
        """Whether a text may start with these ids."""
        state = START
        for id in ids:
            if state != FORBIDDEN:
                state = int(self.next_state[state, id]) if 0 <= id < self.vocab_size else FORBIDDEN
        return state != FORBIDDEN

    @classmethod
    def from_regex(cls, pattern: str, tokenizer, end_token_ids: Iterable[int] | None = None) -> "AllowedTokens":
        """Texts that match a regular expression as a whole, and then an end token. Needs the extra ``specjax[grammar]``.

        Args:
          pattern: a regular expression of the ``outlines-core`` library (no look-around, no back references).
          tokenizer: the model's.
          end_token_ids: ids that end a text, such as the model's ``stop_token_ids``; None is the tokenizer's end token.

        Raises:
          ImportError: the extra is not installed.
          ValueError: the pattern is no regular expression, or cannot be written with these tokens, or there is no end token.
        """
        outlines_core = _outlines_core()
        if end_token_ids is None:
            end_token_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        ends = tuple(end_token_ids)
        if not ends:
            raise ValueError("AllowedTokens: end_token_ids is empty and the tokenizer has no end token; a text must end somehow")
        if not all(0 <= id < tokenizer.size for id in ends):
            raise ValueError(f"AllowedTokens: end_token_ids is {ends}; ids of this tokenizer are from 0 to {tokenizer.size - 1}")
        spelled: dict[bytes, list[int]] = {}
        for id, spelling in enumerate(tokenizer.token_bytes()):
            if spelling and id not in ends:
                spelled.setdefault(spelling, []).append(id)
        try:
            index = outlines_core.Index(pattern, outlines_core.Vocabulary(ends[0], spelled))
        except ValueError as error:
            raise ValueError(f"AllowedTokens: pattern is {pattern!r}; {error}") from error
        return cls(_table(index, tokenizer.size, ends, pattern))

    @classmethod
    def from_json_schema(cls, schema: str | dict, tokenizer, end_token_ids: Iterable[int] | None = None) -> "AllowedTokens":
        """JSON documents of a schema, and then an end token. Needs the extra ``specjax[grammar]``.

        Args:
          schema: a JSON schema, as text or as a dict. Strings and numbers without a bound can be of any length.
          tokenizer, end_token_ids: as for :meth:`from_regex`.

        Raises:
          ImportError: the extra is not installed.
          ValueError: the schema is not supported, or as for :meth:`from_regex`.
        """
        _outlines_core()
        from outlines_core.json_schema import build_regex_from_schema

        text = schema if isinstance(schema, str) else json.dumps(schema)
        try:
            pattern = build_regex_from_schema(text)
        except (ValueError, TypeError) as error:
            raise ValueError(f"AllowedTokens: schema is {text:.200}; {error}") from error
        return cls.from_regex(pattern, tokenizer, end_token_ids)

    def __repr__(self) -> str:
        return f"AllowedTokens(num_states={self.num_states}, vocab_size={self.vocab_size})"


def _outlines_core():
    try:
        import outlines_core
    except ImportError as error:
        raise ImportError("grammars need the library outlines-core: pip install 'specjax[grammar]'") from error
    return outlines_core


def _reached(table: np.ndarray) -> np.ndarray:
    """[Q] bool, the states that a text can be in."""
    reached = np.zeros(len(table), bool)
    reached[START] = True
    frontier = np.array([START])
    while len(frontier):
        after = np.unique(table[frontier])
        frontier = after[(after != FORBIDDEN)]
        frontier = frontier[~reached[frontier]]
        reached[frontier] = True
    return reached


def _table(index, vocab_size: int, ends: tuple[int, ...], pattern: str) -> np.ndarray:
    """The table of an ``outlines_core.Index``, its states renumbered, without those from which no end can be reached."""
    transitions = index.get_transitions()
    names = [index.get_initial_state(), *sorted(transitions.keys() - {index.get_initial_state()})]
    number = {name: place for place, name in enumerate(names)}
    ended = len(names)
    table = np.full((len(names) + 1, vocab_size), FORBIDDEN, np.int32)
    for name, following in transitions.items():
        ids = np.fromiter(following.keys(), np.int64, len(following))
        table[number[name], ids] = [number.get(after, FORBIDDEN) for after in following.values()]
    # The library lets an end token stay where it is; behind it nothing else may come.
    table[:, list(ends)] = FORBIDDEN
    final = [number[name] for name in index.get_final_states() if name in number]
    table[np.ix_([*final, ended], list(ends))] = ended
    # Tokens may be missing that a state needs: what leads there only leads nowhere.
    alive = np.zeros(len(table), bool)
    alive[[*final, ended]] = True
    while True:
        leads = np.array([bool(np.any(alive[row[row != FORBIDDEN]])) for row in table])
        if np.array_equal(alive, alive | leads):
            break
        alive |= leads
    if not alive[START]:
        raise ValueError(f"AllowedTokens: pattern is {pattern!r}; no text that matches can be written with these tokens")
    return np.where(np.append(alive, False)[table], table, FORBIDDEN)


def advance(next_state: jax.Array, states: jax.Array, tokens: jax.Array, counts: jax.Array) -> jax.Array:
    """States [...] after the first ``counts`` [...] of ``tokens`` [..., D]; ``FORBIDDEN`` once a token was.

    Example:
      >>> table = AllowedTokens([[1, -1], [-1, 0]]).next_state
      >>> advance(table, jnp.array([0, 0]), jnp.array([[0, 1], [0, 0]]), jnp.array([1, 2])).tolist()
      [1, -1]
    """
    width = next_state.shape[1]

    def step(place, states):
        token = jax.lax.dynamic_index_in_dim(tokens, place, axis=-1, keepdims=False)
        after = next_state[jnp.maximum(states, 0), jnp.minimum(token, width - 1)]
        after = jnp.where((states == FORBIDDEN) | (token >= width), FORBIDDEN, after)
        return jnp.where(place < counts, after, states)

    return jax.lax.fori_loop(0, tokens.shape[-1], step, states) if tokens.shape[-1] else states


def allowed_at(next_state: jax.Array, states: jax.Array, width: int) -> jax.Array:
    """[..., width] bool, the tokens that may come in ``states`` [...].

    All of them where the text has left the grammar: nothing that is looked at comes from there, it only has to be numbers.
    """
    allowed = next_state[jnp.maximum(states, 0)] != FORBIDDEN
    padding = [(0, 0)] * states.ndim + [(0, max(0, width - next_state.shape[1]))]
    return jnp.pad(allowed, padding)[..., :width] | (states == FORBIDDEN)[..., None]
