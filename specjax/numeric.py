"""What counts as a number or an array: NumPy's are as good as Python's and JAX's; truth values are no numbers."""

import numbers
from typing import Any, TypeGuard, cast

import jax
import numpy as np


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether ``value`` is a whole number.

    Example:
      >>> import numpy as np
      >>> is_whole(np.int32(3)), is_whole(3.0), is_whole(True)
      (True, False, False)
    """
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_real(value: Any) -> TypeGuard[float]:
    """Whether ``value`` is a real number, whole ones among them; infinities and nan are.

    Example:
      >>> import numpy as np
      >>> is_real(np.float32(0.5)), is_real(3), is_real(False), is_real("3")
      (True, True, False, False)
    """
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def for_jit(array: np.ndarray) -> jax.Array:
    """``array`` itself, for a field whose hint is what a compiled function sees in it: those take NumPy's arrays as they are.

    Example:
      >>> import numpy as np
      >>> type(for_jit(np.zeros(2))).__name__
      'ndarray'
    """
    return cast(jax.Array, array)
