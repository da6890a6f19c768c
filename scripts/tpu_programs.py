"""The programs that scripts/tpu_compile.py compiles: sizes of models and slices of TPUs, and arguments that are shapes alone."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from specjax.decoding.compose import compose
from specjax.decoding.layout import Place
from specjax.decoding.round import Round
from specjax.decoding.state import Parameters
from specjax.drafters import draft_model
from specjax.drafters.base import BoundDrafter
from specjax.drafters.eagle import Eagle
from specjax.drafters.medusa import Medusa
from specjax.drafters.tree_drafting import levels
from specjax.models.config import DecoderConfig, Llama3RopeScaling, RopeConfig
from specjax.models.decoder import Decoder
from specjax.models.eagle_head import EagleConfig, EagleHead
from specjax.models.loaded import Model
from specjax.models.medusa_heads import MedusaConfig, MedusaHeads
from specjax.parallel import make_mesh, spread_round
from specjax.serving.device import empty_state, prefill_rows, run_slots
from specjax.serving.requests import Room
from specjax.tree_shapes import greedy_product_tree

DTYPE = jnp.bfloat16
STOP_IDS, BIASES = 8, 8
ACCURACIES = [[0.6, 0.15, 0.08, 0.05]] * 4
"""Of the heads' first, second ... token, by depth: what the tree is shaped for."""
TREE = greedy_product_tree(ACCURACIES, 16)
TREE_LEVELS = len(levels(TREE))
"""Passes of a model that drafts it."""

LLAMA_SCALING = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)
LLAMA_ROPE = RopeConfig(theta=500_000.0, scaling=LLAMA_SCALING)
LLAMA_8B = DecoderConfig(
    vocab_size=128_256, num_layers=32, width=4096, num_query_heads=32, num_kv_heads=8, head_dim=128, mlp_width=14_336,
    max_positions=131_072, rope=LLAMA_ROPE, tied_embedding=False,
)  # fmt: skip
LLAMA_1B = DecoderConfig(
    vocab_size=128_256, num_layers=16, width=2048, num_query_heads=32, num_kv_heads=8, head_dim=64, mlp_width=8192,
    max_positions=131_072, rope=LLAMA_ROPE, tied_embedding=True,
)  # fmt: skip
QWEN_32B = DecoderConfig(
    vocab_size=151_936, num_layers=64, width=5120, num_query_heads=64, num_kv_heads=8, head_dim=128, mlp_width=25_600,
    max_positions=40_960, norm_eps=1e-6, rope=RopeConfig(theta=1_000_000.0), query_key_norm=True, tied_embedding=False,
)  # fmt: skip
QWEN_600M = DecoderConfig(
    vocab_size=151_936, num_layers=28, width=1024, num_query_heads=16, num_kv_heads=8, head_dim=128, mlp_width=3072,
    max_positions=40_960, norm_eps=1e-6, rope=RopeConfig(theta=1_000_000.0), query_key_norm=True, tied_embedding=True,
)  # fmt: skip
TINY = DecoderConfig(
    vocab_size=8192, num_layers=2, width=512, num_query_heads=8, num_kv_heads=4, head_dim=64, mlp_width=2048, max_positions=4096,
    tied_embedding=False,
)  # fmt: skip

TARGETS = {
    "llama-3.1-8b": (LLAMA_8B, LLAMA_1B),
    "qwen3-32b": (QWEN_32B, QWEN_600M),
    "tiny": (TINY, dataclasses.replace(TINY, num_layers=1, width=256)),
}
"""Sizes of a target and of the model that drafts for it."""

MEMORY = {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32}
"""GiB of HBM of one chip."""


def model_of(config: DecoderConfig, name: str) -> Model:
    """A model of shapes alone."""
    decoder = Decoder(config)
    sizes = {"vocab_size": config.vocab_size, "max_positions": config.max_positions}
    return Model(functions=decoder, params=decoder.abstract_params(DTYPE), name=name, **sizes)


