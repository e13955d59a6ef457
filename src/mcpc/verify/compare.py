"""Compare two arrays, and judge the difference by a gate. Nothing here has a default tolerance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcpc.core.runner import Array
from mcpc.errors import VerificationError

#: Share of channels (largest mean magnitude first) left out of the outlier-excluded cosine.
OUTLIER_FRACTION = 0.01


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
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    if b.size > 1 and np.ptp(b) == 0.0:
        raise VerificationError("the reference output is constant: it cannot show a fault", got=f"all {b.flat[0]:g}")
    max_abs = float(np.abs(a - b).max())
    scale = float(np.abs(b).max())
    a2, b2 = (
        np.atleast_2d(a).reshape(-1, a.shape[-1] if a.ndim else 1),
        np.atleast_2d(b).reshape(-1, b.shape[-1] if b.ndim else 1),
    )
    per_channel = _channel_cosines(a2, b2)
    kept = _without_outliers(b2)
    return Difference(
        max_abs,
        max_abs / scale,
        cosine(a, b),
        float(per_channel.min()) if per_channel.size else 1.0,
        cosine(a2[:, kept], b2[:, kept]) if kept.any() else 1.0,
    )


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


def _channel_cosines(actual: Array, expected: Array) -> Array:
    """Cosine of each channel over all rows [rows, channels]; channels that are zero in `expected` are left out.

    One row gives no direction to compare within a channel, so the result is empty then.
    """
    if expected.shape[0] < 2:
        return np.empty(0)
    norms = np.linalg.norm(actual, axis=0) * np.linalg.norm(expected, axis=0)
    alive = np.linalg.norm(expected, axis=0) > 0.0
    dots = (actual * expected).sum(axis=0)[alive]
    return np.asarray(np.divide(dots, norms[alive], out=np.zeros_like(dots), where=norms[alive] > 0.0))


def _without_outliers(expected: Array) -> Array:
    """Mask of the channels that stay when those of largest mean magnitude are left out."""
    magnitude = np.abs(expected).mean(axis=0)
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
