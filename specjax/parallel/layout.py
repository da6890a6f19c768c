"""A round over a mesh: what each device has, and where devices meet.

Rows are split over ``data``; the devices of one row of the mesh (its ``model`` axis) have the same rows, and share the target's
weights, its cache and the judging of the rows; of the drafter each has everything, but for draft models that are to be split
(:mod:`specjax.parallel.split_drafts`). See ``docs/meshes.md`` for a picture.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.decoding.layout import ONE_DEVICE, Place, Share
from specjax.decoding.round import Round
from specjax.decoding.state import DecodingState, DispatchInfo, Parameters
from specjax.parallel.mesh import DATA, EVERYWHERE, MODEL, ROWS, sizes_of
from specjax.parallel.processes import put
from specjax.parallel.rules import cache_specs
from specjax.parallel.sharded_decoder import shard_functions
from specjax.parallel.split_drafts import (
    alone,
    alone_drafter,
    drafter_param_specs,
    drafter_state_specs,
    model_param_specs,
    split_drafter,
    split_in,
)


@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """Rows over ``data``, the target's share over ``model``; see :class:`specjax.decoding.layout.Layout`.

    Attributes:
      mesh: with the axes ``data`` and ``model``.
    """

    mesh: Mesh

    @property
    def model(self) -> int:
        """m, devices that share a copy of the target."""
        return sizes_of(self.mesh).model

    # ---------------------------------------------------------------- where things are

    def specs(self, program: Round, place: Place):
        """A pytree of ``PartitionSpec``, a prefix of that of the values."""
        split = split_in(program.target)
        if place is Place.PARAMS:
            target, drafter = model_param_specs(program.target), drafter_param_specs(program.drafter)
            return Parameters(target, drafter, next_state=EVERYWHERE, round_seconds=EVERYWHERE)
        if place is Place.STATE:
            fields = {field.name: ROWS for field in dataclasses.fields(DecodingState)}
            fields |= {"cache": cache_specs(split), "drafter": drafter_state_specs(program.drafter)}
            return DecodingState(**fields)
        if place is Place.INFO:
            return DispatchInfo(tokens=ROWS, finish=ROWS, rounds=EVERYWHERE, drafted=EVERYWHERE, logprobs=ROWS)
        return ROWS if place is Place.ROWS else EVERYWHERE

    def shardings(self, program: Round, place: Place, values):
        """A ``NamedSharding`` for each array of ``values``."""
        return jax.tree.map(
            lambda spec, part: jax.tree.map(lambda _: NamedSharding(self.mesh, spec), part),
            self.specs(program, place),
            values,
            is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
        )

    def spread(self, program, function, inputs, outputs):
        """See :class:`specjax.decoding.layout.Layout`."""
        in_specs = tuple(self.specs(program, place) for place in inputs)
        if isinstance(outputs, Place):
            out_specs = self.specs(program, outputs)
        else:
            out_specs = tuple(self.specs(program, place) for place in outputs)
        # What is the same on all devices of an axis is so since they compute the same of the same; JAX is not asked to prove it.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def share(self, program, params):
        """See :class:`specjax.decoding.layout.Layout`."""
        shapes, held = {}, {}

        def shape(leaf, sharding):
            key = (id(leaf), sharding)
            if key not in shapes:
                # NumPy's own dtypes may be wider than those that JAX has on.
                dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
                shapes[key] = jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), dtype)
                there = isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
                held[key] = there * math.prod(shapes[key].shape) * dtype.itemsize
            return shapes[key]

        local = jax.tree.map(shape, params, self.shardings(program, Place.PARAMS, params))
        target, drafter = alone(program.target), alone_drafter(program.drafter)
        program = dataclasses.replace(program, target=target, drafter=drafter, layout=ONE_DEVICE)
        data, model = sizes_of(self.mesh)
        return Share(program, local, data, model, tuple(self.mesh.devices.flat), sum(held.values()))

    # ---------------------------------------------------------------- inside, on one device

    def own_places(self, rows, num_rows):
        """See :class:`specjax.decoding.layout.Layout`."""
        places = rows - num_rows * lax.axis_index(DATA)
        return jnp.where((places >= 0) & (places < num_rows), places, num_rows)

    def unembed(self, target, params, hidden):
        """See :class:`specjax.decoding.layout.Layout`.

        Each device has made the logits of its share of the vocabulary, of all rows, and goes on with whole vocabularies of its
        share of the rows. Where the devices do not divide the rows, each gets everything.
        """
        if not split_in(target).vocab:
            return target.unembed(params, self.judged(hidden))
        logits = target.unembed(params, hidden)
        if hidden.shape[0] % self.model:
            return lax.all_gather(logits, MODEL, axis=2, tiled=True)
        return lax.all_to_all(logits, MODEL, split_axis=0, concat_axis=2, tiled=True)

    def judged(self, values):
        """See :class:`specjax.decoding.layout.Layout`."""

        def own(leaf):
            share, left = divmod(leaf.shape[0], self.model)
            return leaf if left else lax.dynamic_slice_in_dim(leaf, share * lax.axis_index(MODEL), share)

        return values if self.model == 1 else jax.tree.map(own, values)

    def verdict(self, values, batch):
        """See :class:`specjax.decoding.layout.Layout`."""
        if self.model == 1 or batch % self.model:
            return values
        return jax.tree.map(lambda leaf: lax.all_gather(leaf, MODEL, tiled=True), values)

    def all_rows(self, values):
        """See :class:`specjax.decoding.layout.Layout`."""
        return jax.tree.map(lambda leaf: lax.all_gather(leaf, DATA, tiled=True), values)

    # Devices of one row of the mesh decide alike by themselves: they have the same rows.

    def anywhere(self, flags):
        """See :class:`specjax.decoding.layout.Layout`."""
        return lax.pmax(flags.astype(jnp.int32), DATA) > 0

    def everywhere(self, flags):
        """See :class:`specjax.decoding.layout.Layout`."""
        return lax.pmin(flags.astype(jnp.int32), DATA) > 0

    def in_total(self, number):
        """See :class:`specjax.decoding.layout.Layout`."""
        return lax.psum(number, DATA)


def spread_round(program: Round, mesh: Mesh) -> Round:
    """The round over a mesh.

    Args:
      program: of one device.
      mesh: see :func:`specjax.parallel.make_mesh`.

    Raises:
      ValueError: the target, or a draft model that is to be split, cannot be.

    Example:
      >>> from specjax.decoding.compose import compose
      >>> from specjax.models.config import DecoderConfig
      >>> from specjax.models.decoder import Decoder
      >>> from specjax.models.loaded import Model
      >>> from specjax.parallel import make_mesh
      >>> config = DecoderConfig(vocab_size=11, num_layers=1, width=8, num_query_heads=2, num_kv_heads=1, head_dim=4,
      ...                        mlp_width=16, max_positions=32)
      >>> model = Model(functions=Decoder(config), params=Decoder(config).init(jax.random.key(0)), vocab_size=11,
      ...               max_positions=32)
      >>> program, params, _ = compose(model, None, "auto", greedy=True, allow_lossy=False)
      >>> program = spread_round(program, make_mesh(data=1))
      >>> place_params(program, params).target["embedding"].sharding.mesh.axis_names
      ('data', 'model')
    """
    devices = sizes_of(mesh).model
    target, drafter = shard_functions(program.target, devices), split_drafter(program.drafter, devices)
    return dataclasses.replace(program, target=target, drafter=drafter, layout=MeshLayout(mesh))


def place_params(program: Round, params: Parameters) -> Parameters:
    """``params`` where a round over a mesh (:func:`spread_round`) wants them, array by array.

    An array that is there already is not copied, and one that target and drafter share is there once where both want it alike.

    Raises:
      ValueError: the drafter's parameters have been put on other devices than those of the mesh.
    """
    layout, placed = program.layout, {}
    assert isinstance(layout, MeshLayout)
    _check_drafter(params.drafter, layout.mesh)

    def placed_once(leaf, sharding):
        key = (id(leaf), sharding)
        if key not in placed:
            placed[key] = put(leaf, sharding)
        return placed[key]

    return jax.tree.map(placed_once, params, layout.shardings(program, Place.PARAMS, params))


def _check_drafter(params, mesh: Mesh) -> None:
    """Raises ValueError where somebody has put the drafter on devices of its own."""
    wanted, default = set(mesh.devices.flat), {jax.local_devices()[0]}
    for leaf in jax.tree.leaves(params):
        devices = leaf.sharding.device_set if isinstance(leaf, jax.Array) and leaf.committed else wanted
        if devices != default and not wanted <= devices:
            raise ValueError(
                f"the drafter's parameters are on {sorted(map(str, devices))}, and the mesh has {len(wanted)} devices: a drafter "
                "cannot be on devices of its own. All devices of a mesh run one program: those without it would wait while it "
                "drafts, and those with it while the target verifies"
            )
