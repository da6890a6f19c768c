"""From material to a trained draft with its card's facts: one function for each kind, and what they share.

Each chooses the functions that are trained, where they start, and the stages; :func:`train_stages` does the rest. Keywords beside
a kind's own are those of :func:`train_stages`: ``start``, ``folder``, ``mesh`` and ``progress``.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax.models.draft_layers import DraftConfig, DraftLayers, layers_of
from specjax.models.eagle_head import EagleConfig, EagleHead
from specjax.models.medusa_heads import MedusaConfig, MedusaHeads
from specjax.models.trained_head import TargetMark, TrainedHead
from specjax.training.draft import DraftObjective
from specjax.training.eagle import EagleObjective
from specjax.training.loop import TrainingSettings, train
from specjax.training.material import Material
from specjax.training.medusa import MedusaObjective
from specjax.training.objective import Objective
from specjax.training.replay import Ranks, rank_texts
from specjax.tree import DraftTree

RANKS = 8
"""Ranks whose accuracies are told."""


@functools.partial(jax.jit, static_argnames="objective")
def _ranks(objective, params, shared, batch):
    return objective.ranks(params, shared, batch)


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
    """Acceptance on the held-out texts, by replay; calling it is what ``train`` wants."""

    objective: Objective
    shared: dict
    material: Material

    def ranks(self, params) -> Ranks:
        """Ranks of the held-out tokens."""
        return rank_texts(lambda batch: _ranks(self.objective, params, self.shared, batch), self.material.held_out)

    def __call__(self, params) -> dict:
        """Share of places where the best guess is right, by depth and given that all before it were, and tokens per round."""
        ranks = self.ranks(params)
        chain = DraftTree.chain(ranks.depth)
        return {
            "acceptance_by_position": np.round(ranks.accuracies(1)[:, 0], 4).tolist(),
            "tokens_per_round": round(ranks.tokens_per_round(chain), 4),
        }


def train_medusa(
    material: Material, settings: TrainingSettings, *, num_heads: int = 4, num_blocks: int = 1, loss: str = "kl", **run
) -> tuple[TrainedHead, list[dict]]:
    """Trains Medusa heads.

    Args:
      material: texts and states.
      settings: how.
      num_heads: N.
      num_blocks: residual blocks of each head.
      loss: ``kl``, ``ce`` or ``tv``.
      run: see :func:`train_stages`.

    Returns:
      The heads and the log.
    """
    width, vocab_size = material.model.config.width, material.model.logits.shape[-1]
    functions = MedusaHeads(MedusaConfig(width, vocab_size, num_heads, num_blocks, material.draft_vocab_size))
    stages = [(MedusaObjective(functions, loss=loss), settings)]
    fresh = functions.init(jax.random.key(settings.seed))
    return train_stages(material, fresh, stages, material.feature_layers[-1:], **run)


def train_eagle(
    material: Material, settings: TrainingSettings, *, depth: int = 4, first_steps: int = 0, loss: str = "kl", **run
) -> tuple[TrainedHead, list[dict]]:
    """Trains an autoregressive head.

    Args:
      material: texts and states.
      settings: how; of the unrolled stage.
      depth: steps of the unroll.
      first_steps: optimizer steps of a stage before it that guesses one token only, at a third of the cost.
      loss: ``kl``, ``ce`` or ``tv``.
      run: see :func:`train_stages`.

    Returns:
      The head and the log.
    """
    model = material.model
    layer = model.config.plain_layer()
    functions = EagleHead(EagleConfig(layer, len(material.feature_layers), material.draft_vocab_size))
    fresh = functions.init(jax.random.key(settings.seed))
    # The norm that the target's output matrix was made for.
    if "final_norm" in model.params:
        fresh["final_norm"] = model.params["final_norm"]
    stages = [(EagleObjective(functions, depth, loss=loss), settings)]
    if first_steps:
        first = dataclasses.replace(settings, num_steps=first_steps)
        stages.insert(0, (EagleObjective(functions, 1, loss=loss), first))
    return train_stages(material, fresh, stages, material.feature_layers, **run)


def train_draft(
    material: Material,
    settings: TrainingSettings,
    *,
    layers: Sequence[int] | None = None,
    depth: int = 4,
    loss: str = "kl",
    start: TrainedHead | None = None,
    **run,
) -> tuple[TrainedHead, list[dict]]:
    """Distils a draft model: a few layers of the target between its own embedding and output matrix.

    Args:
      material: texts and states.
      settings: how.
      layers: of the target, which the draft's start as. None: those of ``start``, else the first and the last.
      depth: tokens in a row that the evaluation drafts.
      loss: ``kl``, ``ce`` or ``tv``.
      start: see :func:`train_stages`.
      run: likewise.

    Returns:
      The draft model and the log.

    Raises:
      ValueError: an index is not one of the target's layers, or layers are given beside a start.
    """
    model, size = material.model, material.draft_vocab_size
    facts = {}
    if start is None:
        layers = sorted({0, model.config.num_layers - 1}) if layers is None else list(layers)
        functions, fresh = layers_of(model, layers, size)
        facts["layers"] = layers
    else:
        if layers is not None:
            raise ValueError(f"train_draft: layers is {layers} beside a start, which has layers of its own; give one of them")
        decoder = start.functions.config.decoder if isinstance(start.functions, DraftLayers) else model.config
        functions, fresh = DraftLayers(DraftConfig(decoder, size)), None
    stages = [(DraftObjective(functions, depth, loss=loss), settings)]
    return train_stages(material, fresh, stages, (), facts, start=start, **run)


def train_stages(
    material: Material,
    fresh: Any,
    stages: Sequence[tuple[Objective, TrainingSettings]],
    feature_layers: Sequence[int],
    facts: dict | None = None,
    *,
    start: TrainedHead | None = None,
    folder: str | Path | None = None,
    mesh: Mesh | None = None,
    progress: Callable[[str], None] = print,
) -> tuple[TrainedHead, list[dict]]:
    """Trains one set of parameters by one objective after the other, evaluates it, and gathers its card's facts.

    Args:
      material: texts and states.
      fresh: parameters of a fresh start.
      stages: objectives with how each is trained; all train the same functions.
      feature_layers: layers of the target that the result reads.
      facts: more for the card.
      start: what to go on from instead, on other texts; the same kind and sizes for the same target.
      folder: see :func:`specjax.training.loop.train`.
      mesh: likewise.
      progress: gets a line now and then.

    Returns:
      What was trained, and the log.

    Raises:
      ValueError: ``start`` does not fit; names both.
    """
    functions = stages[-1][0].functions
    if start is not None:
        _check_start(start, functions, material)
        fresh = start.params
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), fresh)
    shared, log = material.shared, []
    for number, (objective, settings) in enumerate(stages):
        place = None if folder is None else Path(folder) / f"stage_{number}"
        evaluation = Evaluation(objective, shared, material)
        params, entries = train(
            objective,
            params,
            shared,
            material.training,
            settings,
            evaluate=evaluation,
            folder=place,
            mesh=mesh,
            progress=progress,
        )
        log += [{"stage": number, **entry} for entry in entries]
    ranks = evaluation.ranks(params)
    facts = {
        **material.facts(),
        **(facts or {}),
        "stages": [{"loss": objective.loss, "depth": objective.depth, **dataclasses.asdict(s)} for objective, s in stages],
        "tokens_per_batch": material.training.tokens_per_batch,
        "held_out": {"texts": len(material.held_out.texts), **evaluation(params)},
        "accuracies": np.round(ranks.accuracies(RANKS), 4).tolist(),
    }
    trained = TrainedHead(
        functions=functions,
        params=jax.device_get(params),
        target=TargetMark.of(material.model),
        feature_layers=tuple(feature_layers),
        ids=material.ids,
        facts=facts,
    )
    return trained, log


def _check_start(start: TrainedHead, functions, material: Material) -> None:
    start.target.check(material.model, "start")
    if start.ids is None or material.ids is None:
        same_ids = start.ids is material.ids
    else:
        same_ids = np.array_equal(start.ids, material.ids)
    if start.functions != functions or not same_ids:
        raise ValueError(f"start is {start.functions}; this run's is {functions}, and both must know the same tokens")
