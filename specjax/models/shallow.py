"""Some layers of a model, as a model of its own."""

import dataclasses
from collections.abc import Sequence

import jax

from specjax.models.decoder import Decoder
from specjax.models.loaded import Model


def keep_layers(model: Model, layers: Sequence[int]) -> Model:
    """The model with only these of its layers; all arrays are shared with it, not copied.

    Of a model whose layers are scanned (see :class:`specjax.models.config.DecoderConfig`) these layers are copied; the result has
    each by itself.

    As a draft it knows the target's tokenizer and costs its share of the layers. Untrained, early layers predict little.

    Args:
      model: a model whose functions are a :class:`specjax.models.decoder.Decoder`.
      layers: indices of the layers to keep, in order.

    Raises:
      ValueError: the model is of another kind, or an index is not one of its layers.

    Example:
      >>> from specjax.models.config import DecoderConfig
      >>> config = DecoderConfig(vocab_size=11, num_layers=3, width=8, num_query_heads=2, num_kv_heads=1, head_dim=4,
      ...                        mlp_width=16, max_positions=32)
      >>> decoder = Decoder(config)
      >>> model = Model(functions=decoder, params=decoder.init(jax.random.key(0)), vocab_size=11, max_positions=32)
      >>> keep_layers(model, [0, 2]).config.num_layers
      2
    """
    if not isinstance(model.functions, Decoder):
        raise ValueError(f"keep_layers: model {model.name!r} is a {type(model.functions).__name__}; it must be a Decoder")
    num_layers = model.config.num_layers
    layers = tuple(layers)
    if not layers or any(layer not in range(num_layers) for layer in layers):
        raise ValueError(f"keep_layers: layers is {layers}; it must hold at least one of 0 to {num_layers - 1}")
    params = model.params | {"layers": {place: layer_of(model, layer) for place, layer in enumerate(layers)}}
    functions = Decoder(model.config.with_layers(layers))
    return dataclasses.replace(model, functions=functions, params=params, name=f"{model.name}, {len(layers)} layers")


def layer_of(model: Model, layer: int) -> dict:
    """Parameters of one layer of a model whose functions are a :class:`specjax.models.decoder.Decoder`."""
    layers = model.params["layers"]
    if not model.config.scan_layers:
        return layers[layer]
    turn, place = divmod(layer, model.config.period)
    return jax.tree.map(lambda leaf: leaf[turn], layers[place])
