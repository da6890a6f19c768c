"""Mutants: code that is wrong in ways that were met in practice. A certificate that is worth anything finds every one of them.

Each is a function whose docstring says where the fault was met. It certifies the wrong code in the smallest setting that shows
the fault, and returns the certificate (or, for what no certificate can see, whether a check of its own failed).
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.certificates.certificate import certify
from specjax.certificates.comparison import Certificate
from specjax.certificates.enumerator import ReusedKeyError
from specjax.certificates.tiny import constant_model, counting_tree, table_drafter
from specjax.certificates.wrong_drafters import (
    ArgmaxAsDrawn,
    CountsNodes,
    DistinctAsIndependent,
    DropsUnlikely,
    FilteredRecord,
    Forgets,
    OffsetsAsIds,
    SchedulesInRetrospect,
    SeesSiblings,
    SharesMask,
    SoftWhereFound,
    UnnormalisedRecord,
    WrongLevel,
    wrong_target,
)
from specjax.certificates.wrong_rules import BlockRule, FreshNoise, SiblingRule, TokenRule
from specjax.choices import KeyedChoices, Stream
from specjax.drafters.prompt_lookup import prompt_lookup
from specjax.drafters.stacked import stacked
from specjax.row_trees import TreeBounds
from specjax.tree import DraftTree, Law

CAUGHT_FROM = 1e-6
"""Least error of a mutant that counts as caught: far above rounding, far below what the faults do."""

MUTANTS: dict[str, Callable[[], Certificate | bool]] = {}
"""All mutants by name."""

ONE, TWO = DraftTree.chain(1), DraftTree.chain(2)
PAIR = DraftTree((-1, 0, 0))
FORK = DraftTree((-1, 0, 0, 1))


def mutant(name: str):
    """Registers a function as the mutant ``name``."""

    def register(function):
        if name in MUTANTS:
            raise ValueError(f"mutant: name is {name!r}; there is one already")
        MUTANTS[name] = function
        return function

    return register


def catch(name: str) -> bool:
    """Whether the mutant ``name`` is caught: an error above 1e-6, a reused key, or a failed check of its own.

    Raises:
      ValueError: there is no such mutant.

    Example:
      >>> catch("acceptance at u = 0")
      True
    """
    if name not in MUTANTS:
        raise ValueError(f"catch: name is {name!r}; it must be one of {sorted(MUTANTS)}")
    try:
        found = MUTANTS[name]()
    except ReusedKeyError:
        return True
    return found if isinstance(found, bool) else found.max_error > CAUGHT_FROM


def _drafts(tree, kind=None, **options):
    return table_drafter(tree, **options) if kind is None else table_drafter(tree, kind=kind, **options)


# Rules


@mutant("first failure in block verification")
def first_failure():
    """Stops at the first coin that fails, as in token verification; proposed in a review of a public engine's block kernel."""
    return certify(BlockRule("first failure"), drafter=_drafts(TWO), rounds=1)


@mutant("token residual in block verification")
def token_residual():
    """Corrects from p - q where block verification leaves w p - q. A public engine shipped it; with V = 2 it cannot be seen."""
    return certify(BlockRule("token residual"), drafter=_drafts(TWO, seed=2), seed=2, rounds=1)


@mutant("another weight in traversal verification")
def another_weight():
    """A public port gives a parent the ratio of the block's and the token's residual mass as its new weight."""
    return certify(BlockRule("another weight"), drafter=_drafts(TWO), rounds=1)


@mutant("renormalisation forgotten")
def renormalisation_forgotten():
    """A later sibling is tested against q less the earlier ones that does not add up to 1."""
    return certify(SiblingRule("renormalisation forgotten"), drafter=_drafts(PAIR), rounds=1)


@mutant("sibling mass kept")
def sibling_mass_kept():
    """A later sibling is tested against p itself and not against what the rejection of the earlier one left."""
    return certify(SiblingRule("sibling mass kept"), drafter=_drafts(PAIR), rounds=1)


