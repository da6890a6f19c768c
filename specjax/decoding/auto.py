"""Which drafter pays here: acceptance from the heads' cards, costs from a measurement on this machine.

Speculation buys tokens with verify passes and drafting, and what those cost depends on the hardware: where a pass is bound by
reading the weights a tree of 16 is nearly free, on a CPU without half-precision instructions it costs several steps. A head is
taken, and its tree shaped, by the expected tokens per second (:func:`specjax.tree_shapes.best_tree`), and left where plain
decoding is faster. Prompt lookup always comes first: it costs nothing where it finds nothing.
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from specjax.drafters import eagle, medusa, prompt_lookup, stacked
from specjax.drafters.base import BoundDrafter
from specjax.measurements import Measured, is_steady, measured_once
from specjax.models.decoder import Decoder
from specjax.models.loaded import Model
from specjax.models.medusa_heads import MedusaHeads
from specjax.models.shallow import keep_layers
from specjax.models.trained_head import TrainedHead
from specjax.tree import DraftTree
from specjax.tree_shapes import TreeChoice, best_tree
from specjax.user_cache import user_cache_folder

SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Tokens of the passes that are timed."""
LAYERS = 4
"""Layers that are timed, enough not to stay in a cache; the others cost the same."""
CAPACITY = 512
REPEATS = 7
LOOKUP_LENGTH = 7
"""With the root eight tokens: the next one would cost as much as several of these where products are made in eights."""
MOST_LEVELS = 5
"""Depth of an autoregressive head's tree."""


@dataclasses.dataclass(frozen=True)
class PassCosts:
    """Seconds of the parts of a pass of one row, by its number of tokens.

    Attributes:
      layer: of one layer.
      output: of the output matrix.
      num_layers: of the model.
    """

    layer: dict[int, float]
    output: dict[int, float]
    num_layers: int

    @classmethod
    def of(cls, model: Model, times: dict) -> "PassCosts":
        """What :func:`time_passes` gave for ``model``; JSON has made texts of the numbers of tokens."""
        layer, output = ({int(size): seconds for size, seconds in times[name].items()} for name in ("layer", "output"))
        return cls(layer, output, model.config.num_layers)

    @property
    def verify(self) -> dict[int, float]:
        """Seconds of a whole pass."""
        return {size: self.num_layers * self.layer[size] + self.output[size] for size in self.layer}


def measure_costs(model: Model, cache_folder: str | Path | None = None) -> PassCosts | None:
    """Times passes of the model on this machine, once; the result is kept. None for a model that is no :class:`Decoder`.

    Args:
      model: the target.
      cache_folder: where the measurement is kept; None: the user's cache folder.
    """
    if not isinstance(model.functions, Decoder):
        return None
    if cache_folder is None:
        cache_folder = user_cache_folder()
    what = f"{model.config} {model.dtype} {SIZES}"
    found = measured_once(Path(cache_folder) / "passes.json", what, lambda: time_passes(model))
    return PassCosts.of(model, found)


def time_passes(model: Model) -> Measured:
    """Seconds of the parts of a pass of a :class:`Decoder`, timed now: ``layer`` and ``output`` by the number of tokens."""
    kept = keep_layers(model, range(min(LAYERS, model.config.num_layers)))
    cache = kept.init_cache(1, CAPACITY).replace(lengths=jnp.full((1,), CAPACITY // 2, jnp.int32))
    layers = jax.jit(lambda params, tokens: kept.apply(params, tokens, tokens + CAPACITY // 2, cache).hidden)
    output = jax.jit(lambda params, hidden: jnp.max(kept.unembed(params, hidden), axis=-1))
    cases = {}
    for size in SIZES:
        tokens = jnp.arange(size)[None, :]
        cases["layer", size] = (layers, tokens)
        cases["output", size] = (output, layers(kept.params, tokens))
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for repeat in range(REPEATS + 1):
        for case, (function, inputs) in cases.items():
            start = time.perf_counter()
            jax.block_until_ready(function(kept.params, inputs))
            # The first time it is compiled.
            if repeat:
                seconds[case].append(time.perf_counter() - start)
    each = {size: min(seconds["layer", size]) / kept.config.num_layers for size in SIZES}
    times = {"layer": each, "output": {size: min(seconds["output", size]) for size in SIZES}}
    return Measured(times, is_steady(seconds.values()))


def best_of_head(head: TrainedHead, costs: PassCosts, chains_only: bool = False) -> TreeChoice:
    """The tree of a head that gives most tokens per second, of no nodes where plain decoding is faster.

    Args:
      head: with ``accuracies`` [D, R] among its facts.
      costs: of its target here.
      chains_only: whether the rule takes no branches.
    """
    accuracies = [list(row) for row in head.facts["accuracies"]]
    size = len(head.ids) if head.ids is not None else head.vocab_size
    output = {tokens: seconds * size / head.vocab_size for tokens, seconds in costs.output.items()}
    if isinstance(head.functions, MedusaHeads):
        # All heads at once, from one state.
        num_heads = head.functions.config.num_heads
        levels = [costs.layer[1] * num_heads / 4 + num_heads * output[1], *[0.0] * (len(accuracies) - 1)]
    else:
        # What it accepts at the deepest level that was measured, it accepts below.
        accuracies += [accuracies[-1]] * (MOST_LEVELS - len(accuracies))
        # A pass of its layer for each level, of some nodes, and one over the accepted tokens.
        levels = [costs.layer[1 if chains_only else 4] + output[1 if chains_only else 4]] * len(accuracies)
        levels[0] += costs.layer[4]
    if chains_only:
        accuracies = [row[:1] for row in accuracies]
    return best_tree(accuracies, costs.verify, levels)


def choose_drafter(
    model: Model, heads: Sequence[TrainedHead], costs: PassCosts | None, chains_only: bool = False
) -> tuple[BoundDrafter, str]:
    """The drafter with the most expected tokens per second, and why, in words.

    Args:
      model: the target.
      heads: trained for it.
      costs: of its passes here; None: not known, which leaves prompt lookup.
      chains_only: whether the rule takes no branches.
    """
    lookup = prompt_lookup(LOOKUP_LENGTH)
    if not heads or costs is None:
        return lookup, f"no trained head is known for {model.name}"
    plain = 1 / costs.verify[1]
    chosen = {head: best_of_head(head, costs, chains_only) for head in heads if head.facts.get("accuracies")}
    head = max(chosen, key=lambda head: chosen[head].tokens_per_second, default=None)
    if head is None or chosen[head].tree.num_nodes == 0:
        passes = ", ".join(f"{seconds / costs.verify[1]:.2f} for {size}" for size, seconds in costs.verify.items() if size > 1)
        return lookup, f"verify passes cost too much here for the trained heads (in plain steps: {passes} tokens)"
    choice = chosen[head]
    make = medusa if head.kind == "medusa" else eagle
    shape = f"a chain of {choice.tree.num_nodes}" if choice.tree.is_chain else f"a tree of {choice.tree.num_nodes} nodes"
    gain = choice.tokens_per_second / plain
    reason = f"{head.kind}, {shape}: {choice.expected_tokens:.2f} tokens a round and {gain:.2f} times plain decoding are expected"
    return stacked(lookup, make(head, tree=DraftTree(choice.tree.parents))), reason
