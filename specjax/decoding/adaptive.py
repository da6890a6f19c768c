"""How deep to draft in the next round: as deep as pays by what rounds cost and by what was accepted lately.

A round in which drafts may be ``d`` deep takes a known time and emits, of row ``b``, an expected number of tokens::

    seconds(d) = plain + chance that some row drafts * (round of depth d - plain)
    tokens(d)  = sum over b of 1 + offered[b] * (r[b, 1] + r[b, 1] r[b, 2] + ... + r[b, 1] ... r[b, d])

``r[b, j]`` is the share of drafts of depth ``j`` that were accepted where their parents were, ``offered`` the share of rounds in
which the drafter had something to say. The depth with most tokens a second is taken, 0 included. It is decided by earlier rounds
alone, never by the tokens that are about to be drafted, so no rule is biased by it.

What is counted fades with every round, whether it drafted or not. Where little is known of a row, what all rows saw lately
stands in for it, and where that is little too, a hopeful guess: so a drafter that has been left out for a while is tried again.
"""

import flax.struct
import jax
import jax.numpy as jnp

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
      tested: [B, depth] float32, places where acceptance was decided, by depth.
      accepted: [B, depth] float32, drafts that were accepted there.
      asked: [B] float32, rounds that were to draft.
      offered: [B] float32, rounds of these that drafted something.
    """

    tested: jax.Array
    accepted: jax.Array
    asked: jax.Array
    offered: jax.Array

    @classmethod
    def zeros(cls, batch: int, depth: int) -> "Faded":
        """Nothing seen yet."""
        by_depth, by_row = jnp.zeros((batch, depth), jnp.float32), jnp.zeros((batch,), jnp.float32)
        return cls(by_depth, by_depth, by_row, by_row)


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
    def zeros(cls, batch: int, depth: int) -> "RecentAcceptance":
        """Nothing seen yet."""
        return cls(Faded.zeros(batch, depth), Faded.zeros(batch, depth))

    def after(self, running, asked, tested, accepted, offered) -> "RecentAcceptance":
        """With one more round.

        Args:
          running: [B] bool, rows that took part.
          asked: [B] bool, rows that were to draft.
          tested: [B, depth], places where acceptance was decided, by depth.
          accepted: [B, depth], drafts that were accepted there.
          offered: [B] bool, rows that drafted something.
        """
        news = Faded(*(jnp.asarray(count, jnp.float32) for count in (tested, accepted, asked, asked & offered)))

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
    """[B, depth] share of drafts by depth that will be accepted, and [B] share of rounds that will draft something.

    Args:
      recent: what the rows saw.
      layout: says what the rows of all devices saw together.
    """
    of_all = jax.tree.map(lambda leaf: layout.in_total(jnp.sum(leaf, axis=0)), recent.slot)
    believed, rates = jnp.float32(GUESS), []
    for place in range(recent.row.tested.shape[1]):
        # What is not known of a depth is taken from the one above.
        believed = (of_all.accepted[place] + WEIGHT * believed) / (of_all.tested[place] + WEIGHT)
        rates.append((recent.row.accepted[:, place] + WEIGHT * believed) / (recent.row.tested[:, place] + WEIGHT))
    offered = (of_all.offered + WEIGHT) / (of_all.asked + WEIGHT)
    return jnp.stack(rates, axis=1), (recent.row.offered + WEIGHT * offered) / (recent.row.asked + WEIGHT)


def best_depth(
    seconds: jax.Array,
    depths: tuple[int, ...],
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
      rates: [B, depth], see :func:`acceptance_rates`.
      offered: [B], likewise.
      room: [B] int32, how deep a draft may be that the row's budget can hold; less than 0 for rows that take no part.
      layout: the rows of all devices share a round.

    Example:
      >>> from specjax.decoding.layout import ONE_DEVICE
      >>> rates = jnp.array([[0.5, 0.5, 0.5, 0.5]])
      >>> one, room = jnp.array([1.0]), jnp.array([100])
      >>> for seconds in ([1, 1.8, 2.0], [1, 1.2, 2.0], [1, 1, 1]):
      ...     print(best_depth(jnp.array(seconds), (0, 2, 4), rates, one, room, ONE_DEVICE))
      0
      2
      4
    """
    running = room >= 0
    # [B, depth + 1] tokens that drafts of each depth add.
    added = jnp.pad(jnp.cumsum(jnp.cumprod(rates, axis=1), axis=1), ((0, 0), (1, 0)))
    reach = jnp.clip(jnp.minimum(jnp.asarray(depths)[None, :], room[:, None]), 0)
    tokens = 1 + offered[:, None] * jnp.take_along_axis(added, reach, axis=1)
    tokens = layout.in_total(jnp.sum(jnp.where(running[:, None], tokens, 0), axis=0))
    # No row drafts only if none of them does.
    silent = jnp.where(running, jnp.log1p(-jnp.minimum(offered, 1 - 1e-6)), 0)
    drafting = 1 - jnp.exp(layout.in_total(jnp.sum(silent)))
    known = jnp.isfinite(seconds)
    plain = jnp.where(known[0], seconds[0], 0)
    expected = plain + drafting * (jnp.where(known, seconds, 1) - plain)
    return jnp.asarray(depths, jnp.int32)[jnp.argmax(jnp.where(known, tokens / expected, -1))]


def depth_that_pays(
    seconds: jax.Array, depths: tuple[int, ...], recent: RecentAcceptance, room: jax.Array, layout: Layout
) -> jax.Array:
    """int32, how deep drafts of the next round are best, by what was seen lately; arguments as of :func:`best_depth`."""
    rates, offered = acceptance_rates(recent, layout)
    return best_depth(seconds, depths, rates, offered, room, layout)
