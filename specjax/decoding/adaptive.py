"""How deep to draft in the next round: as deep as pays by what rounds cost and by what was accepted lately.

A round in which drafts may be ``d`` deep takes a known time and emits, of row ``b``, an expected number of tokens::

    tokens(d)  = sum over b of 1 + sum over s of offered[b, s] * (r[b, s, 1] + r[b, s, 1] r[b, s, 2] + ... to depth d)
    seconds(d) = sum over s of chance that no deeper source than s drafts, and s does in some row * round of min(d, depth of s)
                 + chance that no row drafts * plain

``s`` are the drafters that a draft may come from, one but for stacks: a lookup that is seldom right must not be judged by the
head behind it, nor the head by it. ``r[b, s, j]`` is the share of its drafts of depth ``j`` that were accepted where their
parents were, ``offered[b, s]`` the share of rounds in which it had something to say. The depth with most tokens a second is
taken, 0 included. It is decided by earlier rounds alone, never by the tokens that are about to be drafted, so no rule is biased.

What is counted fades with every round, whether it drafted or not. Where little is known of a row, what all rows saw lately
stands in for it, and where that is little too, a hopeful guess: so a drafter that has been left out for a while is tried again.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.layout import Layout

FADING_OF_ROW = 1 - 1 / 32
"""What is left of a row's counts after a round."""
FADING_OF_SLOT = 1 - 1 / 64
"""The same of those that outlive a request."""
GUESS = 0.75
"""Share of accepted drafts where nothing is known."""
WEIGHT = 3.0
"""How many tests what is known of others is worth.

With less a few bad rounds end drafting that pays, with more drafting that does not pay goes on. Of 1 to 6 this is what loses
least where it loses most, by a simulation of answers of 64 tokens with costs measured on a CPU.
"""


@flax.struct.dataclass
class Faded:
    """Counts in which earlier rounds weigh less.

    Attributes:
      tested: [B, S, depth] float32, places where acceptance was decided, by source and depth.
      accepted: [B, S, depth] float32, drafts that were accepted there.
      asked: [B] float32, rounds that were to draft.
      offered: [B, S] float32, rounds of these in which the source drafted something.
    """

    tested: jax.Array
    accepted: jax.Array
    asked: jax.Array
    offered: jax.Array

    @classmethod
    def zeros(cls, batch: int, num_sources: int, depth: int) -> "Faded":
        """Nothing seen yet."""
        by_depth, by_source = (jnp.zeros((batch, num_sources, *more), jnp.float32) for more in ((depth,), ()))
        return cls(by_depth, by_depth, jnp.zeros((batch,), jnp.float32), by_source)


@flax.struct.dataclass
class RecentAcceptance:
    """What the rows of a batch saw lately.

    Attributes:
      row: of the request that a row answers.
      slot: of all requests that the row has answered.
    """

    row: Faded
    slot: Faded

    @classmethod
    def zeros(cls, batch: int, num_sources: int, depth: int) -> "RecentAcceptance":
        """Nothing seen yet."""
        return cls(Faded.zeros(batch, num_sources, depth), Faded.zeros(batch, num_sources, depth))

    def after(self, running, asked, tested, accepted, offered, source=None) -> "RecentAcceptance":
        """With one more round.

        Args:
          running: [B] bool, rows that took part.
          asked: [B] bool, rows that were to draft.
          tested: [B, depth], places where acceptance was decided, by depth.
          accepted: [B, depth], drafts that were accepted there.
          offered: [B] bool, rows that drafted something.
          source: [B] int32, which of the sources each row's draft comes from, if it has one; None where there is one alone.
        """
        sources = jnp.arange(self.row.offered.shape[1])[None, :]
        is_source = (sources if source is None else source[:, None]) == sources

        def by_source(counts):
            rows = is_source.reshape(is_source.shape + (1,) * (counts.ndim - 1))
            return jnp.where(rows, counts[:, None], 0).astype(jnp.float32)

        news = Faded(by_source(tested), by_source(accepted), asked.astype(jnp.float32), by_source(asked & offered))

        def faded(old, new, fading):
            rows = running.reshape(running.shape + (1,) * (old.ndim - 1))
            return jnp.where(rows, fading * old + new, old)

        return RecentAcceptance(
            row=jax.tree.map(lambda old, new: faded(old, new, FADING_OF_ROW), self.row, news),
            slot=jax.tree.map(lambda old, new: faded(old, new, FADING_OF_SLOT), self.slot, news),
        )

    def of_new_rows(self, rows: jax.Array) -> "RecentAcceptance":
        """The same where new requests move into ``rows`` [B]; what their slots saw of others remains."""

        def forgotten(leaf):
            return jnp.where(rows.reshape(rows.shape + (1,) * (leaf.ndim - 1)), 0, leaf)

        return self.replace(row=jax.tree.map(forgotten, self.row))


