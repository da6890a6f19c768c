"""The shape of a decoder, independent of where its weights come from.

A model family (llama, qwen2, ...) is a *value* of :class:`DecoderConfig`, never a branch in the code: the decoder asks
"are there biases on the projections?", not "is this qwen2?".
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

STREAMS = ("float32", "bfloat16", "float16", "float64")
"""Dtypes that what is between int8 products can be in."""

ACTIVATIONS = ("silu", "gelu_tanh")
"""Of the gate of the MLPs; ``gelu_tanh`` is GELU by its tanh approximation."""


def _check_positive(owner: str, name: str, value) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{owner}: {name} is {value!r}; it must be positive and finite")


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency-dependent rope scaling of Llama 3.1 and later.

    Wavelengths shorter than ``original_max_positions / high_freq_factor`` keep their frequency, those longer than
    ``original_max_positions / low_freq_factor`` have it divided by ``factor``, and those between are interpolated.

    Attributes:
      factor: division of the low frequencies.
      low_freq_factor: see above; below ``high_freq_factor``.
      high_freq_factor: see above.
      original_max_positions: positions the model was trained on before the extension.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self):
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_positions"):
            _check_positive("Llama3RopeScaling", name, getattr(self, name))
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"Llama3RopeScaling: low_freq_factor is {self.low_freq_factor}; it must be below high_freq_factor "
                f"({self.high_freq_factor})"
            )

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        """Scales angular frequencies [D/2] in radians per position."""
        turns = self.original_max_positions * frequencies / (2 * math.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return frequencies * ((1 - blend) / self.factor + blend)


@dataclasses.dataclass(frozen=True)
class FrequencyFactors:
    """A divisor for every frequency, as GGUF files carry the scaling of Llama 3.1 and later.

    Attributes:
      factors: [D/2], positive.
    """

    factors: tuple[float, ...]

    def __post_init__(self):
        for index, factor in enumerate(self.factors):
            _check_positive("FrequencyFactors", f"factors[{index}]", factor)

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        """Scales angular frequencies [D/2] in radians per position.

        Example:
          >>> FrequencyFactors((1.0, 4.0))(np.array([1.0, 0.5])).tolist()
          [1.0, 0.125]
        """
        if len(self.factors) != len(frequencies):
            raise ValueError(f"FrequencyFactors: {len(self.factors)} factors for {len(frequencies)} frequencies; one for each")
        return frequencies / np.asarray(self.factors)


@dataclasses.dataclass(frozen=True)
class LinearRopeScaling:
    """Positions as if they lay closer: every frequency divided by the same number.

    Attributes:
      factor: the divisor.
    """

    factor: float

    def __post_init__(self):
        _check_positive("LinearRopeScaling", "factor", self.factor)

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        """Scales angular frequencies [D/2] in radians per position."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class YarnRopeScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): high frequencies stay, low ones are divided, and attention is sharpened.

    Between the two the blend is linear in the number of the frequency.

    Attributes:
      factor: division of the low frequencies.
      original_max_positions: positions the model was trained on before the extension.
      beta_fast: frequencies with more turns than this over ``original_max_positions`` stay.
      beta_slow: those with fewer turns than this are divided.
      attention_factor: what queries and keys are multiplied with; None: 0.1 ln(factor) + 1, as in the paper.
      truncate: whether the two borders are moved outwards to whole numbers of a frequency.
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self):
        for name in ("factor", "original_max_positions", "beta_fast", "beta_slow"):
            _check_positive("YarnRopeScaling", name, getattr(self, name))
        if self.attention_factor is not None:
            _check_positive("YarnRopeScaling", "attention_factor", self.attention_factor)
        if self.beta_slow > self.beta_fast:
            raise ValueError(f"YarnRopeScaling: beta_slow is {self.beta_slow}; it must be at most beta_fast ({self.beta_fast})")

    @property
    def magnitude(self) -> float:
        """What queries and keys are multiplied with."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        """Scales angular frequencies [D/2] in radians per position, a geometric series that starts at 1."""
        if len(frequencies) < 2:
            raise ValueError("YarnRopeScaling: there is one frequency; it needs heads of at least 4 numbers")

        def number(turns):
            """Of the frequency that makes so many turns, as a real number."""
            return math.log(self.original_max_positions / (2 * math.pi * turns)) / -math.log(frequencies[1])

        low, high = number(self.beta_fast), number(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # The borders as in the published formula, which takes the last number to be D - 1.
        low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
        divided = np.clip((np.arange(len(frequencies)) - low) / (high - low or 0.001), 0.0, 1.0)
        return frequencies * (divided / self.factor + 1 - divided)


RopeScaling = LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling | FrequencyFactors


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split layout.

    Attributes:
      theta: base of the geometric series of wavelengths.
      scaling: a callable from frequencies to frequencies, or None.
    """

    theta: float = 10_000.0
    scaling: RopeScaling | None = None

    def __post_init__(self):
        _check_positive("RopeConfig", "theta", self.theta)

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Angular frequencies [head_dim / 2] in float64, radians per position.

        Example:
          >>> RopeConfig(theta=100.0).frequencies(4).tolist()
          [1.0, 0.1]
        """
        frequencies = self.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        return frequencies if self.scaling is None else self.scaling(frequencies)

    @property
    def magnitude(self) -> float:
        """What turned queries and keys are multiplied with."""
        return getattr(self.scaling, "magnitude", 1.0)


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of each MLP: every token goes through a few of many.

    Attributes:
      num_experts: X, MLPs of each layer; ``mlp_width`` is the width of one.
      num_active: how many of them a token goes through, those of the largest router probabilities.
      renormalise: whether the probabilities of these are scaled to sum 1.
    """

    num_experts: int
    num_active: int
    renormalise: bool = True

    def __post_init__(self):
        for name, most in (("num_experts", None), ("num_active", self.num_experts)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most is not None and value > most):
                limit = "at least 1" if most is None else f"1 to num_experts ({most})"
                raise ValueError(f"ExpertsConfig: {name} is {value!r}; it must be a whole number, {limit}")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a pre-norm Transformer decoder with gated MLPs.

    Attributes:
      vocab_size: rows of the embedding and width of the logits; may exceed the tokenizer's size (padding).
      num_layers: L.
      width: E, the model width.
      num_query_heads: H.
      num_kv_heads: K; H is a multiple of it (grouped-query attention).
      head_dim: D.
      mlp_width: F.
      max_positions: longest sequence that the model's positions are made for.
      norm_eps: added to the mean square in every RMS norm.
      rope: rotary embedding.
      qkv_bias: whether the query, key and value projections have biases.
      tied_embedding: whether the output matrix is the embedding.
      query_key_norm: whether queries and keys go through an RMS norm per head before they are turned.
      post_norms: whether what attention and MLP give goes through an RMS norm of its own before it is added to the stream.
      activation: one of ``ACTIVATIONS``.
      attention_scale: what scores are multiplied with; None: 1 / sqrt(D).
      attention_soft_cap: c of c tanh(score / c); None: scores as they are.
      logit_soft_cap: the same for logits.
      embedding_scale: what the rows of the embedding are multiplied with as tokens become them.
      window: tokens that the local layers attend to, the querying one included: those at most ``window - 1`` positions back.
      local_layers: numbers of the layers whose attention has the window, rising; the others are global.
      local_rope: rotary embedding of the local layers; None: that of all.
      experts: a mixture of experts in place of each MLP; None: one MLP.
      product_parts: sums that each matrix product is added up in. Rounding errors of a long sum fall with its root: 8 make up for
        compilers that add one term after the other, at the cost of so many times the arithmetic.
      int8_stream: None: matrices are in the dtype of the parameters. Else they are in int8 (see :mod:`specjax.models.quantised`),
        and this, one of ``STREAMS``, is the dtype of what is between the products, the cache included.
      int8_digits: of int8 that activations are rounded to in an int8 model, 1 or 2 (see :mod:`specjax.models.quantised`).
      scan_layers: whether layers that are alike are one array per parameter and run in a loop (``jax.lax.scan``), which compilers
        are done with sooner; else each has arrays of its own. With local layers it is a loop over :attr:`period` layers.
    """

    vocab_size: int
    num_layers: int
    width: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    max_positions: int
    norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    tied_embedding: bool = True
    query_key_norm: bool = False
    post_norms: bool = False
    activation: str = "silu"
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_scale: float = 1.0
    window: int | None = None
    local_layers: tuple[int, ...] = ()
    local_rope: RopeConfig | None = None
    experts: ExpertsConfig | None = None
    product_parts: int = 1
    int8_stream: str | None = None
    int8_digits: int = 2
    scan_layers: bool = False

    def __post_init__(self):
        sizes = ["vocab_size", "num_layers", "width", "num_query_heads", "num_kv_heads", "head_dim", "mlp_width", "max_positions"]
        sizes += ["product_parts"]
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"DecoderConfig: {name} is {value!r}; it must be an integer of at least 1")
        _check_positive("DecoderConfig", "norm_eps", self.norm_eps)
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError(
                f"DecoderConfig: num_query_heads is {self.num_query_heads}; it must be a multiple of "
                f"num_kv_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"DecoderConfig: head_dim is {self.head_dim}; rotary embedding needs an even number")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"DecoderConfig: activation is {self.activation!r}; it must be one of {', '.join(ACTIVATIONS)}")
        _check_positive("DecoderConfig", "embedding_scale", self.embedding_scale)
        for name in ("attention_scale", "attention_soft_cap", "logit_soft_cap"):
            if getattr(self, name) is not None:
                _check_positive("DecoderConfig", name, getattr(self, name))
        if self.product_parts > 1 and self.experts is not None:
            raise ValueError(f"DecoderConfig: product_parts is {self.product_parts}; a mixture of experts takes 1 only")
        if self.int8_stream is not None and self.int8_stream not in STREAMS:
            raise ValueError(
                f"DecoderConfig: int8_stream is {self.int8_stream!r}; it must be None or one of {', '.join(STREAMS)}"
            )
        if self.int8_digits not in (1, 2):
            raise ValueError(f"DecoderConfig: int8_digits is {self.int8_digits!r}; it must be 1 or 2")
        if self.product_parts > 1 and self.int8_stream is not None:
            raise ValueError(
                f"DecoderConfig: product_parts is {self.product_parts}; int8 products, whose sums are exact, take 1 only"
            )
        object.__setattr__(self, "local_layers", tuple(self.local_layers))
        self._check_local_layers()
        if not isinstance(self.scan_layers, bool):
            raise ValueError(f"DecoderConfig: scan_layers is {self.scan_layers!r}; it must be True or False")
        if self.scan_layers and self.period == self.num_layers > 1:
            raise ValueError(
                f"DecoderConfig: scan_layers is True, but no order of local and global layers repeats over all {self.num_layers} "
                f"(local_layers is {self.local_layers}); it must be False"
            )

    def _check_local_layers(self):
        layers = self.local_layers
        if list(layers) != sorted(set(layers) & set(range(self.num_layers))):
            raise ValueError(f"DecoderConfig: local_layers is {layers}; it must rise and hold some of 0 to {self.num_layers - 1}")
        if self.window is not None and (isinstance(self.window, bool) or not isinstance(self.window, int) or self.window < 1):
            raise ValueError(f"DecoderConfig: window is {self.window!r}; it must be an integer of at least 1, or None")
        if (self.window is None) != (not layers):
            raise ValueError(f"DecoderConfig: window is {self.window} and local_layers is {layers}; one asks for the other")
        if self.local_rope is not None and not layers:
            raise ValueError("DecoderConfig: local_rope is given, but local_layers is empty; no layer would use it")

    @property
    def group_size(self) -> int:
        """G, query heads per key/value head."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def period(self) -> int:
        """Layers after which local and global ones come in the same order again, over all of them.

        Example:
          >>> config = DecoderConfig(vocab_size=11, num_layers=6, width=8, num_query_heads=2, num_kv_heads=1, head_dim=4,
          ...                        mlp_width=16, max_positions=32, window=8, local_layers=(0, 1, 3, 4))
          >>> config.period
          3
        """
        local = [layer in self.local_layers for layer in range(self.num_layers)]
        lengths = (length for length in range(1, self.num_layers + 1) if self.num_layers % length == 0)
        return next(length for length in lengths if local == local[:length] * (self.num_layers // length))

    def with_layers(self, layers: Sequence[int]) -> "DecoderConfig":
        """The configuration of a decoder of only these layers, in this order, not scanned; each stays local or global.

        Example:
          >>> config = DecoderConfig(vocab_size=11, num_layers=4, width=8, num_query_heads=2, num_kv_heads=1, head_dim=4,
          ...                        mlp_width=16, max_positions=32, window=8, local_layers=(0, 1, 3))
          >>> config.with_layers([2, 3]).local_layers, config.with_layers([2]).window
          ((1,), None)
        """
        local = tuple(place for place, layer in enumerate(layers) if layer in self.local_layers)
        without: dict[str, Any] = {} if local else {"window": None, "local_rope": None}
        return dataclasses.replace(self, num_layers=len(layers), local_layers=local, scan_layers=False, **without)

    def plain_layer(self) -> "DecoderConfig":
        """The sizes of one layer beside the decoder, as trained heads have: its width and heads, global, nothing special."""
        plain: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(self) if field.name in NOT_PLAIN}
        return dataclasses.replace(self, num_layers=1, product_parts=1, **plain)

    def not_plain(self) -> list[str]:
        """Fields that :meth:`plain_layer` would change."""
        return [name for name in NOT_PLAIN if getattr(self, name) != getattr(type(self), name)]


NOT_PLAIN = (
    "post_norms",
    "attention_scale",
    "attention_soft_cap",
    "logit_soft_cap",
    "embedding_scale",
    "window",
    "local_layers",
    "local_rope",
    "experts",
    "int8_stream",
    "scan_layers",
)
"""Options of a decoder that a single layer of a trained head does not have."""