def drafter_of(kind: str, target: DecoderConfig, draft: DecoderConfig, length: int) -> BoundDrafter | None:
    """What drafts: nothing, a chain of a model, a tree of it, of Medusa heads or of an autoregressive head.

    A model is split over the devices that share the target where the kind ends with "split".
    """
    tree = TREE
    shape = jax.ShapeDtypeStruct
    if kind == "plain":
        return None
    if kind in ("chain", "chain split"):
        return draft_model(model_of(draft, "draft"), length, split=kind.endswith("split"))
    if kind in ("tree", "tree split"):
        return draft_model(model_of(draft, "draft"), tree=tree, split=kind.endswith("split"))
    output = {"output": shape((target.vocab_size, target.width), DTYPE), "ids": None}
    if kind == "medusa":
        heads = MedusaHeads(MedusaConfig(target.width, target.vocab_size, num_heads=4))
        params = {"own": heads.abstract_params(DTYPE), "shared": output}
        return BoundDrafter(Medusa(heads, (target.num_layers,), tree), params, "medusa")
    layers = (target.num_layers // 4, target.num_layers // 2, target.num_layers)
    head = EagleHead(EagleConfig(target.plain_layer(), num_features=3))
    embedding = {"embedding": shape((target.vocab_size, target.width), DTYPE)}
    return BoundDrafter(Eagle(head, layers, tree), {"own": head.abstract_params(DTYPE), "shared": output | embedding}, "eagle")


@dataclasses.dataclass(frozen=True)
class Case:
    """What is compiled for.

    Attributes:
      target: a name in ``TARGETS``.
      topology: of the TPU, such as v5e:2x4.
      model: devices that share the target; the others split the rows.
      slots: rows.
      capacity: tokens of a row.
      length: K, draft tokens of a chain.
      layers: of target and draft model, at most; None: all.
      prefill_width: prompt tokens of a pass.
      scan_layers: whether target and draft model have their layers in a loop.
    """

    target: str = "llama-3.1-8b"
    topology: str = "v5e:2x4"
    model: int | None = None
    slots: int = 64
    capacity: int = 2048
    length: int = 7
    layers: int | None = None
    prefill_width: int = 64
    scan_layers: bool = False

    def configs(self) -> tuple[DecoderConfig, DecoderConfig]:
        """Sizes of target and draft model."""
        cut = self.layers or 1 << 30
        target, draft = TARGETS[self.target]
        options = {"scan_layers": self.scan_layers}
        return tuple(dataclasses.replace(config, num_layers=min(cut, config.num_layers), **options) for config in (target, draft))

    def mesh(self) -> jax.sharding.Mesh:
        """The slice as a mesh."""
        devices = topologies.get_topology_desc(platform="tpu", topology_name=self.topology).devices
        model = self.model or len(devices)
        return make_mesh(data=len(devices) // model, model=model, devices=devices)

    def round(self, kind: str) -> tuple[Round, Parameters]:
        """The round with a drafter of this kind over the mesh, and shapes of its parameters."""
        target, draft = self.configs()
        drafter = drafter_of(kind, target, draft, self.length)
        program, params, _ = compose(model_of(target, self.target), drafter, "auto", greedy=False, allow_lossy=False)
        program = dataclasses.replace(spread_round(program, self.mesh()), prefill_width=self.prefill_width)
        return program, _placed(program, Place.PARAMS, params)

    def lowered(self, name: str) -> jax.stages.Lowered:
        """The program of this name: ``prefill``, ``pass N`` (of the target), ``draft pass``, or the kind of a round.

        ``draft pass split`` is that of a draft model that is split.
        """
        if name.startswith("pass "):
            return self._pass(int(name.removeprefix("pass ")), "plain")
        if name in ("draft pass", "draft pass split"):
            return self._pass(1, name.replace("draft pass", "chain"))
        program, params = self.round("plain" if name == "prefill" else name)
        state = jax.eval_shape(lambda params: empty_state(program, params, *self._sizes()), params)
        state = _placed(program, Place.STATE, state)
        number = _placed(program, Place.SAME, jax.ShapeDtypeStruct((), jnp.int32))
        if name == "prefill":
            parts = program.layout.mesh.shape["data"]
            rows = _placed(program, Place.ROWS, jax.ShapeDtypeStruct((4 * parts,), jnp.int32))
            return prefill_rows.lower(program, params, state, rows)
        ended = _placed(program, Place.ROWS, jax.ShapeDtypeStruct((self.slots,), bool))
        return run_slots.lower(program, params, state, ended, number, number)

    def least_of_heads(self, kind: str) -> int:
        """Bytes that drafting reads at least in a round of ``medusa`` or ``eagle``: of the heads, the output matrix, their cache.

        Medusa heads speak of all depths at once. An autoregressive head is run for every level of the tree but the root's, and
        once over what was accepted; its output matrix is read for every level.
        """
        program, params = self.round(kind)
        state = jax.eval_shape(lambda params: empty_state(program, params, *self._sizes()), params)
        times = 1 if kind == "medusa" else TREE_LEVELS
        read = (params.drafter["own"], params.drafter["shared"]["output"], () if kind == "medusa" else state.drafter.cache)
        return times * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(read))

    def _sizes(self):
        return self.slots, Room(self.capacity, STOP_IDS, BIASES, None).entries, STOP_IDS, BIASES

    def _pass(self, num_tokens: int, kind: str):
        """A pass of the target, or of the draft model where ``kind`` has one, and the commit of all its tokens.

        It is what rounds are compared with.
        """
        program, params = self.round(kind)
        drafter = kind != "plain"
        state = jax.eval_shape(lambda params: empty_state(program, params, *self._sizes()), params)

        def run(params, state, tokens):
            model = program.drafter.model if drafter else program.target
            own, cache = (params.drafter, state.drafter.cache) if drafter else (params.target, state.cache)
            places = jnp.broadcast_to(jnp.arange(num_tokens), tokens.shape)
            output = model.apply(own, tokens, cache.lengths[:, None] + places, cache, None)
            if drafter:
                best = jnp.argmax(model.unembed(own, output.hidden), axis=-1)
            else:
                best = jnp.argmax(program.layout.unembed(model, own, output.hidden), axis=-1)
                best = program.layout.verdict(best, len(tokens))
            # As in a round: the pass has read the cache before it is written to.
            output, cache = jax.lax.optimization_barrier((output, cache))
            cache = cache.commit(output.block, places, jnp.full_like(cache.lengths, num_tokens))
            return state.replace(drafter=state.drafter.replace(cache=cache)) if drafter else state.replace(cache=cache), best

        tokens = _placed(program, Place.ROWS, jax.ShapeDtypeStruct((self.slots, num_tokens), jnp.int32))
        spread = program.layout.spread(program, run, (Place.PARAMS, Place.STATE, Place.ROWS), (Place.STATE, Place.ROWS))
        return jax.jit(spread, donate_argnums=1).lower(params, _placed(program, Place.STATE, state), tokens)


def _placed(program: Round, place: Place, values):
    """Shapes of arrays where the round has them."""
    shardings = program.layout.shardings(program, place, values)
    return jax.tree.map(lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=spec), values, shardings)
