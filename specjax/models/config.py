"""The shape of a decoder, independent of where its weights come from.

A model family (llama, qwen2, ...) is a *value* of :class:`DecoderConfig`, never a branch in the code: the decoder asks
"are there biases on the projections?", not "is this qwen2?".
"""

import dataclasses
import math

import numpy as np


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
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split layout.

    Attributes:
      theta: base of the geometric series of wavelengths.
      scaling: a callable from frequencies to frequencies, or None.
    """

    theta: float = 10_000.0
    scaling: Llama3RopeScaling | FrequencyFactors | None = None

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

    def __post_init__(self):
        sizes = ("vocab_size", "num_layers", "width", "num_query_heads", "num_kv_heads", "head_dim", "mlp_width", "max_positions")
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

    @property
    def group_size(self) -> int:
        """G, query heads per key/value head."""
        return self.num_query_heads // self.num_kv_heads
