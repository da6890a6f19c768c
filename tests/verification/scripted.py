"""Choices whose outcomes a test writes down."""

import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback


class Scripted:
    """Tokens and coins by row and node; what was asked for is recorded, from inside compiled loops as well."""

    def __init__(self, tokens=None, coins=None):
        """``tokens`` [B][node] of ``categorical``; ``coins`` [B][draft node - 1] uniform numbers of ``bernoulli``."""
        self.tokens = None if tokens is None else jnp.asarray(tokens)
        self.coins = None if coins is None else jnp.pad(jnp.asarray(coins), ((0, 0), (1, 0)))
        self.recorded = []

    @property
    def asked(self):
        """(stream, node of each row, probabilities) of every draw so far; coins of nodes that are not tested are left out."""
        return [entry for entry in self.recorded if entry[0] != "ACCEPT" or any(entry[1])]

    def probabilities(self):
        """{row: {node: probability}} of all coins."""
        rows = {}
        for stream, nodes, probabilities in self.asked:
            if stream == "ACCEPT":
                for row, (node, probability) in enumerate(zip(nodes, probabilities.tolist(), strict=True)):
                    if node:
                        rows.setdefault(row, {})[node] = probability
        return rows

    @property
    def emitted(self):
        """[B, V] what the next tokens were drawn from."""
        ((_, _, probabilities),) = [entry for entry in self.recorded if entry[0] == "EMIT"]
        return probabilities

    def categorical(self, stream, node, log_probs):
        node = jnp.broadcast_to(jnp.asarray(node), log_probs.shape[:1])
        self._record(stream, node, jnp.exp(log_probs))
        return jnp.take_along_axis(self.tokens, node[:, None], axis=1)[:, 0].astype(jnp.int32)

    def bernoulli(self, stream, node, probability):
        node = jnp.broadcast_to(jnp.asarray(node), probability.shape)
        self._record(stream, node, probability)
        return jnp.take_along_axis(self.coins, node[:, None], axis=1)[:, 0] < probability

    def gumbel(self, offset, vocab_size, dtype):
        raise AssertionError("this rule has no use for shared noise")

    def _record(self, stream, node, probabilities):
        def note(node, probabilities):
            self.recorded.append((stream.name, np.asarray(node).tolist(), np.asarray(probabilities)))

        io_callback(note, None, node, probabilities, ordered=True)
