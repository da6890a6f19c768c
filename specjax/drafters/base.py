"""What a drafter is.

Letters in shapes: B rows, S tokens of history, N draft nodes, P nodes with children, V width of the target's logits,
C tokens of one ``observe`` call, F feature layers, E model width.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import flax.struct
import jax

from specjax.cache import KVCache
from specjax.choices import Choices
from specjax.models.base import ModelFunctions
from specjax.models.loaded import Model
from specjax.numeric import is_whole
from specjax.row_trees import TreeBounds
from specjax.sampling.params import SamplingArrays
from specjax.sampling.path import PathDistribution
from specjax.tree import Draft, DraftTree, Law


@flax.struct.dataclass
class Context:
    """What a drafter may read when it proposes.

    Attributes:
      tokens: [B, S] int32, prompt and committed tokens; entries from ``lengths[b]`` on are not valid.
      lengths: [B] int32, committed length; ``tokens[b, lengths[b] - 1]`` is the root of the draft.
      room: [B] int32, how deep a draft may be that the row's budget can hold; 0 for rows that have finished. Nodes that are
        deeper are not verified.
      sampling: settings of the rows.
      distribution: what turns logits at any place behind the committed text into the log-probabilities of the row's settings; the
        target's go through the same.
      target_params: the target's parameters.
      target_cache: the target's cache: ``lengths - 1`` entries.
      vocab_size: ids that may be drafted are below this.
      logits_width: V of ``Draft.parent_log_probs``; at least ``vocab_size``.
      logits_dtype: dtype of ``Draft.parent_log_probs`` and of the target's log-probabilities.
    """

    tokens: jax.Array
    lengths: jax.Array
    room: jax.Array
    sampling: SamplingArrays
    distribution: PathDistribution
    target_params: Any
    target_cache: KVCache
    vocab_size: int = flax.struct.field(pytree_node=False)
    logits_width: int = flax.struct.field(pytree_node=False)
    logits_dtype: Any = flax.struct.field(pytree_node=False)


class Drafter(Protocol):
    """The pure functions of a drafter. Hashable: it is a static part of the compiled round.

    Attributes:
      tree: topology of every proposal, or the bounds of proposals that hold :class:`specjax.row_trees.RowTrees`.
      law_choices: the laws that it can draw by; ``with_law`` fixes one of them for a run.
      feature_layers: layers of the target whose states ``observe`` is to be shown; may be left out where there are none.

    A drafter made of several may name them in ``sources``, a tuple of strings; ``Draft.source`` then says which of them drafted
    each row, and statistics tell them apart. How deep each of them drafts may stand in ``source_depths``. One that often drafts
    but a part of its tree may name such parts in ``passes``, a tuple of node sequences: a round whose valid nodes all lie in one
    of them makes its verify pass over that and the root alone. A pass is compiled for each, and the first that fits is taken.
    """

    # Read-only: a class attribute, a property or a frozen field will do.
    @property
    def tree(self) -> DraftTree | TreeBounds:
        """Topology of every proposal, or its bounds."""
        ...

    @property
    def law_choices(self) -> tuple[Law, ...]:
        """The laws that it can draw by."""
        ...

    def with_law(self, law: Law) -> "Drafter":
        """The same drafter drawing by ``law``."""
        ...

    def init(self, params: Any, batch: int, capacity: int) -> Any:
        """State of ``batch`` rows that have observed nothing."""
        ...

    def observe(self, params: Any, state: Any, tokens: jax.Array, features: jax.Array, counts: jax.Array) -> Any:
        """Takes in committed tokens: chunks of a prompt, accepted tokens, and catching up are the same call.

        Args:
          params: the drafter's parameters.
          state: its state; drafts of the last proposal that were not committed are dropped.
          tokens: [B, C] int32, the tokens that follow those observed before.
          features: [B, C, F, E], the target's features at the position *before* each token; zeros at the first position.
          counts: [B] int32, how many of the C tokens are there.
        """
        ...

    def propose(self, params: Any, state: Any, context: Context, choices: Choices, num_draft: jax.Array) -> tuple[Draft, Any]:
        """Drafts the first ``num_draft`` [B] nodes of the tree, in node order (fewer where it has nothing to say).

        How many is decided without looking at the sampled values. Shapes of a row's own may depend on tokens that are
        deterministic or coupled.
        """
        ...

    def reset(self, state: Any, rows: jax.Array) -> Any:
        """Forgets everything about the rows where ``rows`` [B] is true: a new request moves in."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class BoundDrafter:
    """A drafter with its parameters: what ``specjax.generate`` takes.

    Attributes:
      functions: the drafter.
      params: its parameters.
      name: how it is called in reports.
      model: the model behind it, where there is one; its tokenizer must be the target's.

    Raises:
      ValueError: ``functions`` lack something that a drafter has.
    """

    functions: Drafter
    params: Any = ()
    name: str = ""
    model: Model | None = None

    def __post_init__(self):
        needed = ("tree", "law_choices", "with_law", "init", "observe", "propose", "reset")
        missing = [name for name in needed if not hasattr(self.functions, name)]
        if isinstance(self.functions, type):
            raise ValueError(
                f"drafter is the class {self.functions.__name__}; it must be an object, or what its function returns"
            )
        if missing:
            raise ValueError(f"drafter is {self.functions!r}; a drafter has {', '.join(missing)} (see specjax.drafters.Drafter)")
        if not isinstance(self.functions.tree, DraftTree | TreeBounds):
            raise ValueError(
                f"drafter {self.functions!r:.200}: tree is {self.functions.tree!r}; it must be a DraftTree, or TreeBounds"
            )
        laws = self.functions.law_choices
        if not isinstance(laws, Sequence) or not all(isinstance(law, Law) for law in laws):
            raise ValueError(f"drafter {self.functions!r:.200}: law_choices is {laws!r}; it must be a tuple of specjax.tree.Law")

    def target_functions(self, target: Model) -> ModelFunctions:
        """The target's functions, showing the layers that the drafter reads."""
        layers = feature_layers_of(self.functions)
        if not layers:
            return target.functions
        if not hasattr(target.functions, "with_features"):
            raise ValueError(
                f"drafter {self.name or self.functions!r:.200} reads layers {layers} of the target; model {target.name!r} is a "
                f"{type(target.functions).__name__} without with_features (see specjax.models.decoder.Decoder)"
            )
        return target.functions.with_features(layers)

    def params_for(self, target: Model) -> Any:
        """The parameters beside this target: those of the drafter, unless it shares some of the target's."""
        del target
        return self.params

    def check_target(self, target: Model) -> None:
        """Raises ValueError if drafts of this drafter mean something else to ``target``."""
        if self.model is None or self.model.tokenizer is None or target.tokenizer is None:
            return
        target.tokenizer.check_same(self.model.tokenizer)


