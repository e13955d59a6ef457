"""Compare two arrays, and judge the difference by a gate. Nothing here has a default tolerance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcpc.core.runner import Array
from mcpc.errors import VerificationError

#: Share of channels (largest mean magnitude first) left out of the outlier-excluded cosine.
OUTLIER_FRACTION = 0.01
#: Elements that are widened to float64 at a time: logits of a long prompt are large.
_PIECE_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Difference:
    """How far `actual` is from `expected`.

    Attributes:
        max_abs: Largest absolute difference.
        max_rel: Largest absolute difference over the largest magnitude of `expected`.
        cosine: Cosine similarity of the whole tensors, 1.0 for two zero tensors.
        worst_channel_cosine: Smallest cosine over slices of the last axis that vary at all.
        cosine_without_outliers: Cosine after leaving out the 1 % of channels (at least one) of largest magnitude.
    """

    max_abs: float
    max_rel: float
    cosine: float
    worst_channel_cosine: float
    cosine_without_outliers: float

    def worst(self, other: Difference) -> Difference:
        """Return the worse of each figure."""
        return Difference(
            max(self.max_abs, other.max_abs),
            max(self.max_rel, other.max_rel),
            min(self.cosine, other.cosine),
            min(self.worst_channel_cosine, other.worst_channel_cosine),
            min(self.cosine_without_outliers, other.cosine_without_outliers),
        )


@dataclass(frozen=True)
class Gate:
    """What a difference must meet; at least one bound is given.

    Attributes:
        max_abs: Upper bound of the largest absolute difference, or None.
        cosine: Lower bound of the cosine similarity, or None.
    """

    max_abs: float | None = None
    cosine: float | None = None

    def __post_init__(self) -> None:
        if self.max_abs is None and self.cosine is None:
            raise ValueError("a gate needs a bound")


def cosine(actual: Array, expected: Array) -> float:
    """Return the cosine similarity in float64; 1.0 when both are zero, 0.0 when one is."""
    a, b = actual.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
    norms = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    if norms == 0.0:
        return 1.0 if not a.any() and not b.any() else 0.0
    return float(np.clip(a @ b / norms, -1.0, 1.0))


def compare(actual: Array, expected: Array) -> Difference:
    """Measure how far `actual` is from `expected`, both of the same shape [..., channels].

    Raises:
        VerificationError: The shapes differ, or a value is not finite, or `expected` is a constant that
            could hide a fault (all elements equal although there are several).
    """
    if actual.shape != expected.shape:
        raise VerificationError("the shapes differ", expected=str(expected.shape), got=str(actual.shape))
    if actual.size == 0:
        return Difference(0.0, 0.0, 1.0, 1.0, 1.0)
    for name, array in (("actual", actual), ("expected", expected)):
        if not np.isfinite(array).all():
            raise VerificationError(f"the {name} output holds non-finite values")
    if expected.size > 1 and expected.min() == expected.max():
        constant = expected.flat[0]
        raise VerificationError("the reference output is constant: it cannot show a fault", got=f"all {constant:g}")
    channels = expected.shape[-1] if expected.ndim else 1
    sums = _Sums(channels)
    a, b = actual.reshape(-1, channels), expected.reshape(-1, channels)
    rows = max(1, _PIECE_ELEMENTS // channels)
    for start in range(0, len(b), rows):
        sums.add(a[start : start + rows].astype(np.float64), b[start : start + rows].astype(np.float64))
    per_channel = sums.channel_cosines() if len(b) > 1 else np.empty(0)
    kept = _without_outliers(sums.magnitudes / len(b))
    return Difference(
        sums.max_abs,
        sums.max_abs / sums.scale,
        sums.cosine(np.ones(channels, bool)),
        float(per_channel.min()) if per_channel.size else 1.0,
        sums.cosine(kept) if kept.any() else 1.0,
    )


class _Sums:
    """What a comparison needs to know of two arrays [rows, channels], gathered a piece at a time in float64."""

    def __init__(self, channels: int) -> None:
        self.max_abs = 0.0
        self.scale = 0.0
        self.magnitudes = np.zeros(channels)
        self._dots, self._actual, self._expected = np.zeros(channels), np.zeros(channels), np.zeros(channels)

    def add(self, actual: Array, expected: Array) -> None:
        """Count rows in."""
        self.max_abs = max(self.max_abs, float(np.abs(actual - expected).max()))
        magnitude = np.abs(expected)
        self.scale = max(self.scale, float(magnitude.max()))
        self.magnitudes += magnitude.sum(axis=0)
        self._dots += (actual * expected).sum(axis=0)
        self._actual += (actual * actual).sum(axis=0)
        self._expected += (expected * expected).sum(axis=0)

    def cosine(self, channels: Array) -> float:
        """Return the cosine over some channels; 1.0 when both are zero there, 0.0 when one is."""
        actual, expected = float(self._actual[channels].sum()), float(self._expected[channels].sum())
        if actual == 0.0 or expected == 0.0:
            return 1.0 if actual == expected else 0.0
        return float(np.clip(self._dots[channels].sum() / (actual**0.5 * expected**0.5), -1.0, 1.0))

    def channel_cosines(self) -> Array:
        """Return the cosine of each channel; channels that are zero in `expected` are left out."""
        alive = self._expected > 0.0
        norms = np.sqrt(self._actual[alive]) * np.sqrt(self._expected[alive])
        return np.asarray(np.divide(self._dots[alive], norms, out=np.zeros_like(norms), where=norms > 0.0))


def compare_whole_numbers(actual: Array, expected: Array) -> Difference:
    """Measure two arrays of integers or booleans, such as masks: they are equal, or they are not.

    Raises:
        VerificationError: A shape or an element differs.
    """
    if actual.shape != expected.shape:
        raise VerificationError("the shapes differ", expected=str(expected.shape), got=str(actual.shape))
    wrong = int((actual != expected).sum())
    if wrong:
        raise VerificationError("whole numbers differ", expected="all equal", got=f"{wrong} of {expected.size} differ")
    return Difference(0.0, 0.0, 1.0, 1.0, 1.0)


def _without_outliers(magnitude: Array) -> Array:
    """Mask of the channels that stay when those of largest mean magnitude are left out."""
    drop = max(1, round(OUTLIER_FRACTION * magnitude.size)) if magnitude.size > 1 else 0
    kept = np.ones(magnitude.size, bool)
    kept[np.argsort(-magnitude, kind="stable")[:drop]] = False
    return kept


def failures(difference: Difference, gate: Gate) -> list[str]:
    """Return the reasons why a difference misses the gate; empty when it passes."""
    reasons = []
    if gate.max_abs is not None and not difference.max_abs <= gate.max_abs:
        reasons.append(f"max abs {difference.max_abs:.3g} is above {gate.max_abs:g}")
    if gate.cosine is not None and not difference.cosine >= gate.cosine:
        reasons.append(f"cosine {difference.cosine:.6f} is below {gate.cosine:g}")
    return reasons
