"""A round over a mesh: what each device has, and where devices meet.

Rows are split over ``data``; the devices of one row of the mesh (its ``model`` axis) have the same rows, and share the target's
weights, its cache and the judging of the rows. See ``docs/meshes.md`` for a picture.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.cache import KVCache
from specjax.decoding.layout import Place
from specjax.decoding.round import Round
from specjax.decoding.state import DecodingState, DispatchInfo, Parameters
from specjax.models.base import ModelFunctions
from specjax.models.decoder import Decoder, Split
from specjax.parallel.mesh import DATA, MODEL, sizes_of
from specjax.parallel.rules import param_specs
from specjax.parallel.sharded_decoder import shard_functions

ROWS = PartitionSpec(DATA)
EVERYWHERE = PartitionSpec()


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
        split = _split(program.target)
        if place is Place.PARAMS:
            # Drafters are on every device: each makes the whole draft of its rows.
            return Parameters(param_specs(program.target) if split.axis else EVERYWHERE, EVERYWHERE, EVERYWHERE)
        if place is Place.STATE:
            fields = {field.name: ROWS for field in dataclasses.fields(DecodingState)}
            if split.heads:
                heads = PartitionSpec(DATA, MODEL)
                fields["cache"] = KVCache(keys=heads, values=heads, lengths=ROWS)
            return DecodingState(**fields)
        if place is Place.INFO:
            return DispatchInfo(tokens=ROWS, finish=ROWS, rounds=EVERYWHERE, drafted=EVERYWHERE, logprobs=ROWS)
        return ROWS if place is Place.ROWS else EVERYWHERE

    def shardings(self, program: Round, place: Place, values):
        """A ``NamedSharding`` for each array of ``values``."""
        specs = jax.tree.map(
            lambda spec, part: jax.tree.map(lambda _: NamedSharding(self.mesh, spec), part),
            self.specs(program, place),
            values,
            is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
        )
        return specs

    def spread(self, program, function, inputs, outputs):
        """See :class:`specjax.decoding.layout.Layout`."""
        in_specs = tuple(self.specs(program, place) for place in inputs)
        if isinstance(outputs, Place):
            out_specs = self.specs(program, outputs)
        else:
            out_specs = tuple(self.specs(program, place) for place in outputs)
        # What is the same on all devices of an axis is so because they compute the same of the same; JAX is not asked to prove it.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

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
        if not _split(target).vocab:
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


def _split(target: ModelFunctions) -> Split:
    return target.split if isinstance(target, Decoder) else Split()


def spread_round(program: Round, mesh: Mesh) -> Round:
    """The round over a mesh.

    Args:
      program: of one device.
      mesh: see :func:`specjax.parallel.make_mesh`.

    Raises:
      ValueError: the target cannot be split.
    """
    return dataclasses.replace(program, target=shard_functions(program.target, sizes_of(mesh).model), layout=MeshLayout(mesh))


def place_params(program: Round, params: Parameters) -> Parameters:
    """``params`` where a round over a mesh (:func:`spread_round`) wants them, array by array.

    An array that is there already is not copied, and one that target and drafter share is there once where both want it alike.
    """
    placed = {}

    def put(leaf, sharding):
        key = (id(leaf), sharding)
        if key not in placed:
            placed[key] = jax.device_put(leaf, sharding)
        return placed[key]

    return jax.tree.map(put, params, program.layout.shardings(program, Place.PARAMS, params))
