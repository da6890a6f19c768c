"""What every training run of a head starts from: texts split into two parts, the target's states over both, the vocabulary."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.models.draft_vocabulary import coverage, most_frequent
from specjax.models.loaded import Model
from specjax.models.trained_head import target_functions
from specjax.training.batches import Batches
from specjax.training.states import StateStore
from specjax.training.texts import Texts


@dataclasses.dataclass(frozen=True, eq=False)
class Material:
    """Texts with states, ready for :func:`specjax.training.loop.train`.

    Attributes:
      model: the target.
      training: what is trained on.
      held_out: what is only evaluated on; no prompt of it is trained on.
      feature_layers: layers whose states are there; the last is the final hidden state.
      ids: [R] int32, the draft's tokens; None is all.
    """

    model: Model
    training: Batches
    held_out: Batches
    feature_layers: tuple[int, ...]
    ids: np.ndarray | None

    @classmethod
    def prepare(
        cls,
        model: Model,
        texts: Texts,
        folder: str | Path,
        *,
        feature_layers: Sequence[int] | None = None,
        draft_vocab_size: int | None = None,
        draft_ids: np.ndarray | None = None,
        held_out: float = 0.05,
        tokens_per_batch: int = 2048,
        rows_multiple: int = 1,
        progress: Callable[[str], None] = print,
    ) -> "Material":
        """Splits texts and makes the states that are not in ``folder`` yet.

        Args:
          model: the target.
          texts: rows longer than the model's positions are left out, and said.
          folder: for the states, 2 F E bytes for every token.
          feature_layers: of the target; the last must be its final hidden state. None: a third, two thirds and all of its layers.
          draft_vocab_size: R; the most frequent tokens of the training part. None: all tokens.
          draft_ids: [R] int32, the tokens themselves, where training goes on from a draft that has some.
          held_out: share of the prompts that is not trained on.
          tokens_per_batch: of a training batch.
          rows_multiple: see :class:`Batches`.
          progress: gets a line now and then.
        """
        if getattr(model.config, "int8_stream", None) is not None:
            raise ValueError(
                f"Material: model {model.name!r} is int8, through whose products nothing can be learned; load it in float32 or "
                "bfloat16. What is trained for it so drafts for it in int8 too"
            )
        if draft_ids is not None and draft_vocab_size is not None:
            raise ValueError(f"Material: draft_vocab_size is {draft_vocab_size} beside draft_ids; give one of them")
        num_layers = model.config.num_layers
        if feature_layers is None:
            feature_layers = sorted({-(-num_layers // 3), -(-2 * num_layers // 3), num_layers})
        if feature_layers[-1] != num_layers:
            raise ValueError(
                f"Material: feature_layers is {feature_layers}; the last must be the final hidden state, {num_layers}"
            )
        fitting = [row for row in range(len(texts)) if texts.lengths[row] <= model.max_positions]
        if len(fitting) < len(texts):
            progress(f"left out: {len(texts) - len(fitting)} of {len(texts)} texts, longer than {model.max_positions} tokens")
            texts = texts.select(fitting)
        parts = dict(zip(("training", "held_out"), texts.split(held_out), strict=True))
        if not all(map(len, parts.values())):
            raise ValueError(f"Material: {len(texts)} texts and held_out {held_out} leave a part empty; both parts need a text")
        batches = {}
        for name, part in parts.items():
            progress(f"{name}: {len(part)} texts of {part.num_tokens} tokens; their states go to {Path(folder) / name}")
            states = StateStore.make(model, part, feature_layers, Path(folder) / name, Said(name, progress))
            batches[name] = Batches(part, states, tokens_per_batch, rows_multiple=rows_multiple)
        ids = draft_ids
        if draft_vocab_size is not None:
            ids = most_frequent(parts["training"].tokens, draft_vocab_size, model.logits.shape[-1], model.stop_token_ids)
        return cls(model, batches["training"], batches["held_out"], tuple(feature_layers), ids)

    @property
    def draft_vocab_size(self) -> int | None:
        """R; None where the draft knows all tokens."""
        return None if self.ids is None else len(self.ids)

    @property
    def shared(self) -> dict:
        """What the objectives read of the target, in float32; see :class:`specjax.models.eagle_head.EagleHead`."""
        functions, params = target_functions(self.model), self.model.params
        output = functions.output_matrix(params)
        return {
            "embedding": functions.embedding_matrix(params),
            "output": (output if self.ids is None else output[self.ids]).astype(jnp.float32),
            "ids": None if self.ids is None else jnp.asarray(self.ids),
            "soft_cap": getattr(self.model.config, "logit_soft_cap", None),
        }

    def facts(self) -> dict:
        """What the card tells of the texts."""
        facts: dict[str, Any] = {"training_texts": len(self.training.texts), "training_tokens": self.training.texts.num_tokens}
        if self.ids is not None:
            parts = (("training", self.training), ("held_out", self.held_out))
            facts["vocabulary_coverage"] = {name: round(coverage(part.texts.tokens, self.ids), 4) for name, part in parts}
        return facts


class Said:
    """Tells every tenth part of the way."""

    def __init__(self, name: str, progress: Callable[[str], None]):
        self.name, self.progress, self.told = name, progress, 0

    def __call__(self, done: int, total: int) -> None:
        if 10 * done // total > self.told:
            self.told = 10 * done // total
            self.progress(f"{self.name}: {done} of {total}")
