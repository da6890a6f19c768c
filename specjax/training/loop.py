"""The training loop: one compiled step, a schedule, evaluation as it goes, checkpoints that resume to the same bits."""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.numeric import is_real
from specjax.training.batches import Batches


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """How long and how fast.

    Attributes:
      num_steps: optimizer steps.
      learning_rate: at its highest.
      warmup_steps: steps until then; afterwards it falls along a cosine to a tenth of that.
      clip: largest norm of the gradient.
      weight_decay: of matrices.
      evaluate_every: steps between evaluations; the last step is always evaluated.
      save_every: steps between checkpoints; the last step is always saved.
      seed: of the order of the batches.

    Raises:
      ValueError: names the field, its value and the range.
    """

    num_steps: int = 1000
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    clip: float = 1.0
    weight_decay: float = 0.0
    evaluate_every: int = 200
    save_every: int = 200
    seed: int = 0

    def __post_init__(self):
        for name, least in (("num_steps", 1), ("warmup_steps", 0), ("evaluate_every", 1), ("save_every", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"TrainingSettings: {name} is {value!r}; it must be a whole number of at least {least}")
        for name in ("learning_rate", "clip", "weight_decay"):
            value = getattr(self, name)
            smallest = 0 if name == "weight_decay" else math.ulp(0)
            if not is_real(value) or not smallest <= value < math.inf:
                raise ValueError(f"TrainingSettings: {name} is {value!r}; it must be a positive number")

    def optimizer(self) -> optax.GradientTransformation:
        """Adam with decoupled weight decay on matrices, behind the clipping."""
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.learning_rate,
            warmup_steps=min(self.warmup_steps, self.num_steps - 1),
            decay_steps=self.num_steps,
            end_value=0.1 * self.learning_rate,
        )
        adam = optax.adamw(
            schedule, b2=0.99, weight_decay=self.weight_decay, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
        )
        return optax.chain(optax.clip_by_global_norm(self.clip), adam)


@flax.struct.dataclass
class TrainingState:
    """What a checkpoint holds.

    Attributes:
      params: what is trained.
      optimizer: the optimizer's state.
      step: int32, steps taken.
    """

    params: Any
    optimizer: Any
    step: jax.Array


@functools.partial(jax.jit, static_argnames=("objective", "settings"), donate_argnames="state")
def _train_step(objective, settings, state: TrainingState, shared, batch):
    (loss, metrics), gradients = jax.value_and_grad(objective, has_aux=True)(state.params, shared, batch)
    updates, optimizer = settings.optimizer().update(gradients, state.optimizer, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainingState(params, optimizer, state.step + 1), metrics | {"total": loss}


def train(
    objective: Callable,
    params: Any,
    shared: dict,
    batches: Batches,
    settings: TrainingSettings,
    *,
    evaluate: Callable[[Any], dict] | None = None,
    folder: str | Path | None = None,
    mesh: Mesh | None = None,
    progress: Callable[[str], None] = print,
) -> tuple[Any, list[dict]]:
    """Trains ``params`` until ``num_steps`` steps are done.

    Args:
      objective: ``(params, shared, batch) -> (loss, metrics)``; hashable, a static part of the step.
      params: what to start from.
      shared: arrays of the target that the objective reads and that stay as they are.
      batches: what to learn from.
      settings: how.
      evaluate: makes numbers (or lists of them) of the parameters, on texts that are not trained on.
      folder: checkpoints and the log go there; a run that was interrupted goes on from what is there. None: nothing is kept.
      mesh: devices of an axis called "data", over which the rows of a batch are spread. None: one device.
      progress: gets a line now and then.

    Returns:
      The trained parameters and the log: a dict for every evaluation.
    """
    state = TrainingState(params, settings.optimizer().init(params), jnp.int32(0))
    # The step gives the state's buffers away; the caller's own parameters must outlive it.
    state = jax.tree.map(jnp.copy, state)
    log, manager = [], None
    home = None if folder is None else Path(folder).resolve()
    if home is not None:
        manager = ocp.CheckpointManager(home / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=1))
        latest = manager.latest_step()
        if latest is not None:
            state = manager.restore(latest, args=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state)))
            log = [entry for entry in json.loads((home / "log.json").read_text()) if entry["step"] <= latest]
            if latest > settings.num_steps:
                raise ValueError(f"train: {home} holds a run of {latest} steps; num_steps is {settings.num_steps}")
            progress(f"goes on from step {latest}")
    if mesh is not None:
        everywhere = NamedSharding(mesh, PartitionSpec())
        state, shared = jax.device_put(state, everywhere), jax.device_put(shared, everywhere)
    place = _placement(mesh)
    start, first = time.perf_counter(), int(state.step)
    since_evaluation: list[dict] = []
    try:
        stream = batches.from_step(first, settings.seed)
        for step, batch in zip(range(first + 1, settings.num_steps + 1), stream, strict=False):
            state, metrics = _train_step(objective, settings, state, shared, place(batch))
            since_evaluation.append(metrics)
            last = step == settings.num_steps
            if step % settings.evaluate_every == 0 or last:
                seconds = time.perf_counter() - start
                entry = {"step": step, "seconds": round(seconds, 1), **_mean(since_evaluation)}
                since_evaluation.clear()
                if evaluate is not None:
                    entry |= evaluate(state.params)
                log.append(entry)
                left = seconds / (step - first) * (settings.num_steps - step)
                progress(f"step {step} of {settings.num_steps}, {seconds:.0f} s, about {left:.0f} s left: {_in_words(entry)}")
            if home is not None and manager is not None and (step % settings.save_every == 0 or last):
                (home / "log.json").write_text(json.dumps(log, indent=1))
                manager.save(step, args=ocp.args.StandardSave(state))
    finally:
        # What was begun to be written is written, however the run ends.
        if manager is not None:
            manager.close()
    return state.params, log


def _placement(mesh: Mesh | None) -> Callable:
    if mesh is None:
        return lambda batch: batch
    rows = NamedSharding(mesh, PartitionSpec("data"))
    return lambda batch: jax.device_put(batch, rows)


def _mean(metrics: list[dict]) -> dict:
    means = jax.tree.map(lambda *values: np.mean(np.stack(values), axis=0), *jax.device_get(metrics))
    return {f"training_{name}": np.round(value, 4).tolist() for name, value in means.items()}


def _in_words(entry: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in entry.items() if name not in ("step", "seconds"))
