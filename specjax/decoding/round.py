"""The compiled round: propose, verify, commit.

One round of a row with n committed tokens (the newest, r, is not yet in the caches)::

    committed        . . . . . . r                       n tokens, n - 1 cache entries
    propose                        x1 x2 x3              the drafter, up to K tokens
    verify pass                  r x1 x2 x3              the target, all T = K + 1 at once
    rule                           x1 x2 y               a = 2 accepted, y corrects x3 (or follows it: the bonus token)
    committed        . . . . . . r x1 x2 y               n + a + 1 tokens
    cache commit     . . . . . . r x1 x2                 n + a entries; x3's keys and values are never written

Everything is in one program; a dispatch may run several rounds without the host.
"""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp

from specjax.choices import Choices, KeyedChoices
from specjax.decoding.adaptive import RecentAcceptance, depth_that_pays
from specjax.decoding.layout import ONE_DEVICE, Layout, Place, any_row
from specjax.decoding.outcome import count, emitted_tokens, gather, overlap_on_path, path_nodes
from specjax.decoding.state import (
    NO_TOKEN,
    Counters,
    DecodingState,
    DispatchInfo,
    Finish,
    Parameters,
    RoundInfo,
    TokenLogprobs,
)
from specjax.decoding.verify_pass import places, smallest_pass, spread_to, usual_passes
from specjax.drafters.base import Context, Drafter, source_depths, sources_of
from specjax.models.base import ModelFunctions
from specjax.row_trees import RowTrees
from specjax.sampling.allowed_tokens import START, advance
from specjax.sampling.params import SamplingArrays
from specjax.sampling.path import LogitsProcessor, PathDistribution, tree_paths
from specjax.sampling.transforms import has_nan
from specjax.tree import ROOT, Draft
from specjax.verification.base import CHAIN, Rule, Verdict, check_fits, check_verdict


