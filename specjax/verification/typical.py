"""Typical acceptance: keeps draft tokens that the target finds likely enough. It changes the distribution of the outputs.

A draft token x is kept if p(x) > min(epsilon, delta exp(-H(p))), with H the entropy of p (Medusa, Cai et al. 2024,
arXiv:2401.10774, section 2.3.1). The longest path of kept tokens is accepted, of equally long ones the most likely. Greedy rows
come out as greedy.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.choices import Choices, Stream
from specjax.numeric import is_real
from specjax.tree import ROOT, Draft, Law
from specjax.verification.base import SHAPES, Verdict, check_inputs, take_node


@dataclasses.dataclass(frozen=True)
class Typical:
    """Typical acceptance; lossy, so a run needs ``allow_lossy=True``.

    Attributes:
      epsilon: a token at least this likely is always kept.
      delta: share of exp(-H(p)) from which a token is kept.

    Raises:
      ValueError: names the argument, its value and the range.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    name = "typical"
    lossless = False
    seed_stable = False
    laws = (Law.DETERMINISTIC, Law.WITHOUT_REPLACEMENT, Law.INDEPENDENT, Law.COUPLED)
    shapes = frozenset(SHAPES)
    refusals: ClassVar[dict[Law, str]] = {}

    def __post_init__(self):
        for name in ("epsilon", "delta"):
            value = getattr(self, name)
            if not is_real(value) or not 0 < value <= 1:
                raise ValueError(f"Typical: {name} is {value!r}; it must be in (0, 1]")

    def __call__(self, choices: Choices, draft: Draft, target_log_probs: jax.Array) -> Verdict:
        """See :class:`specjax.verification.base.Rule`."""
        check_inputs(draft, target_log_probs)
        tree = draft.tree
        accepted = jnp.full(draft.tokens.shape[:1], ROOT, jnp.int32)
        if tree.num_nodes:
            inner = jnp.asarray(tree.inner_nodes, jnp.int32)
            parents, depths = (jnp.atleast_2d(jnp.asarray(of_node, jnp.int32))[:, 1:] for of_node in (tree.parents, tree.depths))
            log_p = target_log_probs[:, inner]
            entropy = -jnp.sum(jnp.where(jnp.isneginf(log_p), 0, jnp.exp(log_p) * log_p), axis=-1)
            threshold = jnp.minimum(math.log(self.epsilon), math.log(self.delta) - entropy)
            row = jnp.arange(len(accepted))[:, None]
            likely = target_log_probs[row, parents, draft.tokens]
            kept = draft.valid & (likely > threshold[row, jnp.asarray(tree.inner_index)[parents]])
            # A node counts if all on its path are kept; the path's log-likelihood breaks ties between depths.
            on_path = jnp.asarray(tree.ancestor_mask)[..., 1:, 1:]
            on_path = on_path if on_path.ndim == 3 else on_path[None]
            whole = tree.whole_paths(kept)
            depth = jnp.where(whole, depths, 0)
            score = jnp.sum(jnp.where(on_path, likely[:, None, :], 0), axis=-1)
            deepest = (depth == jnp.max(depth, axis=1, keepdims=True)) & whole
            best = jnp.argmax(jnp.where(deepest, score, -jnp.inf), axis=1).astype(jnp.int32) + 1
            accepted = jnp.where(jnp.any(whole, axis=1), best, ROOT)
        path = tree.path_to(accepted)
        token = choices.categorical(Stream.EMIT, accepted, take_node(target_log_probs, accepted))
        return Verdict(path, jnp.sum(path > ROOT, axis=1, dtype=jnp.int32), token)
