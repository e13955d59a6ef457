"""Symmetric INT8 with one scale for each output channel (or table row): the arithmetic, on weights read in bands.

    scale[n] = max |W[:, n]| / 127;  1 when the channel is zero
    Q[k, n]  = clip(round_half_even(W[k, n] / scale[n]), -127, 127)

Source: ONNX operator DequantizeLinear-13, `axis`; the symmetric range without -128 as in TensorRT.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mcpc.core.runner import Array
from mcpc.passes.quantize.streams import Source

LEVELS = np.float32(127)


def channels(source: Source, transposed: bool) -> Iterator[Array]:
    """Yield pieces of the INT8 [K,N] of a weight, [N,K] when `transposed`, else [K,N]."""
    if not transposed:
        scale = np.concatenate(list(channel_scales(source, transposed)))
        for begin, end in source.bands():
            yield _quantize(source.rows(begin, end), scale)
        return
    result = np.empty(source.shape[::-1], np.int8)
    for begin, end in source.bands():
        band = source.rows(begin, end)
        result[:, begin:end] = _quantize(band, _scales(np.abs(band).max(axis=1))[:, None]).T
    yield result


def channel_scales(source: Source, transposed: bool) -> Iterator[Array]:
    """Yield pieces of the scales float32 [N]."""
    if transposed:
        yield from row_scales(source)
        return
    largest = np.zeros(source.shape[1], np.float32)
    for begin, end in source.bands():
        np.maximum(largest, np.abs(source.rows(begin, end)).max(axis=0), out=largest)
    yield _scales(largest)


def rows(source: Source, columns: Array | None) -> Iterator[Array]:
    """Yield pieces of the INT8 [V,H] of a table [V,H] divided by `columns` [H], one scale for each row."""
    for begin, end in source.bands():
        band = _divided(source.rows(begin, end), columns)
        yield _quantize(band, _scales(np.abs(band).max(axis=1))[:, None])


def row_scales(source: Source, columns: Array | None = None) -> Iterator[Array]:
    """Yield pieces of the scales float32 [V] of a table [V,H] divided by `columns` [H]."""
    for begin, end in source.bands():
        yield _scales(np.abs(_divided(source.rows(begin, end), columns)).max(axis=1))


def column_scales(source: Source) -> Array:
    """Return float32 [H]: the power of two next to the root mean square of each column of a table [V,H]; 1 for zeros.

    One scale for a row wastes its range on columns that are large in every row, which tables of real language models
    have. Dividing by a power of two is exact.
    """
    squares = np.zeros(source.shape[1])
    for begin, end in source.bands():
        squares += np.square(source.rows(begin, end), dtype=np.float64).sum(axis=0)
    mean = squares / source.shape[0]
    exponents = np.round(np.log2(mean, where=mean > 0, out=np.zeros_like(mean)) / 2)
    return np.exp2(exponents).astype(np.float32)


def _divided(band: Array, columns: Array | None) -> Array:
    return band if columns is None else band / columns


def _scales(largest: Array) -> Array:
    result = largest / LEVELS
    result[result == 0] = 1
    return np.asarray(result)


def _quantize(weight: Array, scale: Array) -> Array:
    scaled = weight / scale
    np.rint(scaled, out=scaled)
    np.clip(scaled, -LEVELS, LEVELS, out=scaled)
    return scaled.astype(np.int8)