@dataclasses.dataclass(frozen=True)
class Round:
    """What a compiled round is made of: all of it static, hashable and without parameters.

    Attributes:
      target: the target's functions.
      drafter: the drafter's functions, its law fixed.
      rule: the verification rule.
      vocab_size: ids that may be emitted are below this.
      logits_width: V, width of the target's logits.
      logits_dtype: dtype in which they become probabilities, at least float32.
      rounds_per_dispatch: R, rounds that one call of ``run_rounds`` may run.
      prefill_width: prompt tokens per pass of ``prefill``.
      logits_processor: a user's own transform of the target's logits, or None.
      depths: depths, ascending, at which drafts are often cut (see ``DecodingState.max_depths``); a verify pass of their size is
        compiled for each.
      num_logprobs: n, how many of the most likely tokens are reported beside every emitted one, with the target's own
        log-probabilities; 0 reports the emitted one's alone, None reports nothing and costs nothing.
      layout: where the arrays are; one device unless a mesh is named.
    """

    target: ModelFunctions
    drafter: Drafter
    rule: Rule
    vocab_size: int
    logits_width: int
    logits_dtype: Any
    rounds_per_dispatch: int = 32
    prefill_width: int = 64
    logits_processor: LogitsProcessor | None = None
    depths: tuple[int, ...] = ()
    num_logprobs: int | None = None
    layout: Layout = ONE_DEVICE

    @property
    def draft_depths(self) -> tuple[int, ...]:
        """Depths that drafts have by themselves: none, those of ``depths``, and the drafter's own."""
        deepest = self.drafter.tree.depth
        return tuple(sorted({0, *(depth for depth in self.depths if depth < deepest), deepest}))

    def init(self, params: Parameters, tokens, lengths, limits, stop_token_ids, sampling: SamplingArrays) -> DecodingState:
        """A batch of prompts, nothing of which has been through a model.

        Args:
          params: of target and drafter.
          tokens: [B, S + 1] int32, prompts; their capacity S is the cache's.
          lengths: [B] int32, prompt lengths, at least 1.
          limits: [B] int32, lengths at which the rows end, at most S + 1.
          stop_token_ids: [B, M] int32.
          sampling: settings of the rows.
        """
        batch, width = tokens.shape
        chex.assert_shape([lengths, limits], (batch,))
        acceptance = None
        if params.round_seconds is not None:
            acceptance = RecentAcceptance.zeros(batch, len(source_depths(self.drafter)), self.drafter.tree.depth)
        return DecodingState(
            tokens=tokens,
            prompt_lengths=lengths,
            lengths=lengths,
            limits=limits,
            finish=jnp.where(lengths < limits, Finish.RUNNING, Finish.LENGTH).astype(jnp.int32),
            stop_token_ids=stop_token_ids,
            sampling=sampling,
            states=jnp.full((batch,), START, jnp.int32),
            cache=self.target.init_cache(params.target, batch, width - 1),
            observed=jnp.zeros((batch,), jnp.int32),
            max_depths=jnp.full((batch,), self.drafter.tree.depth, jnp.int32),
            drafter=self.drafter.init(params.drafter, batch, width - 1),
            counters=Counters.zeros(batch, self.drafter.tree.depth, self.logits_dtype, len(sources_of(self.drafter))),
            acceptance=acceptance,
        )

    def prefill_chunk(self, params: Parameters, state: DecodingState) -> DecodingState:
        """Feeds the next ``prefill_width`` prompt tokens of every row to the target and shows them to the drafter.

        All but the newest token of a row go through the target; the first round feeds that one.
        """
        start = state.cache.lengths
        counts = jnp.clip(state.lengths - 1 - start, 0, self.prefill_width)
        places = start[:, None] + jnp.arange(self.prefill_width)[None, :]
        output = self.target.apply(params.target, gather(state.tokens, places), places, state.cache, None)
        nodes = jnp.broadcast_to(jnp.arange(self.prefill_width), places.shape)
        # The pass has read the cache before it is written to: the compiler needs no copy of it.
        output, cache = jax.lax.optimization_barrier((output, state.cache))
        cache = cache.commit(output.block, nodes, counts)
        # The drafter also sees the token after the chunk, whose feature this pass has just made, and at the very first
        # call the token at position 0, which no feature comes before.
        places = state.observed[:, None] + jnp.arange(self.prefill_width + 1)[None, :]
        before = places - 1 - start[:, None]
        features = gather(output.features, jnp.clip(before, 0, self.prefill_width - 1))
        features = jnp.where((before >= 0)[..., None, None], features, 0)
        observed = start + counts + 1
        drafter = self.drafter.observe(
            params.drafter, state.drafter, gather(state.tokens, places), features, observed - state.observed
        )
        return state.replace(cache=cache, drafter=drafter, observed=observed)

    def context(self, params: Parameters, state: DecodingState) -> Context:
        """What the drafter may read of ``state``."""
        distribution = PathDistribution.create(
            state.sampling,
            state.tokens,
            state.prompt_lengths,
            state.lengths,
            state.stop_token_ids,
            self.vocab_size,
            width=self.logits_width,
            states=None if params.next_state is None else state.states,
            next_state=params.next_state,
            logits_processor=self.logits_processor,
        )
        return Context(
            tokens=state.tokens,
            lengths=state.lengths,
            # A round emits one token more than it accepts: never draft deeper than the budget can hold.
            room=jnp.where(state.running, jnp.minimum(state.limits - state.lengths - 1, state.max_depths), 0),
            sampling=state.sampling,
            distribution=distribution,
            target_params=params.target,
            target_cache=state.cache,
            vocab_size=self.vocab_size,
            logits_width=self.logits_width,
            logits_dtype=self.logits_dtype,
        )

    def step(self, params: Parameters, state: DecodingState, choices: Choices | None = None) -> tuple[DecodingState, RoundInfo]:
        """One round.

        Args:
          params: of target and drafter.
          state: a batch whose prompts are in.
          choices: where randomness comes from; keys of the rows' seeds unless a certificate enumerates.
        """
        if choices is None:
            choices = KeyedChoices(state.sampling.seeds, state.sampling.completion, state.lengths)
        if state.acceptance is not None:
            room = jnp.where(state.running, state.limits - state.lengths - 1, -1)
            assert params.round_seconds is not None  # what is accepted is kept for these
            depths = self.draft_depths, source_depths(self.drafter)
            depth = depth_that_pays(params.round_seconds, *depths, state.acceptance, room, self.layout)
            state = state.replace(max_depths=jnp.broadcast_to(depth, state.max_depths.shape))
        context = self.context(params, state)
        tree = self.drafter.tree
        num_draft = jnp.asarray(tree.nodes_within)[jnp.clip(context.room, 0, tree.depth)]
        with jax.named_scope("propose"):
            draft, drafter = self.drafter.propose(params.drafter, state.drafter, context, choices, num_draft)
        proposed = draft.tree.bounds if isinstance(draft.tree, RowTrees) else draft.tree
        if proposed != tree:
            raise ValueError(f"drafter {self.drafter!r:.200} proposed the tree {proposed}; it must be its own, {tree}")
        draft = draft.checked()
        if (draft.source is not None) != bool(sources_of(self.drafter)):
            raise ValueError(f"drafter {self.drafter!r:.200}: it must name its sources and state each draft's, or do neither")
        # What the drafter really drew by, were it not what it was chosen for.
        check_fits(self.rule, draft.tree, draft.laws)
        asked = jnp.arange(draft.tree.num_nodes)[None, :] < num_draft[:, None]
        if isinstance(draft.tree, RowTrees):
            # In these, node order says little about depth.
            asked &= draft.tree.depths[:, 1:] <= context.room[:, None]
        draft = draft.replace(valid=draft.valid & asked).checked()

        judged, features, block = self._verify(params.target, state, draft, choices, context.distribution)
        # All that is left of the vocabularies are a few numbers per node.
        verdict, (broken, common, logprobs) = self.layout.verdict(judged, state.lengths.shape[0])

        nodes = path_nodes(verdict)
        emitted = emitted_tokens(draft, verdict)
        counts, finish = self._ends(state, emitted, verdict, broken)
        with jax.named_scope("commit"):
            cache = state.cache.commit(block, nodes, counts)
        # The feature before an emitted token is that of the node whose output it was drawn from.
        with jax.named_scope("observe"):
            drafter = self.drafter.observe(params.drafter, drafter, emitted, gather(features, nodes), counts)
        place = jnp.arange(emitted.shape[1])[None, :]
        written = jnp.where(place < counts[:, None], state.lengths[:, None] + place, state.tokens.shape[1])
        tokens = state.tokens.at[jnp.arange(emitted.shape[0])[:, None], written].set(emitted, mode="drop")
        lengths = state.lengths + counts
        states = state.states
        if params.next_state is not None:
            states = advance(params.next_state, states, emitted, counts)
        counters = count(state, draft, verdict, common, counts)
        acceptance = state.acceptance
        if acceptance is not None:
            tested = counters.num_tested_per_pos - state.counters.num_tested_per_pos
            accepted = counters.num_accepted_tokens_per_pos - state.counters.num_accepted_tokens_per_pos
            offered = jnp.any(draft.valid, axis=1)
            acceptance = acceptance.after(state.running, num_draft > 0, tested, accepted, offered, draft.source)
        state = state.replace(
            tokens=tokens,
            lengths=lengths,
            finish=finish,
            states=states,
            cache=cache,
            observed=state.observed + counts,
            drafter=drafter,
            counters=counters,
            acceptance=acceptance,
        )
        drafted = self.layout.in_total(jnp.sum(draft.valid, dtype=jnp.int32))
        return state, RoundInfo(jnp.where(place < counts[:, None], emitted, NO_TOKEN), counts, drafted, logprobs)

    def _verify(self, params, state: DecodingState, draft: Draft, choices: Choices, distribution: PathDistribution):
        """What is made of the root and all draft nodes: see :meth:`_judge`; features [B, T, F, E]; and the block.

        The first is of J rows, those that this device judges: all B where it is the only one.
        """
        root = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
        tokens = jnp.concatenate([root, draft.tokens], axis=1)
        positions = state.lengths[:, None] - 1 + jnp.atleast_2d(jnp.asarray(draft.tree.depths, jnp.int32))
        path_tokens, path_lengths = tree_paths(*self.layout.judged((draft.tree, draft.tokens)))
        distribution = distribution.of_rows(self.layout.judged)
        own_choices, own_draft = self.layout.judged((choices, draft))

        def passed(nodes, mask):
            place = places(nodes)
            with jax.named_scope("verify"):
                output = self.target.apply(params, tokens[:, place], positions[:, place], state.cache, mask)
                logits = self.layout.unembed(self.target, params, output.hidden).astype(self.logits_dtype)
                log_probs = distribution.log_probs(logits, path_tokens[:, place], path_lengths[..., place])
                reported = None if self.num_logprobs is None else logits
            with jax.named_scope("judge"):
                judging = own_draft
                if nodes == (ROOT,) and draft.tree.num_nodes > 1 and CHAIN in self.rule.shapes:
                    # Nothing was drafted: logits of a whole tree need not be made up to be looked at. To judge every pass alone
                    # would cost more to compile, and to lay out on a CPU, than it saves.
                    judging = own_draft.with_one_node()
                spread = functools.partial(spread_to, nodes, size=judging.tree.size, axis=1)
                log_probs, reported = jax.tree.map(spread, (log_probs, reported))
                judged = self._judge(own_choices, judging, log_probs, reported)
            return judged, output.features, output.block

        return smallest_pass(passed, draft, usual_passes(self.drafter, self.depths), self.layout)

    def _judge(self, choices: Choices, draft: Draft, log_probs, logits):
        """The verdict of rows, and what else is made of whole vocabularies.

        The latter are: [B, T] bool, outputs that are not numbers; [B, depth], by depth the overlap at the accepted path's node,
        0 where the drafter knows no q; log-probabilities of the emitted tokens, None unless they are to be reported.
        """
        verdict = self.rule(choices, draft, log_probs)
        check_verdict(self.rule, verdict, draft)
        logprobs = None
        if logits is not None:
            logprobs = self._token_logprobs(gather(logits, path_nodes(verdict)), emitted_tokens(draft, verdict))
        return verdict, (has_nan(log_probs), overlap_on_path(draft, verdict, log_probs), logprobs)

    def _token_logprobs(self, logits, emitted) -> TokenLogprobs:
        """What is reported of the ``emitted`` tokens [B, C]; ``logits`` [B, C, V] are those that each was drawn from."""
        assert self.num_logprobs is not None
        real = jnp.arange(logits.shape[-1]) < self.vocab_size
        log_probs = jax.nn.log_softmax(jnp.where(real[None, None], logits, -jnp.inf), axis=-1)
        chosen = jnp.take_along_axis(log_probs, emitted[..., None], axis=-1)[..., 0]
        top, top_ids = jax.lax.top_k(log_probs, min(self.num_logprobs, self.vocab_size))
        return TokenLogprobs(chosen, top_ids.astype(jnp.int32), top)

    def _ends(self, state: DecodingState, emitted, verdict: Verdict, broken):
        """[B] how many of the ``emitted`` tokens [B, depth + 1] are kept, and the rows' finish.

        ``broken`` [B, T] are nodes whose output is not a number.
        """
        place = jnp.arange(emitted.shape[1])[None, :]
        counts = jnp.where(state.running, verdict.num_accepted + 1, 0)
        # Every token was drawn from the output of the node before it. The first that came from a NaN ends the row.
        from_nan = gather(broken, path_nodes(verdict)) & (place < counts[:, None])
        broken = jnp.any(from_nan, axis=1)
        counts = jnp.where(broken, jnp.argmax(from_nan, axis=1), counts)
        ends = jnp.any(emitted[:, :, None] == state.stop_token_ids[:, None, :], axis=-1) & (place < counts[:, None])
        stopped = jnp.any(ends, axis=1)
        counts = jnp.where(stopped, jnp.argmax(ends, axis=1) + 1, counts)
        full = state.lengths + counts >= state.limits
        finish = jnp.where(stopped, Finish.STOP, jnp.where(broken, Finish.NAN, jnp.where(full, Finish.LENGTH, state.finish)))
        return counts.astype(jnp.int32), jnp.where(state.running, finish, state.finish).astype(jnp.int32)

    def run_rounds(self, params, state: DecodingState, num_rounds) -> tuple[DecodingState, DispatchInfo]:
        """Up to ``num_rounds`` (int32, at most ``rounds_per_dispatch``) rounds, fewer if every row finishes."""
        batch, depth = state.lengths.shape[0], self.drafter.tree.depth
        tokens = jnp.full((batch, self.rounds_per_dispatch, depth + 1), NO_TOKEN, jnp.int32)

        drafted = jnp.zeros((self.rounds_per_dispatch,), jnp.int32)
        logprobs = None
        if self.num_logprobs is not None:
            chosen = jnp.zeros(tokens.shape, self.logits_dtype)
            top = jnp.zeros((*tokens.shape, min(self.num_logprobs, self.vocab_size)), self.logits_dtype)
            logprobs = TokenLogprobs(chosen, top.astype(jnp.int32), top)

        def unfinished(carry):
            index, going, *_ = carry
            return (index < jnp.minimum(num_rounds, self.rounds_per_dispatch)) & going

        def one(carry):
            index, _, state, (tokens, logprobs), drafted = carry
            state, info = self.step(params, state)
            reported = jax.tree.map(
                lambda all_rounds, new: jax.lax.dynamic_update_index_in_dim(all_rounds, new, index, axis=1),
                (tokens, logprobs),
                (info.tokens, info.logprobs),
            )
            return index + 1, any_row(self.layout, state.running), state, reported, drafted.at[index].set(info.drafted)

        start = (jnp.int32(0), any_row(self.layout, state.running), state, (tokens, logprobs), drafted)
        rounds, _, state, (tokens, logprobs), drafted = jax.lax.while_loop(unfinished, one, start)
        return state, DispatchInfo(tokens, state.finish, rounds, drafted, logprobs)


@functools.partial(jax.jit, static_argnames="program", donate_argnames="state")
def run_rounds(program: Round, params, state: DecodingState, num_rounds):
    """``program.run_rounds``, compiled; the state's buffers are reused."""
    places = (Place.PARAMS, Place.STATE, Place.SAME), (Place.STATE, Place.INFO)
    return program.layout.spread(program, program.run_rounds, *places)(params, state, num_rounds)


@functools.partial(jax.jit, static_argnames="program", donate_argnames="state")
def prefill(program: Round, params, state: DecodingState, num_chunks):
    """Up to ``num_chunks`` chunks of the prompts, compiled; the state's buffers are reused."""

    def all_chunks(params, state, num_chunks):
        def lacking(state):
            return any_row(program.layout, state.observed < state.lengths)

        def unfinished(carry):
            index, going, _ = carry
            return (index < num_chunks) & going

        def one(carry):
            index, _, state = carry
            state = program.prefill_chunk(params, state)
            return index + 1, lacking(state), state

        return jax.lax.while_loop(unfinished, one, (jnp.int32(0), lacking(state), state))[2]

    places = (Place.PARAMS, Place.STATE, Place.SAME), Place.STATE
    return program.layout.spread(program, all_chunks, *places)(params, state, num_chunks)