def acceptance_rates(recent: RecentAcceptance, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """[B, S, depth] share of drafts that will be accepted, and [B, S] share of rounds that will have one, by their source.

    Args:
      recent: what the rows saw.
      layout: says what the rows of all devices saw together.
    """
    of_all = jax.tree.map(lambda leaf: layout.in_total(jnp.sum(leaf, axis=0)), recent.slot)
    num_sources, depth = of_all.tested.shape
    believed, rates = jnp.full((num_sources,), GUESS, jnp.float32), []
    for place in range(depth):
        # What is not known of a depth is taken from the one above.
        believed = (of_all.accepted[:, place] + WEIGHT * believed) / (of_all.tested[:, place] + WEIGHT)
        rates.append((recent.row.accepted[:, :, place] + WEIGHT * believed[None]) / (recent.row.tested[:, :, place] + WEIGHT))
    offered = (of_all.offered + WEIGHT / num_sources) / (of_all.asked + WEIGHT)
    return jnp.stack(rates, axis=-1), (recent.row.offered + WEIGHT * offered[None]) / (recent.row.asked[:, None] + WEIGHT)


def best_depth(
    seconds: jax.Array,
    depths: tuple[int, ...],
    source_depths: tuple[int, ...],
    rates: jax.Array,
    offered: jax.Array,
    room: jax.Array,
    layout: Layout,
) -> jax.Array:
    """int32, how deep drafts of the next round are best.

    Args:
      seconds: [n] float32, what a round takes whose drafts are as deep as ``depths`` say; a depth of ``inf`` seconds is never
        taken.
      depths: n depths, ascending, the first 0.
      source_depths: S depths, of the drafts of each source.
      rates: [B, S, depth], see :func:`acceptance_rates`.
      offered: [B, S], likewise.
      room: [B] int32, how deep a draft may be that the row's budget can hold; less than 0 for rows that take no part.
      layout: the rows of all devices share a round.

    Example:
      >>> from specjax.decoding.layout import ONE_DEVICE
      >>> rates = jnp.array([[[0.5, 0.5, 0.5, 0.5]]])
      >>> one, room = jnp.array([[1.0]]), jnp.array([100])
      >>> for seconds in ([1, 1.8, 2.0], [1, 1.2, 2.0], [1, 1, 1]):
      ...     print(best_depth(jnp.array(seconds), (0, 2, 4), (4,), rates, one, room, ONE_DEVICE))
      0
      2
      4
    """
    running = room >= 0
    # [B, S, depth + 1] tokens that drafts of each depth add.
    added = jnp.pad(jnp.cumsum(jnp.cumprod(rates, axis=-1), axis=-1), ((0, 0), (0, 0), (1, 0)))
    # [S, n] how deep each source then drafts.
    deep = np.minimum(np.array(depths)[None, :], np.array(source_depths)[:, None])
    reach = jnp.clip(jnp.minimum(jnp.asarray(deep)[None], room[:, None, None]), 0)
    tokens = 1 + jnp.sum(offered[..., None] * jnp.take_along_axis(added, reach, axis=-1), axis=1)
    tokens = layout.in_total(jnp.sum(jnp.where(running[:, None], tokens, 0), axis=0))
    known = jnp.isfinite(seconds)
    # A round is as long as the deepest source that drafts in some row makes it. The chances that the first s sources are silent:
    order = np.argsort(-np.array(source_depths), kind="stable")
    drafts = jnp.minimum(jnp.cumsum(offered[:, order], axis=1), 1 - 1e-6)
    silent = jnp.exp(layout.in_total(jnp.sum(jnp.where(running[:, None], jnp.log1p(-drafts), 0), axis=0)))
    before = jnp.concatenate([jnp.ones((1,)), silent[:-1]])
    expected = silent[-1] * jnp.where(known[0], seconds[0], 0)
    for place, source in enumerate(order):
        # The round that was timed for a source's own depth, or the next deeper one.
        timed = np.minimum(np.searchsorted(np.array(depths), deep[source]), np.arange(len(depths)))
        taken = jnp.where(known[timed], seconds[timed], seconds)
        expected += (before[place] - silent[place]) * jnp.where(jnp.isfinite(taken), taken, 0)
    return jnp.asarray(depths, jnp.int32)[jnp.argmax(jnp.where(known, tokens / expected, -1))]


def depth_that_pays(
    seconds: jax.Array,
    depths: tuple[int, ...],
    source_depths: tuple[int, ...],
    recent: RecentAcceptance,
    room: jax.Array,
    layout: Layout,
) -> jax.Array:
    """int32, how deep drafts of the next round are best, by what was seen lately; arguments as of :func:`best_depth`."""
    rates, offered = acceptance_rates(recent, layout)
    return best_depth(seconds, depths, source_depths, rates, offered, room, layout)
