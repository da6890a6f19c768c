"""A decoder as one device of the ``model`` axis runs it: the same modules, with its share of the sizes.

One layer on one of m devices; everything between the sums is the device's own::

    stream [B, T, E] --norm--> qkv, its K/m heads --attention, its cache--> output product --sum over model--> + stream
                     --norm--> gate and up, its F/m --silu--> down product ------------------sum over model--> + stream
"""

import dataclasses

from specjax.models.base import ModelFunctions
from specjax.models.decoder import Decoder
from specjax.parallel.rules import local_config, split_of


def shard_functions(functions: ModelFunctions, devices: int, role: str = "target") -> ModelFunctions:
    """Functions of one device's share of the parameters, to be run inside ``jax.shard_map``.

    Args:
      functions: of the whole model.
      devices: size of the ``model`` axis.
      role: what an error calls the model.

    Raises:
      ValueError: it is more than one, and the model is not a ``Decoder``, of which we know what can be split.

    Example:
      >>> from specjax.models.config import DecoderConfig
      >>> config = DecoderConfig(vocab_size=96, num_layers=1, width=8, num_query_heads=6, num_kv_heads=2, head_dim=4,
      ...                        mlp_width=16, max_positions=8)
      >>> share = shard_functions(Decoder(config), 2)
      >>> share.config.num_kv_heads, share.config.num_query_heads, share.config.mlp_width, share.config.vocab_size
      (1, 3, 8, 48)
    """
    if devices == 1:
        return functions
    if not isinstance(functions, Decoder):
        raise ValueError(
            f"mesh has model={devices}, and the {role} is a {type(functions).__name__}, not a Decoder: nothing says what of it "
            "can be split. With model=1 it runs on a mesh, its rows over data"
        )
    return dataclasses.replace(
        functions, config=local_config(functions.config, devices), split=split_of(functions.config, devices)
    )
