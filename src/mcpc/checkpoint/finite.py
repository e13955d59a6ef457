"""Find NaN and infinity while tensors are read for another purpose."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np

from mcpc.core.runner import Array
from mcpc.errors import BadInputError, Problem
from mcpc.storage.safetensors import Entry

#: Float dtype -> the unsigned view whose exponent bits are all ones in NaN and infinity, and only there. Several times
#: faster than `numpy.isfinite` of a 16-bit float.
_EXPONENTS: dict[np.dtype[np.generic], np.unsignedinteger] = {
    np.dtype(np.float16): np.uint16(0x7C00),
    np.dtype(ml_dtypes.bfloat16): np.uint16(0x7F80),
    np.dtype(np.float32): np.uint32(0x7F80_0000),
    np.dtype(np.float64): np.uint64(0x7FF0_0000_0000_0000),
}
_BLOCK_ELEMENTS = 1 << 18  # what is computed on the way stays in the cache


class FiniteCheck:
    """Counts the non-finite values of the tensors that it sees; integers have none."""

    def __init__(self) -> None:
        self._found: Counter[str] = Counter()

    def see(self, entry: Entry, piece: Array) -> None:
        """Look at a flat piece of a tensor."""
        if count := count_non_finite(piece):
            self._found[entry.name] += count

    def require_finite(self, where: Path) -> None:
        """Refuse what was seen if a value was NaN or infinity.

        Raises:
            BadInputError: Lists every tensor that holds one.
        """
        problems = [Problem(f"{count} non-finite values", name) for name, count in sorted(self._found.items())]
        if problems:
            raise BadInputError(
                f"non-finite weights: {problems[0]}", where=str(where), problems=problems,
                hint="the checkpoint is damaged or its training diverged: fetch it again",
            )  # fmt: skip


def count_non_finite(piece: Array) -> int:
    """Return how many values of a flat array are NaN or infinity."""
    exponent = _EXPONENTS.get(piece.dtype)
    if exponent is None:
        # ml_dtypes' float8 has the kind of raw bytes.
        has_none = np.issubdtype(piece.dtype, np.integer) or piece.dtype.kind == "b"
        return 0 if has_none else int(np.count_nonzero(~np.isfinite(piece)))
    bits = piece.view(exponent.dtype)
    return sum(
        int(np.count_nonzero((bits[start : start + _BLOCK_ELEMENTS] & exponent) == exponent))
        for start in range(0, bits.size, _BLOCK_ELEMENTS)
    )
