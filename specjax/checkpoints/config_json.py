"""Configurations of decoders as JSON objects, for the cards of what this library writes."""

import dataclasses
import typing

from specjax.models.config import DecoderConfig, ExpertsConfig, RopeConfig, RopeScaling

ROPES = ("rope", "local_rope")
_SCALINGS = {kind.__name__: kind for kind in typing.get_args(RopeScaling)}


def decoder_to_dict(config: DecoderConfig) -> dict:
    """Fields of a configuration, as JSON takes them; the kind of a rope scaling stands beside its fields."""
    fields = dataclasses.asdict(config)
    for rope in ROPES:
        scaling = getattr(getattr(config, rope), "scaling", None)
        if scaling is not None:
            fields[rope]["scaling"] = {"kind": type(scaling).__name__, **dataclasses.asdict(scaling)}
    return fields


def decoder_from_dict(fields: dict) -> DecoderConfig:
    """The configuration that :func:`decoder_to_dict` made fields of.

    A card may be older than some options, which then have their defaults.

    Example:
      >>> config = DecoderConfig(vocab_size=11, num_layers=1, width=8, num_query_heads=2, num_kv_heads=1, head_dim=4,
      ...                        mlp_width=16, max_positions=32)
      >>> decoder_from_dict(decoder_to_dict(config)) == config
      True
    """
    ropes = {name: _rope_config(fields[name]) for name in ROPES if fields.get(name) is not None}
    experts = {"experts": ExpertsConfig(**fields["experts"])} if fields.get("experts") is not None else {}
    return DecoderConfig(**fields | ropes | experts)


def _rope_config(fields: dict) -> RopeConfig:
    scaling = fields["scaling"]
    if scaling is not None:
        scaling = {name: tuple(value) if isinstance(value, list) else value for name, value in scaling.items()}
        scaling = _SCALINGS[scaling.pop("kind")](**scaling)
    return RopeConfig(**fields | {"scaling": scaling})