@mutant("reversed ratio")
def reversed_ratio():
    """Accepts with probability min(1, q / p): numerator and denominator exchanged."""
    return certify(TokenRule("reversed ratio"), drafter=_drafts(ONE), rounds=1)


@mutant("softmax of the residual")
def softmax_of_the_residual():
    """Normalises max(p - q, 0) by a softmax, which gives tokens of residual 0 a share."""
    return certify(TokenRule("softmax of the residual"), drafter=_drafts(ONE), rounds=1)


@mutant("correction from p")
def correction_from_p():
    """Draws the correction token from p: what an acceptance test without a residual comes to."""
    return certify(TokenRule("correction from p"), drafter=_drafts(ONE), rounds=1)


@mutant("bonus from the node before")
def off_by_one_bonus():
    """Draws the bonus token from the distribution of the last draft token: an index that is off by one."""
    return certify(TokenRule("bonus from the node before"), drafter=_drafts(ONE), rounds=1)


@mutant("residual where nothing was drafted")
def residual_where_nothing_was_drafted():
    """Takes a row that drafted less than the others for one that rejected: padding is read as a draft token."""
    return certify(TokenRule("residual where nothing was drafted"), drafter=_drafts(ONE), max_tokens=(1, 2), rounds=1)


@mutant("batch-minimum cut")
def batch_minimum_cut():
    """Cuts all rows to the batch's least acceptance and corrects there, also where the row's own token had been accepted."""
    return certify(TokenRule("batch minimum"), drafter=_drafts(ONE), rounds=1)


@mutant("fresh noise for shared noise")
def fresh_noise():
    """Promises plain decoding's tokens and draws with other noise: same distribution, another output."""
    return certify(FreshNoise(), drafter=counting_tree(ONE), rounds=1)


# Drafters


@mutant("soft q for argmax drafts")
def soft_q_for_argmax_drafts():
    """Drafts greedily and hands on the softmax: the likeliest token always passes. Met in several public engines."""
    drafter = _drafts(ONE, ArgmaxAsDrawn, table=[[0.51, 0.49]])
    return certify("token", target=constant_model([0.51, 0.49]), drafter=drafter, law=Law.INDEPENDENT, rounds=1)


@mutant("independent rule on drafts without replacement")
def independent_rule_on_distinct_siblings():
    """Draws distinct siblings and verifies them as if each came from the whole q."""
    return certify("multi_round", drafter=_drafts(PAIR, DistinctAsIndependent), law=Law.INDEPENDENT, rounds=1)


@mutant("recorded q filtered, the draw not")
def recorded_q_filtered():
    """Stores the q that came out of top-k while the token was drawn before it."""
    return certify("token", drafter=_drafts(ONE, FilteredRecord), law=Law.INDEPENDENT, rounds=1)


@mutant("filtered q not normalised")
def filtered_q_not_normalised():
    """Draws from the filtered q and stores it as it was before it was made to add up to 1."""
    return certify("token", drafter=_drafts(ONE, UnnormalisedRecord), law=Law.INDEPENDENT, rounds=1)


@mutant("q of another level of the tree")
def q_of_another_level():
    """Stores one distribution per level and reads them in another order."""
    return certify("without_replacement", drafter=_drafts(FORK, WrongLevel), rounds=1)


@mutant("offsets read as ids")
def offsets_read_as_ids():
    """Proposes d2t[i] for the token i of a reduced vocabulary, which stands for i + d2t[i]; q is stored at the right ids."""
    drafter = _drafts(ONE, OffsetsAsIds, vocab_size=2, offsets=(0, 1))
    return certify("token", drafter=drafter, law=Law.INDEPENDENT, rounds=1)


