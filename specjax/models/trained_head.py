"""A trained head or draft model with what it needs to know of its target."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.base import TargetFunctions
from specjax.models.draft_layers import DraftConfig, DraftLayers
from specjax.models.draft_vocabulary import check_vocabulary
from specjax.models.eagle_head import EagleConfig, EagleHead
from specjax.models.loaded import Model
from specjax.models.medusa_heads import MedusaConfig, MedusaHeads
from specjax.models.products import take_rows
from specjax.models.quantised import is_quantised
from specjax.tree import DraftTree

KINDS = {"medusa": (MedusaHeads, MedusaConfig), "eagle": (EagleHead, EagleConfig), "draft": (DraftLayers, DraftConfig)}
"""Functions and sizes of each kind of draft that is trained for a target.

The functions have ``config``, ``kind``, ``shared_names``, ``abstract_params`` and ``init``; the sizes ``width``, ``vocab_size``
and ``draft_vocab_size``."""

NUM_SAMPLES = 32
# Half precision rounds the same weights to within 0.4%; other weights differ by their own size.
SAMPLE_TOLERANCE = 0.02


def _sampled(size: int) -> np.ndarray:
    """Rows of an embedding that its mark has a number of."""
    return np.linspace(0, size - 1, NUM_SAMPLES).astype(int)


def target_functions(model: Model) -> TargetFunctions:
    """The functions of a model that heads are to draft for.

    Raises:
      ValueError: they do not show what heads read.
    """
    for name in ("embedding_matrix", "output_matrix", "with_features"):
        if not hasattr(model.functions, name):
            raise ValueError(
                f"model {model.name!r} is a {type(model.functions).__name__} without {name}; heads read the target's "
                "embedding, output matrix and layers (see specjax.models.decoder.Decoder)"
            )
    return cast(TargetFunctions, model.functions)


def _sizes(model: Model) -> dict[str, int]:
    """Width, vocabulary and layers of a model that heads are to draft for."""
    width = target_functions(model).embedding_matrix(model.params).shape[1]
    return {"width": width, "vocab_size": model.logits.shape[-1], "num_layers": model.config.num_layers}


@dataclasses.dataclass(frozen=True)
class TargetMark:
    """What a head remembers of the target that it was trained for.

    Attributes:
      name: the model's.
      width: E.
      vocab_size: V, width of the logits.
      num_layers: L.
      sample: some numbers of its embedding, which tell one set of weights from another in any dtype.
    """

    name: str
    width: int
    vocab_size: int
    num_layers: int
    sample: tuple[float, ...]

    @classmethod
    def of(cls, model: Model) -> "TargetMark":
        """The mark of a model.

        Raises:
          ValueError: its functions do not show what heads read.
        """
        sizes = _sizes(model)
        embedding = target_functions(model).embedding_matrix(model.params)
        rows, columns = jnp.asarray(_sampled(embedding.shape[0])), 7 * np.arange(NUM_SAMPLES) % sizes["width"]
        sample = np.asarray(take_rows(embedding, rows)[np.arange(NUM_SAMPLES), columns].astype(jnp.float32))
        return cls(model.name, **sizes, sample=tuple(np.round(sample.tolist(), 6).tolist()))

    def fits(self, model: Model) -> bool:
        """Whether ``model`` is this target, whatever it is called."""
        try:
            self.check(model, "")
        except ValueError:
            return False
        return True

    def check(self, model: Model, owner: str) -> None:
        """Raises ValueError, naming both, if ``model`` is another target than this."""
        # Where sizes differ, nothing of the weights is read.
        for name, size in _sizes(model).items():
            if size != getattr(self, name):
                raise ValueError(
                    f"{owner} was made for {self.name!r} with {name} {getattr(self, name)}; the target {model.name!r} has {name} "
                    f"{size}"
                )
        ours, theirs = np.array(self.sample), np.array(TargetMark.of(model).sample)
        embedding = target_functions(model).embedding_matrix(model.params)
        rounding: np.ndarray | int = 0
        if is_quantised(embedding):
            rounding = np.asarray(embedding.scale)[_sampled(len(embedding.scale))]
        if np.max(np.abs(ours - theirs) - rounding) > SAMPLE_TOLERANCE * np.max(np.abs(ours)):
            raise ValueError(
                f"{owner} was made for {self.name!r}; the target {model.name!r} has the same sizes and other weights"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedHead:
    """What was trained to draft for a target, with its parameters and its target's mark: heads, or a distilled draft model.

    Attributes:
      functions: of one of the ``KINDS``.
      params: its own parameters.
      target: the mark of its target.
      feature_layers: layers of the target that it reads; a draft model reads none.
      ids: [R] int32, tokens that it knows, rising; None for all.
      tree: what to draft if nothing else is asked for.
      facts: how it was trained and what it reaches, for its card; plain values.

    Raises:
      ValueError: parameters, vocabulary map or tree do not fit the head.
    """

    functions: MedusaHeads | EagleHead | DraftLayers
    params: Any = dataclasses.field(repr=False)
    target: TargetMark
    feature_layers: tuple[int, ...]
    ids: np.ndarray | None = dataclasses.field(default=None, repr=False)
    tree: DraftTree | None = None
    facts: dict = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self):
        config, owner = self.functions.config, f"{self.kind} of {self.target.name!r}"
        object.__setattr__(self, "feature_layers", tuple(self.feature_layers))
        if config.width != self.target.width or self.vocab_size != self.target.vocab_size:
            raise ValueError(
                f"{owner}: made for width {config.width} and {self.vocab_size} tokens, its target has width "
                f"{self.target.width} and {self.target.vocab_size} tokens"
            )
        if (self.ids is None) != (config.draft_vocab_size is None):
            raise ValueError(
                f"{owner}: draft_vocab_size is {config.draft_vocab_size}, and the vocabulary map is {self.ids!r:.80}"
            )
        if self.ids is not None and config.draft_vocab_size is not None:
            check_vocabulary(self.ids, config.draft_vocab_size, self.vocab_size, owner)
        wanted = self.functions.abstract_params()
        if jax.tree.structure(wanted) != jax.tree.structure(self.params):  # type: ignore[operator]  # jaxlib has no hints
            raise ValueError(f"{owner}: the parameters' names are not those of {config}")
        for (path, want), have in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(self.params), strict=True):
            if want.shape != have.shape:
                raise ValueError(f"{owner}: {jax.tree_util.keystr(path)} has shape {have.shape}; it must be {want.shape}")

    @property
    def kind(self) -> str:
        """One of the ``KINDS``."""
        return self.functions.kind

    @property
    def vocab_size(self) -> int:
        """V of the target's logits."""
        return self.functions.config.vocab_size

    def params_in(self, dtype) -> dict:
        """The parameters as a head of this ``dtype`` has them; norms stay in at least float32."""
        wanted = self.functions.abstract_params(dtype)
        return jax.tree.map(lambda leaf, want: jnp.asarray(leaf, want.dtype), self.params, wanted)

    def shared(self, target: Model) -> dict:
        """What the head reads of its target's parameters, in the target's dtype; whole matrices are the target's own arrays."""
        ids = None if self.ids is None else jnp.asarray(self.ids)
        shared: dict[str, Any] = {"ids": ids}
        if "embedding" in self.functions.shared_names:
            shared["embedding"] = target_functions(target).embedding_matrix(target.params)
        if "output" in self.functions.shared_names:
            matrix = target_functions(target).output_matrix(target.params)
            shared["output"] = matrix if ids is None else matrix[ids]
        return shared
