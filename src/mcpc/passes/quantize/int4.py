"""Symmetric INT4 in blocks along K: the arithmetic, on weights that are read in bands.

    scale[j, n] = max |W[k, n]| / 7  over the block k in [j * block, (j + 1) * block);  1 when the block is zero
    Q[k, n]     = clip(round_half_even(W[k, n] / scale[j, n]), -7, 7)

Scales are positive and -8 is not used: negative scales (which reach -8) are not proven on TensorRT.
Source: ONNX operator DequantizeLinear-21, `axis` and `block_size`: W ~ Q * scale.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mcpc.core.runner import Array
from mcpc.passes.quantize.pack import pack_int4
from mcpc.passes.quantize.streams import Source

LEVELS = np.float32(7)


def packed(source: Source, block: int, transposed: bool) -> Iterator[Array]:
    """Yield pieces of the packed INT4 [K, N rounded up to even] of a weight; the added column is zero.

    Args:
        source: The weight: [N,K] when `transposed`, else [K,N].
        block: Elements of K that share a scale; divides K.
        transposed: Whether the weight is stored [N,K].
    """
    if not transposed:
        for begin, end in source.bands(multiple=block):
            yield pack_int4(_even(_quantize(source.rows(begin, end), block)))
        return
    columns, depth = source.shape
    result = np.empty((depth, (columns + 1) // 2), np.uint8)
    for begin, end in source.bands(multiple=2):
        band = pack_int4(_even(_quantize(source.rows(begin, end).T, block)))
        result[:, begin // 2 : (end + 1) // 2] = band.reshape(depth, -1)
    yield result


def scales(source: Source, block: int, transposed: bool) -> Iterator[Array]:
    """Yield pieces of the scales float32 [K / block, N rounded up to even]; those of the added column are 1."""
    if not transposed:
        for begin, end in source.bands(multiple=block):
            yield _even(_scales(_blocks(source.rows(begin, end), block)), 1.0)
        return
    columns, depth = source.shape
    result = np.ones((depth // block, columns + columns % 2), np.float32)
    for begin, end in source.bands():
        result[:, begin:end] = _scales(_blocks(source.rows(begin, end).T, block))
    yield result


def _blocks(weight: Array, block: int) -> Array:
    """View [K, n] as [K / block, block, n]."""
    return weight.reshape(weight.shape[0] // block, block, weight.shape[1])


def _scales(blocks: Array) -> Array:
    result = np.abs(blocks).max(axis=1) / LEVELS
    result[result == 0] = 1
    return np.asarray(result)


def _quantize(weight: Array, block: int) -> Array:
    """Return int8 [K, n] for float32 [K, n]."""
    blocks = _blocks(weight, block)
    scaled = blocks / _scales(blocks)[:, None, :]
    np.rint(scaled, out=scaled)
    np.clip(scaled, -LEVELS, LEVELS, out=scaled)
    return scaled.reshape(weight.shape).astype(np.int8, order="C")


def _even(matrix: Array, fill: float = 0.0) -> Array:
    """Add a column when the number of columns is odd."""
    if matrix.shape[1] % 2 == 0:
        return matrix
    return np.pad(matrix, ((0, 0), (0, 1)), constant_values=fill)