@mutant("token dropped for low q")
def token_dropped_for_low_q():
    """Ends the draft before a token that came out unlikely, after looking at it: confidence thresholds are often written so."""
    return certify("token", drafter=_drafts(ONE, DropsUnlikely), law=Law.INDEPENDENT, rounds=1)


@mutant("scheduling in retrospect")
def scheduling_in_retrospect():
    """Decides how much of a draft to verify by how sure the drafter was behind the tokens that it drew."""
    drafter = _drafts(TWO, SchedulesInRetrospect, seed=2)
    return certify("token", drafter=drafter, law=Law.INDEPENDENT, seed=2, rounds=1)


@mutant("soft q for what was looked up")
def soft_q_for_what_was_looked_up():
    """A stack that keeps the draft model's q in rows where a lookup proposed the token: it was not drawn from it."""
    stack = stacked(prompt_lookup(1, prompt_lookup_max=1, prompt_lookup_min=1), _drafts(ONE))
    functions = SoftWhereFound(stack.functions.first, stack.functions.then, stack.functions.sources)
    return certify("token", drafter=dataclasses.replace(stack, functions=functions), law=Law.INDEPENDENT, rounds=2)


# Keys and noise


@mutant("draft noise reused for the residual")
def draft_noise_reused():
    """Draws the correction token with the draft token's noise; engines that keep one Gumbel row per position did."""
    return certify(TokenRule("noise of the draft for the residual"), drafter=_drafts(ONE), rounds=1)


def key_of_position(stream, node, committed):
    """Keys of coins that forget which round they are for."""
    return (stream, node + committed) if stream == Stream.ACCEPT else (stream, node, committed)


@mutant("coins keyed by position alone")
def coins_keyed_by_position():
    """Block verification looks at coins behind the accepted prefix, which the next round meets again; one round shows nothing."""
    return certify("block", drafter=_drafts(TWO), law=Law.INDEPENDENT, rounds=2, key=key_of_position)


class AcceptsZero(KeyedChoices):
    """Coins that compare with ``<=``."""

    def bernoulli(self, stream, node, probability):
        """See :meth:`specjax.choices.Choices.bernoulli`."""
        draw = functools.partial(jax.random.uniform, dtype=probability.dtype)
        return jax.vmap(draw)(self._round_keys(stream, node)) <= probability


def accepts_the_impossible(kind: type[KeyedChoices]) -> bool:
    """Whether production coins of probability 0 are ever true; in bfloat16, where one uniform number in 128 is 0."""
    choices = kind.from_seeds(range(2048), jnp.zeros(2048, jnp.int32))
    return bool(jnp.any(choices.bernoulli(Stream.ACCEPT, 1, jnp.zeros(2048, jnp.bfloat16))))


@mutant("acceptance at u = 0")
def acceptance_at_zero():
    """Accepts where u <= p / q, and so at u = 0 what the target excludes. Enumeration has no u: the production draw is asked."""
    return accepts_the_impossible(AcceptsZero)


# Rounds


@mutant("tree mask left out")
def tree_mask_left_out():
    """The target's pass takes a tree for a chain: a node sees its siblings."""
    return certify("match", target=wrong_target(SeesSiblings), drafter=counting_tree(FORK), rounds=1)


@mutant("positions by node number")
def positions_by_node_number():
    """Positions of a tree's nodes come from their place in the pass, not from their depth. Met in a public engine."""
    return certify("match", target=wrong_target(CountsNodes), drafter=counting_tree(FORK), rounds=1)


@mutant("one row's tree for all")
def one_rows_tree_for_all():
    """Trees are shaped per row, and the mask of the first is every row's: the batch index was dropped on the way."""
    return certify("match", target=wrong_target(SharesMask), tree=TreeBounds(num_nodes=3, depth=2), rounds=1)


@mutant("cache entry lost")
def cache_entry_lost():
    """One entry of the accepted ones is not committed; the next round sees it."""
    return certify("match", target=wrong_target(Forgets), drafter=counting_tree(TWO))
