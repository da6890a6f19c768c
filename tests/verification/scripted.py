"""Choices whose outcomes a test writes down."""

import jax.numpy as jnp
import numpy as np


class Scripted:
    """Tokens and coins by row and node; asking for any other stream or shape fails."""

    def __init__(self, tokens=None, coins=None):
        """``tokens`` [B][node] of ``categorical``; ``coins`` [B, M] uniform numbers of ``bernoulli``."""
        self.tokens = None if tokens is None else jnp.asarray(tokens)
        self.coins = None if coins is None else jnp.asarray(coins)
        self.asked = []

    def categorical(self, stream, node, log_probs):
        self.asked.append((stream.name, np.asarray(node).tolist(), np.asarray(jnp.exp(log_probs))))
        node = jnp.broadcast_to(jnp.asarray(node), log_probs.shape[:1])
        return jnp.take_along_axis(self.tokens, node[:, None], axis=1)[:, 0].astype(jnp.int32)

    def bernoulli(self, stream, node, probability):
        self.asked.append((stream.name, np.asarray(node).tolist(), np.asarray(probability)))
        return self.coins < probability

    def gumbel(self, offset, vocab_size, dtype):
        raise AssertionError("this rule has no use for shared noise")
