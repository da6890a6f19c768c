"""Draft models over the ``model`` axis, those that are to be split (``draft_model(model, split=True)``).

The devices of one row of the mesh draft for the same rows with the same keys, and each of them goes on with the whole draft. So
a split draft model runs as a split target does, and behind it the logits are made whole, on every device and for all its rows;
what a drafter makes of them knows no mesh::

    feed       K/m heads, F/m of the MLP, the cache of K/m heads     [B, C, E]      sums over model
    unembed    logits of the own ids                                 [B, T, V/m]
                                                                     |
                                                                     v  all_gather over model
               logits of all ids                                     [B, T, V]
    draw       filters, temperature, tokens and q                    the same on every device

A drafter asks its rows alone whether and how often to feed, and these devices have the same rows: they meet in every sum and
every gather. Devices with other rows take no part in either, and may feed more or less often.

Letters in shapes: B rows, C tokens that are fed, T nodes, V vocabulary, E width, F MLP width, K key/value heads, m devices.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from specjax.drafters.base import Drafter
from specjax.drafters.model_drafter import ModelDrafter, ModelDrafterState
from specjax.drafters.stacked import Stacked, StackedState
from specjax.models.base import ModelFunctions
from specjax.models.decoder import Decoder
from specjax.models.other_vocabulary import OtherVocabulary
from specjax.models.products import Split
from specjax.parallel.mesh import EVERYWHERE, ROWS
from specjax.parallel.rules import cache_specs, param_specs
from specjax.parallel.sharded_decoder import shard_functions


class GatheringDecoder(Decoder):
    """One device's share of a decoder, its logits those of the whole vocabulary; to be run inside ``jax.shard_map``."""

    def unembed(self, params, hidden):
        """Logits [..., V] of hidden states [..., E] that all devices of the axis have."""
        logits = super().unembed(params, hidden)
        if not self.split.vocab:
            return logits
        # Along the vocabulary only when all shares are there: to join them at once a TPU stores some 8 rows where 128 have room.
        shares = lax.all_gather(logits, self.split.axis)
        return jnp.moveaxis(shares, 0, -2).reshape(*logits.shape[:-1], -1)


def split_drafter(drafter: Drafter, devices: int) -> Drafter:
    """``drafter`` as one of so many devices runs it: of the models that are to be split, its share.

    Raises:
      ValueError: one of them is no ``Decoder``.

    Example:
      >>> import jax
      >>> from specjax.drafters import draft_model
      >>> from specjax.models.config import DecoderConfig
      >>> from specjax.models.loaded import Model
      >>> config = DecoderConfig(vocab_size=96, num_layers=1, width=8, num_query_heads=6, num_kv_heads=2, head_dim=4,
      ...                        mlp_width=16, max_positions=8)
      >>> model = Model(functions=Decoder(config), params=Decoder(config).abstract_params(), vocab_size=96, max_positions=8)
      >>> split_drafter(draft_model(model, 3, split=True).functions, 2).model.config.vocab_size
      48
      >>> split_drafter(draft_model(model, 3).functions, 2).model.config.vocab_size
      96
    """
    if devices == 1:
        return drafter

    def share(functions):
        functions = shard_functions(functions, devices, "draft model")
        return GatheringDecoder(functions.config, functions.feature_layers, functions.split)

    return _with_split_models(drafter, share)


def alone(functions: ModelFunctions) -> ModelFunctions:
    """The functions of a share without what devices exchange: for shapes, not to be run."""
    return dataclasses.replace(functions, split=Split()) if isinstance(functions, Decoder) else functions


def alone_drafter(drafter: Drafter) -> Drafter:
    """The same of a drafter."""
    return _with_split_models(drafter, alone)


def _with_split_models(drafter: Drafter, change: Callable[[ModelFunctions], ModelFunctions]) -> Drafter:
    if isinstance(drafter, Stacked):
        first, then = (_with_split_models(part, change) for part in (drafter.first, drafter.then))
        return dataclasses.replace(drafter, first=first, then=then)
    if not isinstance(drafter, ModelDrafter) or not drafter.split:
        return drafter
    model = drafter.model
    if isinstance(model, OtherVocabulary):
        # Its ids are translated before the embedding and behind the whole logits.
        return dataclasses.replace(drafter, model=OtherVocabulary(change(model.functions)))
    return dataclasses.replace(drafter, model=change(model))


def split_in(functions: ModelFunctions | None) -> Split:
    """What of a model these functions have a share of."""
    return functions.split if isinstance(functions, Decoder) else Split()


def drafter_param_specs(drafter: Drafter) -> Any:
    """Where a drafter's parameters are; a pytree of ``PartitionSpec``, a prefix of that of the parameters."""
    if isinstance(drafter, Stacked):
        return drafter_param_specs(drafter.first), drafter_param_specs(drafter.then)
    return model_param_specs(drafter.model) if isinstance(drafter, ModelDrafter) else EVERYWHERE


def model_param_specs(functions: ModelFunctions) -> Any:
    """The same of a model's parameters."""
    if isinstance(functions, OtherVocabulary):
        return {"model": model_param_specs(functions.functions), "read_as": EVERYWHERE, "said_as": EVERYWHERE}
    return param_specs(functions) if isinstance(functions, Decoder) and functions.split.axis else EVERYWHERE


def drafter_state_specs(drafter: Drafter) -> Any:
    """Where a drafter's state is; a pytree of ``PartitionSpec``, a prefix of that of the state."""
    if isinstance(drafter, Stacked):
        return StackedState(drafter_state_specs(drafter.first), drafter_state_specs(drafter.then))
    model = drafter.model if isinstance(drafter, ModelDrafter) else None
    split = split_in(model.functions if isinstance(model, OtherVocabulary) else model)
    return ModelDrafterState(cache_specs(split), observed=ROWS) if split.axis else ROWS
