"""From material to a trained head with its card's facts: one function for each kind of draft."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax.models.eagle_head import EagleConfig, EagleHead
from specjax.models.medusa_heads import MedusaConfig, MedusaHeads
from specjax.models.trained_head import TargetMark, TrainedHead
from specjax.training.eagle import EagleObjective
from specjax.training.loop import TrainingSettings, train
from specjax.training.material import Material
from specjax.training.medusa import MedusaObjective
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

    objective: Any
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
    material: Material,
    settings: TrainingSettings,
    *,
    num_heads: int = 4,
    num_blocks: int = 1,
    loss: str = "kl",
    start: TrainedHead | None = None,
    folder: str | Path | None = None,
    mesh: Mesh | None = None,
    progress: Callable[[str], None] = print,
) -> tuple[TrainedHead, list[dict]]:
    """Trains Medusa heads.

    Args:
      material: texts and states.
      settings: how.
      num_heads: N.
      num_blocks: residual blocks of each head.
      loss: ``kl``, ``ce`` or ``tv``.
      start: heads to go on from, on other texts; None is a fresh start.
      folder: see :func:`specjax.training.loop.train`.
      mesh: likewise.
      progress: gets a line now and then.

    Returns:
      The heads and the log.
    """
    vocab_size = material.model.logits.shape[-1]
    size = None if material.ids is None else len(material.ids)
    functions = MedusaHeads(MedusaConfig(material.model.config.width, vocab_size, num_heads, num_blocks, size))
    params = functions.init(jax.random.key(settings.seed)) if start is None else _start(start, functions, material)
    stages = [(MedusaObjective(functions, loss), settings)]
    return _train(functions, params, stages, material, material.feature_layers[-1:], folder, mesh, progress)


def train_eagle(
    material: Material,
    settings: TrainingSettings,
    *,
    depth: int = 4,
    first_steps: int = 0,
    loss: str = "kl",
    start: TrainedHead | None = None,
    folder: str | Path | None = None,
    mesh: Mesh | None = None,
    progress: Callable[[str], None] = print,
) -> tuple[TrainedHead, list[dict]]:
    """Trains an autoregressive head.

    Args:
      material: texts and states.
      settings: how; of the unrolled stage.
      depth: steps of the unroll.
      first_steps: optimizer steps of a stage before it that guesses one token only, at a third of the cost.
      loss: ``kl``, ``ce`` or ``tv``.
      start: a head to go on from, on other texts; None is a fresh start.
      folder: see :func:`specjax.training.loop.train`.
      mesh: likewise.
      progress: gets a line now and then.

    Returns:
      The head and the log.
    """
    model = material.model
    size = None if material.ids is None else len(material.ids)
    layer = dataclasses.replace(model.config, num_layers=1)
    functions = EagleHead(EagleConfig(layer, len(material.feature_layers), size))
    if start is None:
        params = functions.init(jax.random.key(settings.seed))
        # The norm that the target's output matrix was made for.
        if "final_norm" in model.params:
            params["final_norm"] = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model.params["final_norm"])
    else:
        params = _start(start, functions, material)
    stages = [(EagleObjective(functions, depth, loss), settings)]
    if first_steps:
        first = dataclasses.replace(settings, num_steps=first_steps)
        stages.insert(0, (EagleObjective(functions, 1, loss), first))
    return _train(functions, params, stages, material, material.feature_layers, folder, mesh, progress)


def _start(start: TrainedHead, functions, material: Material):
    start.target.check(material.model, "start")
    same_ids = (start.ids is None) == (material.ids is None) and (start.ids is None or np.array_equal(start.ids, material.ids))
    if start.functions != functions or not same_ids:
        raise ValueError(f"start is {start.functions}; this run's is {functions}, and both must know the same tokens")
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), start.params)


def _train(functions, params, stages, material: Material, feature_layers, folder, mesh, progress):
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
    facts = material.facts() | {
        "stages": [{"loss": objective.loss, "depth": objective.depth, **dataclasses.asdict(s)} for objective, s in stages],
        "tokens_per_batch": material.training.tokens_per_batch,
        "held_out": {"texts": len(material.held_out.texts), **evaluation(params)},
        "accuracies": np.round(ranks.accuracies(RANKS), 4).tolist(),
    }
    head = TrainedHead(
        functions=functions,
        params=jax.device_get(params),
        target=TargetMark.of(material.model),
        feature_layers=feature_layers,
        ids=material.ids,
        facts=facts,
    )
    return head, log
