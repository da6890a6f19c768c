"""What a verification rule is, and how a round finds one by name."""

from typing import Protocol

import chex
import flax.struct
import jax
import jax.numpy as jnp

from specjax.choices import Choices
from specjax.row_trees import RowTrees, TreeBounds
from specjax.tree import ROOT, Draft, DraftTree, Law

CHAIN = "chain"
TREE = "tree"
ROW_TREE = "row_tree"
"""A tree that the drafter shapes per row."""

SHAPES = (CHAIN, TREE, ROW_TREE)
"""All shapes of drafts."""

NO_Q_IN_ROW_TREES = (
    "where the shape is chosen row by row, tokens may have been kept for what they are, and have no q to test against; "
    "use gumbel, match or membership on deterministic or coupled drafts"
)
"""Why rules that test against q refuse such trees, and why no law that states a q is true of their tokens."""

NOISE_COMES_AGAIN = (
    "coupled drafts share the noise of a position with later rounds, and a rule that tests against q needs fresh noise; "
    "use gumbel or match"
)
"""Why rules that test against q refuse coupled drafts."""


@flax.struct.dataclass
class Verdict:
    """What a rule decided for each row.

    Attributes:
      path: [B, depth] int32, the accepted draft nodes from the root's child downwards; ``ROOT`` behind the last.
      num_accepted: [B] int32, length of the path.
      next_token: [B] int32, the correction token (after a rejection) or the bonus token (after full acceptance).
    """

    path: jax.Array
    num_accepted: jax.Array
    next_token: jax.Array


class Rule(Protocol):
    """A pure function from draft and target distribution to a verdict. Hashable: a static part of the compiled round.

    Attributes:
      name: how it is asked for.
      lossless: whether the target's distribution of whole outputs is left unchanged.
      seed_stable: whether emitted tokens depend on target, prompt and seed alone.
      laws: laws of draft tokens that it is right for, the one that it accepts most of first.
      shapes: those of ``SHAPES`` that it is right for. In a ``ROW_TREE`` tokens are deterministic or coupled, and nothing else.
      refusals: why it is not right for the other laws; may be left out.
    """

    # Read-only: a class attribute, a property or a frozen field will do.
    @property
    def name(self) -> str:
        """How it is asked for."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether the distribution is left unchanged."""
        ...

    @property
    def seed_stable(self) -> bool:
        """Whether tokens depend on target, prompt and seed alone."""
        ...

    @property
    def laws(self) -> tuple[Law, ...]:
        """Laws that it is right for."""
        ...

    @property
    def shapes(self) -> frozenset[str]:
        """Shapes that it is right for."""
        ...

    def __call__(self, choices: Choices, draft: Draft, target_log_probs: jax.Array) -> Verdict:
        """Verifies ``draft`` against ``target_log_probs`` [B, T, V], the target's distribution after every node."""
        ...


def shape_of(tree: DraftTree | TreeBounds | RowTrees) -> str:
    """The shape of drafts with this topology.

    Example:
      >>> shape_of(DraftTree((-1, 0, 0))), shape_of(TreeBounds(num_nodes=2, depth=1))
      ('tree', 'row_tree')
    """
    if isinstance(tree, DraftTree):
        return CHAIN if tree.is_chain else TREE
    return ROW_TREE


def check_fits(rule: Rule, tree: DraftTree | TreeBounds | RowTrees, laws: tuple[Law, ...]) -> None:
    """Raises ValueError if ``rule`` is not right for a draft of this shape and these laws."""
    for law in laws or (None,):
        reason = why_not(rule, shape_of(tree), law)
        if reason is not None:
            raise ValueError(reason)


def why_not(rule: Rule, shape: str, law: Law | None) -> str | None:
    """Why ``rule`` does not take drafts of this shape whose tokens are drawn by ``law`` (None: no tokens); None if it does.

    Example:
      >>> from specjax.verification.rejection import Token
      >>> why_not(Token(), TREE, Law.INDEPENDENT)
      "rule 'token' takes drafts of shape ['chain']; this drafter proposes a tree"
      >>> why_not(Token(), CHAIN, Law.DETERMINISTIC)
    """
    if shape not in rule.shapes:
        words = f"rule {rule.name!r} takes drafts of shape {sorted(rule.shapes)}; this drafter proposes a {shape}"
        return f"{words}: {NO_Q_IN_ROW_TREES}" if shape == ROW_TREE else words
    if shape == ROW_TREE and law in (Law.INDEPENDENT, Law.WITHOUT_REPLACEMENT):
        return f"this drafter draws {law.value!r} in a {shape}: {NO_Q_IN_ROW_TREES}"
    if law is None or law in rule.laws:
        return None
    accepted = [law.value for law in rule.laws]
    reason = getattr(rule, "refusals", {}).get(law)
    words = f"rule {rule.name!r} is right for the laws {accepted}; this drafter draws {law.value!r}"
    return words if reason is None else f"{words}: {reason}"


def check_rule(rule) -> None:
    """Raises ValueError unless ``rule`` is an object with all that a :class:`Rule` has."""
    needed = ("name", "lossless", "seed_stable", "laws", "shapes", "__call__")
    missing = [name for name in needed if not hasattr(rule, name)]
    if isinstance(rule, type) or missing:
        kind = "a class" if isinstance(rule, type) else f"without {', '.join(missing)}"
        raise ValueError(f"rule is {rule!r}, {kind}; it must be a name or an object (see specjax.verification.Rule)")
    try:
        hash(rule)
    except TypeError as error:
        raise ValueError(f"rule is {rule!r}; it must be hashable, a static part of what is compiled: {error}") from error


def check_verdict(rule: Rule, verdict, draft: Draft) -> None:
    """Raises ValueError where what ``rule`` returned is not a verdict on ``draft``."""
    batch = draft.tokens.shape[0]
    wanted = {"path": (batch, draft.tree.depth), "num_accepted": (batch,), "next_token": (batch,)}
    for name, shape in wanted.items():
        value = getattr(verdict, name, None)
        if value is None or getattr(value, "shape", None) != shape or not jnp.issubdtype(value.dtype, jnp.integer):
            raise ValueError(f"rule {rule.name!r} returned {verdict!r:.300}; its {name} must be integers of shape {shape}")


def check_inputs(draft: Draft, target_log_probs: jax.Array) -> None:
    """Static shape checks that every rule starts with."""
    batch, num_nodes = draft.tokens.shape
    chex.assert_shape(target_log_probs, (batch, num_nodes + 1, None))
    if draft.parent_log_probs is not None:
        chex.assert_shape(draft.parent_log_probs, (batch, None, target_log_probs.shape[-1]))


def fixed_tree(draft: Draft) -> DraftTree:
    """The topology of a draft, for rules that do not take a ``ROW_TREE``."""
    assert isinstance(draft.tree, DraftTree), NO_Q_IN_ROW_TREES
    return draft.tree


def take_node(values: jax.Array, node: jax.Array) -> jax.Array:
    """[B, ...] the entry of ``values`` [B, T, ...] at each row's ``node`` [B]."""
    index = node.reshape(node.shape + (1,) * (values.ndim - 1))
    return jnp.take_along_axis(values, index, axis=1)[:, 0]


def no_path(batch: int, depth: int) -> jax.Array:
    """[B, depth] an empty path."""
    return jnp.full((batch, depth), ROOT, jnp.int32)
