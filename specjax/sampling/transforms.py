"""From logits to the log-probabilities that a token is really drawn from.

Letters in shapes: B rows, T tokens, V vocabulary.

The filters find a *threshold* by bisection over the ordered bit patterns of floating-point numbers instead of sorting the
vocabulary: 32 (or 64) passes that only count or add, exact to the last bit, and free of the sort that TPUs are slow at.
"""

import jax
import jax.numpy as jnp

from specjax.sampling.params import SamplingArrays


def _ordered_bits(values: jax.Array) -> jax.Array:
    """Unsigned integers in the order of the floating-point ``values`` (no NaN)."""
    width = values.dtype.itemsize * 8
    unsigned = jnp.dtype(f"uint{width}")
    bits = jax.lax.bitcast_convert_type(values, unsigned)
    sign = jnp.asarray(1 << (width - 1), unsigned)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest_threshold(values: jax.Array, enough) -> jax.Array:
    """The largest t, as ordered bits [..., 1], such that ``enough(values >= t)`` [..., 1] holds.

    Args:
      values: [..., V].
      enough: from a bool mask [..., V] to [..., 1]; true for the full mask, and once false, false for all smaller masks.
    """
    bits = _ordered_bits(values)
    width = values.dtype.itemsize * 8

    def narrow(step, threshold):
        one = jnp.asarray(1, bits.dtype) << (width - 1 - step).astype(bits.dtype)
        candidate = threshold | one
        return jnp.where(enough(bits >= candidate), candidate, threshold)

    start = jnp.zeros((*values.shape[:-1], 1), bits.dtype)
    threshold = jax.lax.fori_loop(0, width, narrow, start)
    return bits >= threshold


def has_nan(values: jax.Array) -> jax.Array:
    """[...] whether a row of ``values`` [..., V] holds a NaN.

    Its maximum does not tell: XLA's CPU backend loses NaN in the maximum of a long row.

    Example:
      >>> has_nan(jnp.array([[1.0, jnp.nan], [1.0, 2.0]])).tolist()
      [True, False]
    """
    return jnp.any(jnp.isnan(values), axis=-1)


def keep_top_k(log_probs: jax.Array, top_k: jax.Array) -> jax.Array:
    """Mask [..., V] of the ``top_k`` [..., 1] largest entries; ties at the threshold are all kept; 0 keeps all.

    Example:
      >>> keep_top_k(jnp.array([[3.0, 1.0, 2.0]]), jnp.array([[2]])).tolist()
      [[True, False, True]]
    """
    vocab_size = log_probs.shape[-1]
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, vocab_size), vocab_size)
    return _largest_threshold(log_probs, lambda mask: jnp.sum(mask, -1, keepdims=True, dtype=jnp.int32) >= wanted)


def keep_top_p(log_probs: jax.Array, top_p: jax.Array) -> jax.Array:
    """Mask [..., V] of the most likely tokens whose probability reaches ``top_p`` [..., 1]; ties are all kept.

    Args:
      log_probs: [..., V], normalised.
      top_p: [..., 1] in (0, 1]; 1 keeps all.

    Example:
      >>> keep_top_p(jnp.log(jnp.array([[0.5, 0.3, 0.2]])), jnp.array([[0.6]])).tolist()
      [[True, True, False]]
    """
    probs = jnp.exp(log_probs)
    # A top_p that underflows to 0 must still be reached by something: the most likely token stays.
    wanted = jnp.maximum(top_p.astype(probs.dtype), jnp.finfo(probs.dtype).tiny)
    reached = _largest_threshold(log_probs, lambda mask: jnp.sum(jnp.where(mask, probs, 0), -1, keepdims=True) >= wanted)
    # With 1 the sum's rounding must not decide.
    return reached | (top_p >= 1)


def to_log_probs(logits: jax.Array, sampling: SamplingArrays, vocab_size: int) -> jax.Array:
    """Log-probabilities [B, T, V] that each row's tokens are drawn from; one-hot for greedy rows.

    Args:
      logits: [B, T, V], at least float32.
      sampling: settings of the rows.
      vocab_size: ids from here on are padding of the vocabulary and get probability 0.

    Example:
      >>> from specjax.sampling.params import SamplingParams
      >>> rows = SamplingArrays.stack([SamplingParams(temperature=0), SamplingParams(temperature=1)], seeds=[0, 0])
      >>> logits = jnp.array([[[1.0, 2.0, 9.0]], [[0.0, 0.0, 9.0]]])
      >>> jnp.exp(to_log_probs(logits, rows, vocab_size=2)).round(2).tolist()
      [[[0.0, 1.0, 0.0]], [[0.5, 0.5, 0.0]]]
    """
    dtype = logits.dtype
    negative_infinity = jnp.asarray(-jnp.inf, dtype)
    ids = jnp.arange(logits.shape[-1])[None, None]

    def per_row(setting):
        return setting[:, None, None]

    if vocab_size < logits.shape[-1]:
        logits = jnp.where(ids < vocab_size, logits, negative_infinity)
    greedy = per_row(sampling.temperature) <= 0

    def normalised(scores):
        return jax.nn.log_softmax(scores, axis=-1)

    def filtered(log_probs, needed, keep, setting):
        """Applies a filter only if some row asks for it: a batch without filters pays for none."""
        return jax.lax.cond(
            jnp.any(needed & ~greedy[:, 0, 0]),
            lambda x: normalised(jnp.where(keep(x, per_row(setting)), x, negative_infinity)),
            lambda x: x,
            log_probs,
        )

    def sampled(logits):
        temperature = jnp.where(greedy, 1.0, per_row(sampling.temperature)).astype(dtype)
        # From the largest downwards: at low temperatures the quotients are large, and their rounding would not cancel.
        log_probs = normalised((logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature)

        def keep_min_p(x, min_p):
            return x >= jnp.max(x, -1, keepdims=True) + jnp.log(min_p.astype(dtype))

        log_probs = filtered(log_probs, sampling.min_p > 0, keep_min_p, sampling.min_p)
        log_probs = filtered(log_probs, sampling.top_k > 0, keep_top_k, sampling.top_k)
        log_probs = filtered(log_probs, sampling.top_p < 1, keep_top_p, sampling.top_p)
        return jnp.where(greedy, one_hot(logits), log_probs)

    def one_hot(logits):
        best = jnp.argmax(logits, axis=-1, keepdims=True)
        hot = jnp.where(ids == best, jnp.asarray(0, dtype), negative_infinity)
        # A NaN, or nothing that is allowed, must stay visible: argmax would turn it into a plausible token.
        nothing = ~jnp.any(logits > negative_infinity, axis=-1, keepdims=True)
        broken = has_nan(logits)[..., None] | nothing
        return jnp.where(broken, jnp.asarray(jnp.nan, dtype), hot)

    return jax.lax.cond(jnp.all(greedy), one_hot, sampled, logits)
