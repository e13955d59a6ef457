"""Mean, spread and largest magnitude of weights, gathered while they are read for another purpose."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from mcpc.core.runner import Array

_FLOATS = frozenset(np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
_BLOCK_ELEMENTS = 1 << 16  # what is computed on the way stays in the cache


@dataclass
class Moments:
    """Sums over float elements.

    Attributes:
        count: Elements.
        total: Their sum.
        squares: The sum of their squares.
        absmax: The largest magnitude.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    absmax: float = 0.0

    def add(self, other: Moments) -> None:
        """Count another group in."""
        self.count += other.count
        self.total += other.total
        self.squares += other.squares
        self.absmax = max(self.absmax, other.absmax)

    def figures(self) -> dict[str, float]:
        """Return mean, standard deviation and largest magnitude, to six digits."""
        mean = self.total / self.count
        spread = math.sqrt(max(0.0, self.squares / self.count - mean * mean))
        values = {"mean": mean, "std": spread, "absmax": self.absmax}
        return {name: float(f"{value:.6g}") for name, value in values.items()}


class Statistics:
    """The moments of every tensor that passes; integers and packed codes have none."""

    def __init__(self) -> None:
        self._of: dict[str, Moments] = {}

    def see(self, name: str, piece: Array) -> None:
        """Count a flat piece of a tensor in."""
        if piece.dtype not in _FLOATS:
            return
        moments = self._of.setdefault(name, Moments())
        with np.errstate(all="ignore"):  # values that are not finite are refused elsewhere
            for start in range(0, piece.size, _BLOCK_ELEMENTS):
                moments.add(_moments(_float32(piece[start : start + _BLOCK_ELEMENTS])))

    def of(self, names: Iterable[str]) -> dict[str, float] | None:
        """Return the figures over some tensors together; None when none of them was seen."""
        whole = Moments()
        for name in names:
            if name in self._of:
                whole.add(self._of[name])
        return whole.figures() if whole.count else None


def _moments(block: Array) -> Moments:
    """Return the sums over a short block; its product with itself keeps six digits in float32, and is fast."""
    absmax = max(float(block.max()), -float(block.min()))
    return Moments(block.size, float(block.sum()), float(np.dot(block, block)), absmax)


def _float32(block: Array) -> Array:
    """Return finite values as float32; of float16 by moving the bits, six times faster than numpy's conversion.

    Exponent and mantissa go to the place that they have in float32; what the two exponents' biases differ by is a
    power of two, and so are the denormals' leading zeros made good.
    """
    if block.dtype != np.float16:
        return block.astype(np.float32, copy=False)
    bits = block.view(np.int16).astype(np.int32)
    bits <<= 13
    bits &= np.int32(-0x7000_2000)  # the sign, and the 15 bits above the 13 that are new
    result = bits.view(np.float32)
    result *= np.float32(2.0**112)
    return result
