"""Per-request sampling settings: as a user writes them, and as arrays with one row per request."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import flax.struct
import jax
import numpy as np

from specjax.numeric import for_jit, is_real, is_whole

MAX_SEED = 2**64 - 1

MAX_PENALTY = 2.0
"""Bound of the presence and frequency penalties in both directions, as in vLLM and the OpenAI interface."""

BIASES_STEP = 8
"""The number of biased ids per row is rounded up to a multiple of this, so that it is no reason to compile again."""

SMALLEST = float(np.finfo(np.float32).tiny)
"""Smallest number that float32 products do not flush to 0."""

NO_ID = -1
"""Fills places of id arrays where no id is."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (as in vLLM): the division would overflow float32 for ordinary logits."""

MAX_LOGPROBS = 20
"""Most likely tokens that can be reported beside an emitted one."""

MAX_COMPLETIONS = 128
"""Completions of one prompt: all are rows of one batch."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Names are vLLM's.

    Order of the transforms, as in vLLM:

    1. ``allowed_tokens`` (an argument of ``generate``): what the grammar forbids gets probability 0;
    2. ``min_tokens``: the ids that end the row get probability 0 until then;
    3. ``logit_bias``;
    4. ``logits_processor`` (an argument of ``generate``);
    5. ``repetition_penalty``, then ``frequency_penalty``, then ``presence_penalty``;
    6. temperature, then ``min_p``, then ``top_k``, then ``top_p``, each on the distribution that the earlier ones left. Tokens
       that tie at a filter's threshold are all kept.

    Greedy takes the most likely token after step 5. Inside a draft every node is treated as if the draft tokens before it had
    been emitted. An id that is forbidden by one step stays so whatever comes later.

    Attributes:
      temperature: divides the logits; 0 (or below 1e-5) is greedy, and then the filters have nothing to do.
      top_k: keeps the k most likely tokens; 0 keeps all.
      top_p: keeps the smallest set of most likely tokens whose probability reaches this, in (0, 1]; 1 keeps all.
      min_p: drops tokens less likely than this share of the most likely one's probability, in [0, 1]; 0 keeps all.
      max_tokens: new tokens at most, at least 1.
      seed: 0 to 2**64 - 1; None draws one, which the result reports.
      repetition_penalty: logits of tokens that are in the prompt or the output are divided by it where they are positive, and
        multiplied where they are negative; above 0, 1 changes nothing.
      presence_penalty: is subtracted from the logits of tokens that are in the output, in [-2, 2].
      frequency_penalty: is subtracted once for every time that the token is in the output, in [-2, 2].
      logit_bias: dict from token id to a number that is added to its logit; ``-inf`` forbids the id.
      min_tokens: no end or stop id before so many new tokens, 0 to ``max_tokens``.
      stop_token_ids: generation ends after any of these ids, beside the model's own end tokens.
      ignore_eos: goes on after the model's own end tokens.
      n: completions of the prompt, 1 to 128. Completion i depends on the seed and i alone, not on how many there are; the first
        is the one that n=1 gives.
      stop: a string or several; generation ends with the token that completes one in the new text, wherever it stands on tokens.
        The text ends before it. Kept as a tuple.
      include_stop_str_in_output: keeps the stop string in the text.
      logprobs: None, or how many of the most likely tokens (0 to 20) are reported beside every emitted one, with
        log-probabilities of the target itself: before temperature, penalties and filters.

    Raises:
      ValueError: names the argument, its value and the range.

    Example:
      >>> SamplingParams(temperature=0.7, top_p=0.9).top_p
      0.9
      >>> SamplingParams(top_p=1.5)
      Traceback (most recent call last):
      ...
      ValueError: SamplingParams: top_p is 1.5; it must be in (0, 1]
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 16
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = dataclasses.field(default=None, hash=False)
    stop: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self):
        self._real("temperature", lambda t: 0 <= _float32(t) < math.inf, "a number of at least 0")
        self._whole("top_k", 0, 2**31 - 1, "a whole number of at least 0 (0 keeps all tokens)")
        self._real("top_p", lambda p: 0 < p <= 1, "in (0, 1]")
        self._real("min_p", lambda p: 0 <= p <= 1, "in [0, 1]")
        self._whole("max_tokens", 1, 2**31 - 1, "a whole number of at least 1")
        # Compared as float32, which they are used in: what underflows to 0 there would divide by 0.
        self._real("repetition_penalty", lambda r: SMALLEST <= _float32(r) < math.inf, "a number above 0 (1 changes nothing)")
        for name in ("presence_penalty", "frequency_penalty"):
            self._real(name, lambda f: -MAX_PENALTY <= f <= MAX_PENALTY, f"in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]")
        self._whole("min_tokens", 0, self.max_tokens, f"a whole number from 0 to max_tokens ({self.max_tokens})")
        self._biases()
        if self.seed is not None:
            self._whole("seed", 0, MAX_SEED, f"None or a whole number from 0 to {MAX_SEED}")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "True or False")
        self._whole("n", 1, MAX_COMPLETIONS, f"a whole number from 1 to {MAX_COMPLETIONS}")
        if self.logprobs is not None:
            self._whole("logprobs", 0, MAX_LOGPROBS, f"None or a whole number from 0 to {MAX_LOGPROBS}")
        stop = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
            self._refuse("stop", "None, a string or a sequence of strings, none of them empty")
        object.__setattr__(self, "stop", tuple(stop))
        if not isinstance(self.stop_token_ids, Iterable) or isinstance(self.stop_token_ids, str | bytes | Mapping):
            self._refuse("stop_token_ids", "a sequence of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            if not is_whole(token) or token < 0:
                self._refuse("stop_token_ids", "a sequence of token ids of at least 0")
        object.__setattr__(self, "stop_token_ids", tuple(int(token) for token in self.stop_token_ids))

    def _refuse(self, name, right):
        raise ValueError(f"SamplingParams: {name} is {getattr(self, name)!r}; it must be {right}")

    def _real(self, name, allowed, right):
        value = getattr(self, name)
        if not is_real(value) or not allowed(value):
            self._refuse(name, right)
        object.__setattr__(self, name, float(value))

    def _whole(self, name, least, most, right):
        value = getattr(self, name)
        if not is_whole(value) or not least <= value <= most:
            self._refuse(name, right)
        object.__setattr__(self, name, int(value))

    def _biases(self):
        if self.logit_bias is None:
            return
        right = "a dict from token ids of at least 0 to finite numbers or -inf"
        if not isinstance(self.logit_bias, Mapping):
            self._refuse("logit_bias", right)
        for token, bias in self.logit_bias.items():
            if not is_whole(token) or not 0 <= token < 2**31:
                self._refuse("logit_bias", f"{right}; {token!r} is no token id")
            if not is_real(bias) or not _fits(bias):
                self._refuse("logit_bias", f"{right}; that of {token} is {bias!r}")
        object.__setattr__(self, "logit_bias", {int(token): float(bias) for token, bias in self.logit_bias.items()})

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW


def _float32(value) -> float:
    try:
        with np.errstate(over="ignore"):
            return float(np.float32(float(value)))
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _fits(bias) -> bool:
    """Whether a bias is finite in float32, or minus infinity and meant."""
    return math.isfinite(_float32(bias)) or (isinstance(bias, float | np.floating) and bias == -math.inf)


@flax.struct.dataclass
class SamplingArrays:
    """Sampling settings of a batch, one row per request: changing them never retraces.

    Attributes:
      temperature: [B] float32; 0 is greedy.
      top_k: [B] int32; 0 keeps all.
      top_p: [B] float32; 1 keeps all.
      min_p: [B] float32; 0 keeps all.
      repetition_penalty: [B] float32; 1 changes nothing.
      presence_penalty: [B] float32; 0 changes nothing.
      frequency_penalty: [B] float32; 0 changes nothing.
      min_tokens: [B] int32.
      bias_ids: [B, M] int32, ids whose logits are biased; ``NO_ID`` fills.
      biases: [B, M] float32.
      seeds: [B, 2] uint32, high and low word.
      completion: [B] int32, which of several completions of one request the row is.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    min_tokens: jax.Array
    bias_ids: jax.Array
    biases: jax.Array
    seeds: jax.Array
    completion: jax.Array

    @classmethod
    def stack(
        cls,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        completion: Sequence[int] | None = None,
        num_biases: int = 1,
    ) -> "SamplingArrays":
        """Arrays of several requests' settings, with the seeds that they really use; NumPy's, for any device of any process.

        Args:
          params: settings of each.
          seeds: their seeds.
          completion: which of several completions of one request each row is; None: the first.
          num_biases: room for so many biased ids at least.

        Example:
          >>> SamplingArrays.stack([SamplingParams(temperature=0), SamplingParams(top_k=5)], seeds=[0, 1]).top_k.tolist()
          [0, 5]
        """

        def column(values, dtype):
            return for_jit(np.array(list(values), dtype))

        given = [p.logit_bias or {} for p in params]
        most = -(-max(num_biases, *map(len, given)) // BIASES_STEP) * BIASES_STEP
        bias_ids = np.full((len(params), most), NO_ID, np.int32)
        biases = np.zeros((len(params), most), np.float32)
        for row, bias in enumerate(given):
            bias_ids[row, : len(bias)] = list(bias)
            biases[row, : len(bias)] = list(bias.values())

        return cls(
            temperature=column((0.0 if p.greedy else p.temperature for p in params), np.float32),
            top_k=column((p.top_k for p in params), np.int32),
            top_p=column((p.top_p for p in params), np.float32),
            min_p=column((p.min_p for p in params), np.float32),
            repetition_penalty=column((p.repetition_penalty for p in params), np.float32),
            presence_penalty=column((p.presence_penalty for p in params), np.float32),
            frequency_penalty=column((p.frequency_penalty for p in params), np.float32),
            min_tokens=column((p.min_tokens for p in params), np.int32),
            bias_ids=for_jit(bias_ids),
            biases=for_jit(biases),
            seeds=column(([seed >> 32, seed & 0xFFFFFFFF] for seed in seeds), np.uint32),
            completion=column((0 for _ in params) if completion is None else completion, np.int32),
        )
