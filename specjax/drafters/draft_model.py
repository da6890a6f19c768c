"""A small model of the same tokenizer drafts a chain (Leviathan et al. 2023, arXiv:2211.17192).

Its cache between rounds, with n committed tokens and K drafts (the newest draft token is drawn but not fed)::

    before the round     n - 1 entries, or n - 2 after a round that accepted all K drafts
    propose              feeds what is missing up to the root (1 or 2 tokens), then K - 1 drafts: n + K - 1 entries
    observe, a accepted  n + a + 1 tokens are committed; entries of rejected drafts are cut: min(n + a, n + K - 1)
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.choices import Stream, coupled_draw
from specjax.drafters.base import BoundDrafter, Context, check_num_speculative_tokens
from specjax.drafters.draft_tree import DraftTreeModel, GrowingDraftModel
from specjax.drafters.draw import most_likely, only_where, softened
from specjax.drafters.heads import HeadDrafter
from specjax.drafters.model_drafter import ModelDrafter
from specjax.drafters.stopping import DraftStep, StopHook
from specjax.drafters.tree_growing import check_growth
from specjax.models.base import ModelFunctions
from specjax.models.decoder import Decoder
from specjax.models.draft_layers import DraftLayers
from specjax.models.loaded import Model
from specjax.models.other_vocabulary import OtherVocabulary
from specjax.models.trained_head import TrainedHead
from specjax.row_trees import TreeBounds
from specjax.tree import ROOT, Draft, DraftTree, Law

DEFAULT_LENGTH = 4
"""Draft tokens per round if nothing is said."""


@dataclasses.dataclass(frozen=True)
class DraftModel(ModelDrafter):
    """The drafter's functions; see :func:`draft_model`."""

    num_speculative_tokens: int = DEFAULT_LENGTH
    stop: StopHook | None = None
    law: Law = Law.INDEPENDENT
    law_choices = (Law.INDEPENDENT, Law.COUPLED, Law.DETERMINISTIC)

    # The root, and the last draft token after full acceptance.
    steady_width = 2

    @property
    def most_emitted(self) -> int:
        """See :class:`ModelDrafter`."""
        return self.num_speculative_tokens + 1

    @property
    def tree(self) -> DraftTree:
        """A chain."""
        return DraftTree.chain(self.num_speculative_tokens)

    def with_law(self, law):
        """See :meth:`specjax.drafters.Drafter.with_law`."""
        if law not in self.law_choices:
            known = [choice.value for choice in self.law_choices]
            raise ValueError(f"draft_model: law is {law.value!r}; a chain is drawn by one of {known}")
        return dataclasses.replace(self, law=law)

    def propose(self, params, state, context: Context, choices, num_draft):
        """See :meth:`specjax.drafters.Drafter.propose`."""
        batch = num_draft.shape[0]
        if self.num_speculative_tokens == 0:
            return Draft.empty(batch), state
        num_draft = jnp.clip(jnp.minimum(num_draft, self.room(state, context)), 0, self.num_speculative_tokens)
        nothing = (
            jnp.zeros((batch, self.num_speculative_tokens), jnp.int32),
            jnp.zeros((batch, self.num_speculative_tokens, context.logits_width), context.logits_dtype),
            jnp.zeros((batch,), jnp.int32),
            state.cache,
        )
        tokens, log_probs, drafted, cache = jax.lax.cond(
            jnp.any(num_draft > 0),
            lambda nothing: self._draft(params, context, choices, num_draft, *nothing),
            lambda nothing: nothing,
            nothing,
        )
        draft = Draft(
            tokens=tokens,
            valid=jnp.arange(self.num_speculative_tokens)[None, :] < drafted[:, None],
            parent_log_probs=log_probs,
            tree=self.tree,
            laws=(self.law,) * self.num_speculative_tokens,
        )
        return draft, state.replace(cache=cache)

    def _draft(self, params, context, choices, num_draft, tokens, log_probs, drafted, cache):
        cache, hidden = self.feed_up_to_root(params, cache, context, num_draft > 0)
        greedy = context.sampling.temperature <= 0
        if self.stop is not None:
            context = softened(context)

        def draw(index, hidden, tokens, log_probs, drafted, newest):
            row_log_probs = self.log_probs(params, hidden, context, tokens[:, None], jnp.reshape(index, (1,)))[:, 0]
            # Rows that stopped, at this step or before, stay where they are.
            going = (drafted == index) & (index < num_draft)
            soft_log_probs = row_log_probs
            if self.stop is not None:
                stopping = self.stop(DraftStep(soft_log_probs, tokens, index, newest))
                if getattr(stopping, "shape", None) != going.shape or stopping.dtype != bool:
                    raise ValueError(f"stop {self.stop!r} returned {stopping!r:.200}; it must be booleans of shape {going.shape}")
                going &= ~stopping
                row_log_probs = jnp.where(greedy[:, None], most_likely(soft_log_probs), soft_log_probs)
            token = self._draw(choices, index, only_where(going, row_log_probs))
            newest = jnp.take_along_axis(soft_log_probs, token[:, None], axis=1)[:, 0]
            return tokens.at[:, index].set(token), log_probs.at[:, index].set(row_log_probs), drafted + going, newest

        def unfinished(carry):
            index, _, _, _, drafted, _ = carry
            return jnp.any((drafted == index) & (index < num_draft))

        def feed_and_draw(carry):
            index, cache, tokens, log_probs, drafted, newest = carry
            fed = jax.lax.dynamic_slice_in_dim(tokens, index - 1, 1, axis=1)
            going = (drafted == index) & (index < num_draft)
            cache, hidden = self.feed(params, cache, fed, going.astype(jnp.int32))
            return index + 1, cache, *draw(index, hidden, tokens, log_probs, drafted, newest)

        # The last draft token is not fed: its own continuation is the bonus token, which the target draws.
        first = draw(jnp.int32(0), hidden, tokens, log_probs, drafted, jnp.zeros(drafted.shape, log_probs.dtype))
        with jax.named_scope("draft_steps"):
            _, cache, tokens, log_probs, drafted, _ = jax.lax.while_loop(unfinished, feed_and_draw, (jnp.int32(1), cache, *first))
        return tokens, log_probs, drafted, cache

    def _draw(self, choices, index, log_probs):
        """[B] the token of draft node ``index + 1``."""
        if self.law is Law.COUPLED:
            return coupled_draw(choices, index, log_probs)
        if self.law is Law.DETERMINISTIC:
            return jnp.argmax(log_probs, axis=-1).astype(jnp.int32)
        return choices.categorical(Stream.DRAFT, ROOT + 1 + index, log_probs)


