"""Models whose matrices are int8."""

import dataclasses

import jax

from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.loaded import Model
from specjax.models.quantised import in_the_form_of

INT8 = "int8"
"""What ``load_model`` calls it."""


def in_dtype(config: DecoderConfig, dtype: str) -> DecoderConfig:
    """The configuration of the same decoder with its matrices in ``dtype``; see :func:`specjax.load_model`."""
    if dtype != INT8:
        return dataclasses.replace(config, int8_stream=None)
    # On CPUs attention is no faster in half precision, and rounding twice would be all that it brings.
    return dataclasses.replace(config, int8_stream="float32" if jax.default_backend() == "cpu" else "bfloat16", product_parts=1)


def quantise_model(model: Model, stream: str | None = None, digits: int = 2) -> Model:
    """The model with its matrices in int8, for parameters that do not come from ``load_model(..., dtype="int8")``.

    Args:
      model: a model whose functions are a :class:`specjax.models.decoder.Decoder`, in floats.
      stream: dtype of what is between the products; None: as ``load_model`` has it.
      digits: of int8 that activations are rounded to, 1 or 2; 1 is less arithmetic and a coarser model.

    Raises:
      ValueError: the model is of another kind, or int8 already, or an option is out of range.

    Example:
      >>> config = DecoderConfig(vocab_size=11, num_layers=1, width=8, num_query_heads=2, num_kv_heads=1, head_dim=4,
      ...                        mlp_width=16, max_positions=32)
      >>> decoder = Decoder(config)
      >>> model = Model(functions=decoder, params=decoder.init(jax.random.key(0)), vocab_size=11, max_positions=32)
      >>> quantise_model(model).dtype.name
      'int8'
    """
    if not isinstance(model.functions, Decoder):
        raise ValueError(f"quantise_model: model {model.name!r} is a {type(model.functions).__name__}; it must be a Decoder")
    if model.config.int8_stream is not None:
        raise ValueError(f"quantise_model: model {model.name!r} is int8 already")
    config = dataclasses.replace(in_dtype(model.config, INT8), int8_digits=digits)
    if stream is not None:
        config = dataclasses.replace(config, int8_stream=stream)
    functions = dataclasses.replace(model.functions, config=config)
    params = in_the_form_of(functions.abstract_params(), model.params)
    return dataclasses.replace(model, functions=functions, params=params, dtype_reason="asked for")
