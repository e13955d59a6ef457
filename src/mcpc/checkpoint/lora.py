"""Merge low-rank updates into a weight, some rows at a time: `W + s * B @ A`, and DoRA's lengths on top.

Everything is computed in float32 and rounded once, to the weight's own dtype. A weight is seen as a matrix: of a
convolution, what follows the first axis is one row.

Source: peft `lora.Linear.merge`, `lora.Embedding.get_delta_weight` and `lora.variants.DoraLinearVariant.merge_safe`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mcpc.core.runner import Array
from mcpc.errors import BadInputError
from mcpc.storage.safetensors import Entry, numpy_dtype

#: Of a merged weight that are in memory at a time.
BLOCK_ELEMENTS = 1 << 22

Rows = Callable[[int], Iterator[Array]]


@dataclass(frozen=True)
class LowRank:
    """A low-rank update of a matrix [rows, columns].

    Attributes:
        left: [rows, rank].
        right: [rank, columns].
        scaling: Factor of their product.
        magnitude: DoRA's lengths, None without DoRA.
        by_columns: The lengths are those of columns: the matrix is stored as [in, out], or it is an embedding.
    """

    left: Callable[[], Array]
    right: Callable[[], Array]
    scaling: float
    magnitude: Callable[[], Array] | None = None
    by_columns: bool = False


@dataclass
class Drift:
    """How far an adapter moved each weight: the norm of the change over the norm of the weight before.

    A weight's figure is there once the weight was computed; computing it again gives the same.
    """

    of: dict[str, float] = field(default_factory=dict)

    def note(self, parameter: str, moved: float, before: float) -> None:
        """Note sums of squares."""
        self.of[parameter] = math.sqrt(moved) / math.sqrt(before) if before > 0.0 else math.inf if moved else 0.0


@dataclass(frozen=True)
class Merge:
    """One weight, and what is merged into it, in order.

    Attributes:
        parameter: The parameter that it fills.
        shape: Of the weight.
        dtype: That the result is rounded to.
        base: Yields the weight as float32 matrices of the given number of rows.
        updates: What is added, each with where its drift is noted.
    """

    parameter: str
    shape: tuple[int, ...]
    dtype: str
    base: Rows
    updates: Sequence[tuple[LowRank, Drift]]

    def rows(self) -> Iterator[Array]:
        """Yield the merged weight, some rows at a time.

        Raises:
            BadInputError: A value does not fit the dtype.
        """
        columns = math.prod(self.shape[1:])
        step = max(1, BLOCK_ELEMENTS // max(1, columns))
        operands = [(update, update.left(), update.right(), self._lengths(update, step)) for update, _ in self.updates]
        moved, before = np.zeros(len(operands)), np.zeros(len(operands))
        start = 0
        for block in self.base(step):
            merged = block
            for number, (update, left, right, lengths) in enumerate(operands):
                was = merged
                merged = was + update.scaling * (left[start : start + len(block)] @ right)
                if update.magnitude is not None:
                    merged = merged * self._factor(update, merged, lengths, start)
                before[number] += np.square(was, dtype=np.float64).sum()
                moved[number] += np.square(merged - was, dtype=np.float64).sum()
            start += len(block)
            yield self._rounded(merged)
        for (_, drift), change, norm in zip(self.updates, moved, before, strict=True):
            drift.note(self.parameter, float(change), float(norm))

    def _lengths(self, update: LowRank, step: int) -> Array | None:
        """Return the lengths of the sum's columns [columns], which takes a read of its own; None where rows do."""
        if update.magnitude is None or not update.by_columns:
            return None
        left, right = update.left(), update.right()
        sums, start = np.zeros(right.shape[1]), 0
        for block in self.base(step):
            whole = block + update.scaling * (left[start : start + len(block)] @ right)
            sums += np.square(whole, dtype=np.float64).sum(axis=0)
            start += len(block)
        lengths: Array = np.sqrt(sums).astype(np.float32)
        return lengths

    def _factor(self, update: LowRank, merged: Array, lengths: Array | None, start: int) -> Array:
        """Return what DoRA multiplies some merged rows by: wanted length over actual length."""
        if update.magnitude is None:
            raise ValueError("the update has no magnitude")
        wanted = update.magnitude().reshape(-1)
        if lengths is not None:
            actual, factor_shape = lengths, (1, -1)
        else:
            actual = np.sqrt(np.square(merged, dtype=np.float64).sum(axis=1)).astype(np.float32)
            wanted, factor_shape = wanted[start : start + len(merged)], (-1, 1)
        if not actual.all():
            what, first = ("column", 0) if lengths is not None else ("row", start)
            raise BadInputError(
                f"DoRA gives {what} {first + int(np.argmin(actual))} a length, and it has no direction: it is all zero",
                where=self.parameter, hint="the adapter was trained on other weights",
            )  # fmt: skip
        factor: Array = (wanted / actual).reshape(factor_shape)
        return factor

    def _rounded(self, block: Array) -> Array:
        with np.errstate(over="ignore"):
            rounded = block.astype(numpy_dtype(self.dtype))
        if not np.isfinite(rounded.astype(np.float32, copy=False)).all():
            raise BadInputError(
                "a merged weight does not fit its dtype", where=self.parameter, expected=f"finite {self.dtype} values",
                hint="use --dtype float32, or give the adapter a smaller weight",
            )  # fmt: skip
        return rounded


def matrix_rows(entry: Entry) -> Rows:
    """Return how the rows of a stored tensor are read as float32 matrices; a vector is one row."""

    def read(step: int) -> Iterator[Array]:
        if len(entry.shape) < 2:
            yield entry.read().reshape(1, -1).astype(np.float32)
            return
        for start in range(0, entry.shape[0], step):
            part = entry.rows(start, start + step)
            yield part.read().reshape(part.shape[0], -1).astype(np.float32)

    return read
