"""Symmetric INT4 in blocks along K: the arithmetic, on weights that are read in bands.

    scale[j, n] = c * max |W[k, n]| / 7  over the block k in [j * block, (j + 1) * block);  1 when the block is zero
    Q[k, n]     = clip(round_half_even(W[k, n] / scale[j, n]), -8, 7)

where c of `SHRINK` gives the block the least sum of squared errors (the first of equals). c = 1 reaches the largest
magnitude of either sign, 7/8 reaches it when it is negative, the others cut it off for a finer step. Measured on real
Linear weights, the error is a tenth below that of c = 1 alone. Scales are positive: negative ones are not proven on
TensorRT.

Source: ONNX operator DequantizeLinear-21, `axis` and `block_size`: W ~ Q * scale. Choosing the clipping range by the
squared error: Banner et al. 2019, "Post training 4-bit quantization of convolutional networks", section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mcpc.core.runner import Array
from mcpc.passes.quantize.pack import pack_int4
from mcpc.passes.quantize.streams import Source

LEVELS = np.float32(7)
SHRINK = tuple(np.float32(c) for c in (1.0, 0.94, 0.875, 0.82))


class Int4Weight:
    """The INT4 form of one weight; integers and scales come of one reading when they are asked for in that order."""

    def __init__(self, source: Source, block: int, transposed: bool) -> None:
        """Note what to quantize; nothing is read yet.

        Args:
            source: The weight: [N,K] when `transposed`, else [K,N].
            block: Elements of K that share a scale; divides K.
            transposed: Whether the weight is stored [N,K].
        """
        self._source, self._block, self._transposed = source, block, transposed
        rows, columns = source.shape
        self._depth, self._columns = (columns, rows) if transposed else (rows, columns)
        self._scales: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Its shape [K, N rounded up to even]; the added column is zero."""
        return self._depth, self._columns + self._columns % 2

    @property
    def scale_shape(self) -> tuple[int, int]:
        """The shape of the scales [K / block, N rounded up to even]; those of the added column are 1."""
        return self._depth // self._block, self.shape[1]

    def packed(self) -> Iterator[Array]:
        """Yield pieces of the packed integers, and keep the scales for `scales`."""
        kept = np.ones(self.scale_shape, np.float32)
        whole = np.empty((self._depth, self.shape[1] // 2), np.uint8) if self._transposed else None
        for begin, end, (integers, scale) in self._source.map(self._work, 2 if self._transposed else self._block):
            if whole is None:
                kept[begin // self._block : end // self._block, : self._columns] = scale
                yield pack_int4(_even(integers))
            else:
                kept[:, begin:end] = scale
                whole[:, begin // 2 : (end + 1) // 2] = pack_int4(_even(integers)).reshape(self._depth, -1)
        self._scales = kept
        if whole is not None:
            yield whole

    def scales(self) -> Iterator[Array]:
        """Yield the scales."""
        if self._scales is None:
            for _ in self.packed():
                pass
        kept, self._scales = self._scales, None
        if kept is not None:
            yield kept

    def _work(self, rows: Array) -> tuple[Array, Array]:
        return _quantize(np.ascontiguousarray(rows.T) if self._transposed else rows, self._block)


def _quantize(weight: Array, block: int) -> tuple[Array, Array]:
    """Return the integers int8 [K, n] and scales float32 [K / block, n] of a float32 [K, n]."""
    blocks = weight.reshape(weight.shape[0] // block, block, weight.shape[1])
    largest = np.abs(blocks).max(axis=1) / LEVELS
    best, scale, integers = _try(blocks, largest * SHRINK[0])
    for factor in SHRINK[1:]:
        error, candidate, rounded = _try(blocks, largest * factor)
        better = error < best
        best[better], scale[better] = error[better], candidate[better]
        np.copyto(integers, rounded, where=better[:, None, :])
    return integers.reshape(weight.shape), scale


def _try(blocks: Array, scale: Array) -> tuple[Array, Array, Array]:
    """Return the sums of squared errors [K / block, n], the scales and the integers that they give."""
    scale[scale == 0] = 1
    rounded = blocks / scale[:, None, :]
    np.rint(rounded, out=rounded)
    np.clip(rounded, -LEVELS - 1, LEVELS, out=rounded)
    integers = rounded.astype(np.int8)
    np.multiply(rounded, scale[:, None, :], out=rounded)
    np.subtract(rounded, blocks, out=rounded)
    with np.errstate(over="ignore"):  # a block of 1e19 and more keeps the first factor: no error is below infinity
        np.multiply(rounded, rounded, out=rounded)
        error = rounded[:, 0].copy()
        for index in range(1, blocks.shape[1]):  # a fixed order of additions: the same choice on every machine
            error += rounded[:, index]
    return error, scale, integers


def _even(matrix: Array) -> Array:
    """Add a zero column when the number of columns is odd."""
    return np.pad(matrix, ((0, 0), (0, 1))) if matrix.shape[1] % 2 else matrix