def draft_model(
    model: Model | TrainedHead,
    num_speculative_tokens: int | None = None,
    *,
    tree: DraftTree | TreeBounds | None = None,
    branching: int | None = None,
    stop: StopHook | None = None,
    split: bool = False,
) -> BoundDrafter:
    """A drafter that runs a small model with the target's tokenizer.

    The draft model's distribution goes through the request's own settings (penalties, filters and all the others, the draft
    tokens so far included), which raises acceptance; q is what came out of them, so the rules stay exact.

    Args:
      model: any loaded model, whose tokenizer is compared with the target's when a run starts; or a draft model that was
        distilled from the target (:func:`specjax.load_head`, ``specjax.training``), which shares the target's embedding and
        output matrix.
      num_speculative_tokens: K, draft tokens per round, 0 to 32. If neither this nor a tree is given: 4, or the tree of a
        distilled draft model's card.
      tree: a shape with branches instead of a chain; every inner node's children are drawn from the model's output there.
        With bounds instead, the tree is shaped for every row while it is drafted, of the tokens that are most likely (EAGLE-2, Li
        et al. 2024, arXiv:2406.16858).
      branching: with bounds, how many tokens behind a node become candidates, and how many nodes of a depth go on; at most 8 and
        no more than there are nodes unless given.
      stop: ends drafts early, see ``specjax.drafters.stopping``; for chains, and alone it asks for a chain of 4.
      split: on a mesh, the devices that share the target share the draft model too, by the same rules; else each of them has the
        whole of it (see ``docs/meshes.md``). For models that are a :class:`specjax.models.decoder.Decoder`; without a mesh, and
        with ``model=1``, it changes nothing.

    Raises:
      ValueError: names the argument, its value and what would be right.

    Example:
      >>> from specjax.models.config import DecoderConfig
      >>> config = DecoderConfig(vocab_size=11, num_layers=1, width=8, num_query_heads=2, num_kv_heads=1, head_dim=4,
      ...                        mlp_width=16, max_positions=32)
      >>> model = Model(functions=Decoder(config), params=Decoder(config).init(jax.random.key(0)), vocab_size=11,
      ...               max_positions=32)
      >>> drafter = draft_model(model, 3, split=True)
      >>> drafter.functions.tree.parents, drafter.functions.split
      ((-1, 0, 1, 2), True)
    """
    sizes, binding = _sizes_and_binding(model)
    settings = (*sizes, _checked_split(model, split))
    if stop is not None and (isinstance(stop, type) or not callable(stop)):
        raise ValueError(f"draft_model: stop is {stop!r}; it must be a hook such as specjax.drafters.StopAtEntropy()")
    if branching is not None and not isinstance(tree, TreeBounds):
        raise ValueError(f"draft_model: branching is {branching!r}; it is for trees within bounds (specjax.row_trees.TreeBounds)")
    if tree is None and num_speculative_tokens is None and stop is None:
        own = model.tree if isinstance(model, TrainedHead) else None
        if own is not None and own.is_chain:
            num_speculative_tokens = own.depth
        else:
            tree = own
    if tree is None:
        length = DEFAULT_LENGTH if num_speculative_tokens is None else num_speculative_tokens
        return binding(DraftModel(*settings, check_num_speculative_tokens(length), stop))
    if num_speculative_tokens is not None:
        raise ValueError(f"draft_model: num_speculative_tokens is {num_speculative_tokens!r} beside a tree; give one of them")
    if stop is not None:
        raise ValueError(f"draft_model: stop is {stop!r} beside a tree; only chains can stop early")
    if isinstance(tree, TreeBounds):
        return binding(GrowingDraftModel(*settings, tree, check_growth("draft_model", tree, branching)))
    if not isinstance(tree, DraftTree) or tree.num_nodes == 0:
        raise ValueError(f"draft_model: tree is {tree!r}; it must be a DraftTree of at least one draft node")
    return binding(DraftTreeModel(*settings, tree))


