"""One program over a mesh of devices: rows over one axis, heads, MLPs and vocabulary over the other."""

from specjax.parallel.layout import MeshLayout, place_params, spread_round
from specjax.parallel.mesh import MeshSizes, as_mesh, make_mesh, parse_mesh, sizes_of
from specjax.parallel.processes import ALONE, ProcessError, Processes, joined
from specjax.parallel.rules import RULES, describe, param_shardings, param_specs, split_of
from specjax.parallel.sharded_decoder import shard_functions

__all__ = [
    "ALONE",
    "RULES",
    "MeshLayout",
    "MeshSizes",
    "ProcessError",
    "Processes",
    "as_mesh",
    "describe",
    "joined",
    "make_mesh",
    "param_shardings",
    "param_specs",
    "parse_mesh",
    "place_params",
    "shard_functions",
    "sizes_of",
    "split_of",
    "spread_round",
]
