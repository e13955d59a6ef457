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


def packed(source: Source, block: int, transposed: bool) -> Iterator[Array]:
    """Yield pieces of the packed INT4 [K, N rounded up to even] of a weight; the added column is zero.

    Args:
        source: The weight: [N,K] when `transposed`, else [K,N].
        block: Elements of K that share a scale; divides K.
        transposed: Whether the weight is stored [N,K].
    """
    if not transposed:
        for begin, end in source.bands(multiple=block):
            yield pack_int4(_even(_quantize(source.rows(begin, end), block)[0]))
        return
    columns, depth = source.shape
    result = np.empty((depth, (columns + 1) // 2), np.uint8)
    for begin, end in source.bands(multiple=2):
        band = np.ascontiguousarray(source.rows(begin, end).T)
        result[:, begin // 2 : (end + 1) // 2] = pack_int4(_even(_quantize(band, block)[0])).reshape(depth, -1)
    yield result


def scales(source: Source, block: int, transposed: bool) -> Iterator[Array]:
    """Yield pieces of the scales float32 [K / block, N rounded up to even]; those of the added column are 1."""
    if not transposed:
        for begin, end in source.bands(multiple=block):
            yield _even(_quantize(source.rows(begin, end), block)[1], 1.0)
        return
    columns, depth = source.shape
    result = np.ones((depth // block, columns + columns % 2), np.float32)
    for begin, end in source.bands():
        result[:, begin:end] = _quantize(np.ascontiguousarray(source.rows(begin, end).T), block)[1]
    yield result


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
    np.multiply(rounded, rounded, out=rounded)
    error = rounded[:, 0].copy()
    for index in range(1, blocks.shape[1]):  # a fixed order of additions: the same choice on every machine
        error += rounded[:, index]
    return error, scale, integers


def _even(matrix: Array, fill: float = 0.0) -> Array:
    """Add a column when the number of columns is odd."""
    if matrix.shape[1] % 2 == 0:
        return matrix
    return np.pad(matrix, ((0, 0), (0, 1)), constant_values=fill)