def _checked_split(model, split) -> bool:
    """``split`` if it is something that ``model`` can be asked for."""
    if not isinstance(split, bool):
        raise ValueError(f"draft_model: split is {split!r}; it must be True or False")
    if not split:
        return False
    if isinstance(model, TrainedHead):
        raise ValueError(
            f"draft_model: split is True, and the model was distilled from {model.target.name!r}, whose embedding and output "
            "matrix it shares; every device of a mesh has the whole of such a draft, so split must be False"
        )
    functions = model.functions
    if isinstance(functions, OtherVocabulary):
        functions = functions.functions
    if not isinstance(functions, Decoder):
        raise ValueError(
            f"draft_model: split is True, and the model is a {type(functions).__name__}, not a Decoder: nothing says what of it "
            "can be split, so split must be False"
        )
    return True


def _sizes_and_binding(model) -> tuple[tuple[ModelFunctions, int, int], Callable[..., BoundDrafter]]:
    """What every :class:`ModelDrafter` is told of the model, and what binds one to its parameters."""
    if isinstance(model, Model):
        sizes = (model.functions, model.vocab_size, model.max_positions)
        return sizes, functools.partial(BoundDrafter, params=model.params, name=f"draft_model({model.name})", model=model)
    if not isinstance(model, TrainedHead):
        raise ValueError(f"draft_model: model is {model!r:.200}; it must be a specjax.Model (see specjax.load_model)")
    if not isinstance(model.functions, DraftLayers):
        raise ValueError(
            f"draft_model: model is a trained head of kind {model.kind}; it must be a distilled draft model, or a specjax.Model "
            f"(specjax.drafters.{model.kind} takes this head)"
        )
    decoder = model.functions.config.decoder
    name = f"draft_model({decoder.num_layers} layers for {model.target.name})"
    return (model.functions, decoder.vocab_size, decoder.max_positions), functools.partial(HeadDrafter, name=name, head=model)