def feature_layers_of(drafter: Drafter) -> tuple[int, ...]:
    """The layers of the target that a drafter's ``observe`` is to be shown."""
    return getattr(drafter, "feature_layers", ())


def sources_of(drafter: Drafter) -> tuple[str, ...]:
    """Names of the drafters that a draft of ``drafter`` may come from; empty if it is not made of several."""
    return tuple(getattr(drafter, "sources", ()))


def source_depths(drafter: Drafter) -> tuple[int, ...]:
    """How deep the drafts of each of the drafter's sources are: of itself alone, if it is not made of several."""
    depth = drafter.tree.depth
    return tuple(getattr(drafter, "source_depths", (depth,) * max(1, len(sources_of(drafter)))))


def bind(drafter) -> BoundDrafter:
    """A :class:`BoundDrafter` of what a user passed: one already, the functions of one without parameters, or None."""
    if drafter is None:
        return BoundDrafter(NoDrafter(), name="none")
    if isinstance(drafter, BoundDrafter):
        return drafter
    return BoundDrafter(drafter, name=type(drafter).__name__)


class Stateless:
    """The methods of a drafter that carries nothing from round to round: all that it drafts with is in its context."""

    def with_law(self, law):
        """See :meth:`Drafter.with_law`."""
        del law
        return self

    def init(self, params, batch, capacity):
        """See :meth:`Drafter.init`."""
        del params, batch, capacity
        return ()

    def observe(self, params, state, tokens, features, counts):
        """See :meth:`Drafter.observe`."""
        del params, tokens, features, counts
        return state

    def reset(self, state, rows):
        """See :meth:`Drafter.reset`."""
        del rows
        return state


@dataclasses.dataclass(frozen=True)
class NoDrafter(Stateless):
    """Proposes nothing: a round is one step of plain decoding, through the same code."""

    tree = DraftTree.chain(0)
    law_choices = ()

    def propose(self, params, state, context, choices, num_draft):
        """See :meth:`Drafter.propose`."""
        del params, context, choices
        return Draft.empty(num_draft.shape[0]), state


def check_num_speculative_tokens(value, least: int = 0) -> int:
    """``value`` if it is a draft length from ``least`` to 32."""
    if not is_whole(value) or not least <= value <= 32:
        raise ValueError(f"num_speculative_tokens is {value!r}; it must be a whole number from {least} to 32")
    return int(value)
