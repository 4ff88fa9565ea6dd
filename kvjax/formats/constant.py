"""Arrays that are part of a static description: what was measured once, and is compiled in."""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


class Constant:
    """A float32 array, hashable and equal by what it holds, both by a digest made once.

    Args:
      values: what `np.asarray` takes.
    """

    def __init__(self, values: ArrayLike) -> None:
        self.values: np.ndarray = np.array(values, np.float32, order="C")
        self.values.setflags(write=False)
        shape = repr(self.values.shape).encode()
        self._digest = hashlib.sha256(shape + self.values.tobytes()).hexdigest()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self.values.shape

    def __hash__(self) -> int:
        return hash(self._digest)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Constant) and self._digest == other._digest

    def __repr__(self) -> str:
        return f"Constant(shape={self.shape}, sha256={self._digest!r})"
