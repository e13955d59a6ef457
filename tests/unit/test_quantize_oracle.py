"""The quantized bytes equal those of a second implementation, written element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from quantize_graphs import gaussian

from mcpc.core.runner import Array
from mcpc.errors import BadInputError
from mcpc.passes.quantize import int4, int8, streams
from mcpc.passes.quantize.streams import Source

F = np.float32


def round_half_even(value: float) -> int:
    low = math.floor(value)
    rest = value - low
    if rest != 0.5:
        return low if rest < 0.5 else low + 1
    return low if low % 2 == 0 else low + 1


def oracle_int4(weight: Array, block: int) -> tuple[bytes, bytes]:
    """Packed bytes and scale bytes of float32 [K,N]."""
    depth, width = weight.shape
    even = width + width % 2
    q = [[0] * even for _ in range(depth)]
    scales = [[F(1)] * even for _ in range(depth // block)]
    for n in range(width):
        for j in range(depth // block):
            column = [F(weight[j * block + i, n]) for i in range(block)]
            largest = F(max(abs(x) for x in column)) / F(7)
            best = None
            for shrink in (1.0, 0.94, 0.875, 0.82):
                scale = largest * F(shrink)
                if scale == 0:
                    scale = F(1)
                integers = [min(7, max(-8, round_half_even(float(x / scale)))) for x in column]
                error = F(0)
                for i, x in zip(integers, column, strict=True):
                    difference = F(i) * scale - x
                    with np.errstate(over="ignore"):
                        error = error + difference * difference
                if best is None or error < best:
                    best = error
                    scales[j][n] = scale
                    for i in range(block):
                        q[j * block + i][n] = integers[i]
    flat = [value for row in q for value in row]
    packed = bytes((flat[i] & 15) | ((flat[i + 1] & 15) << 4) for i in range(0, len(flat), 2))
    return packed, b"".join(value.tobytes() for row in scales for value in row)


def oracle_int8(rows: list[list[np.float32]]) -> tuple[list[list[int]], list[np.float32]]:
    """Integers and scale of each row."""
    integers, scales = [], []
    for row in rows:
        scale = F(max(abs(x) for x in row)) / F(127)
        if scale == 0:
            scale = F(1)
        scales.append(scale)
        integers.append([min(127, max(-127, round_half_even(float(x / scale)))) for x in row])
    return integers, scales


def awkward(depth: int, width: int) -> Array:
    """Weights with zero blocks, ties of rounding, one-sided blocks, huge and denormal magnitudes."""
    weight = gaussian(depth, width, seed=depth + width)
    weight[:32, 0] = 0
    weight[0:32, 1] = np.arange(32) / F(4) - 3.5
    if width > 2:
        weight[:, 2] = -np.abs(weight[:, 2])
        weight[:32, 2] *= F(1e30)
    if width > 3:
        weight[:, 3] = F(1e-44)
    return weight


def raw(pieces: list[Array]) -> bytes:
    return b"".join(np.ascontiguousarray(piece).tobytes() for piece in pieces)


def source_of(weight: Array, transposed: bool) -> Source:
    return Source(ir.Tensor(np.ascontiguousarray(weight.T) if transposed else weight, name="w"))


@pytest.fixture(params=[1 << 18, 100], ids=["one band", "many bands"])
def bands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(streams, "_BAND_ELEMENTS", request.param)
    return int(request.param)


@pytest.mark.usefixtures("bands")
@pytest.mark.parametrize("transposed", [False, True], ids=["[K,N]", "[N,K]"])
@pytest.mark.parametrize(("depth", "width", "block"), [(32, 2, 32), (64, 7, 32), (128, 33, 64), (256, 5, 128)])
def test_int4(depth: int, width: int, block: int, transposed: bool) -> None:
    weight = awkward(depth, width)
    made = int4.Int4Weight(source_of(weight, transposed), block, transposed)
    packed, scales = oracle_int4(weight, block)
    assert raw(list(made.packed())) == packed
    assert raw(list(made.scales())) == scales
    assert raw(list(made.scales())) == scales, "asked for without the integers"
    assert made.shape == (depth, width + width % 2)


def test_int4_uses_all_levels_and_positive_scales() -> None:
    weight = gaussian(2048, 64)
    made = int4.Int4Weight(source_of(weight, False), 32, False)
    packed = np.concatenate([piece.reshape(-1) for piece in made.packed()])
    (scales,) = made.scales()
    assert set(np.unique(packed & 15)) == set(range(16))
    assert (scales > 0).all()


@pytest.mark.usefixtures("bands")
@pytest.mark.parametrize("transposed", [False, True], ids=["[K,N]", "[N,K]"])
@pytest.mark.parametrize(("depth", "width"), [(32, 2), (80, 7), (33, 33)])
def test_int8_channels(depth: int, width: int, transposed: bool) -> None:
    weight = awkward(depth, width)
    source = source_of(weight, transposed)
    integers, scales = oracle_int8([list(weight[:, n]) for n in range(width)])
    expected = bytes((integers[n][k]) & 255 for k in range(depth) for n in range(width))
    assert raw(list(int8.channels(source, transposed))) == expected
    assert raw(list(int8.channel_scales(source, transposed))) == b"".join(scale.tobytes() for scale in scales)


@pytest.mark.usefixtures("bands")
@pytest.mark.parametrize("equalized", [False, True])
def test_int8_rows(equalized: bool) -> None:
    table = awkward(64, 48)
    table[:, 7] *= 1000  # an outlier column, as language models have
    table[:, 9] = 0
    source = source_of(table, False)
    columns = int8.column_scales(source) if equalized else None
    factors = [F(1)] * 48
    if equalized:
        for h in range(48):
            mean = math.fsum(float(table[v, h]) ** 2 for v in range(64)) / 64
            factors[h] = F(2.0 ** round(math.log2(mean) / 2)) if mean > 0 else F(1)
        assert columns is not None
        assert columns.tolist() == factors
    integers, scales = oracle_int8([[table[v, h] / factors[h] for h in range(48)] for v in range(64)])
    assert raw(list(int8.rows(source, columns))) == bytes(value & 255 for row in integers for value in row)
    assert raw(list(int8.row_scales(source, columns))) == b"".join(scale.tobytes() for scale in scales)


def test_equalized_rows_keep_small_columns() -> None:
    table = gaussian(256, 64)
    table[:, 3] *= 40
    source, small = source_of(table, False), np.arange(64) != 3

    def error(columns: Array | None) -> float:
        integers = np.concatenate(list(int8.rows(source, columns))).astype(F)
        scales = np.concatenate(list(int8.row_scales(source, columns)))
        wide = integers * scales[:, None] * (1 if columns is None else columns)
        return float(np.linalg.norm((wide - table)[:, small]) / np.linalg.norm(table[:, small]))

    assert error(int8.column_scales(source)) < 0.01 < error(None)


def stored(dtype: type, path: Path, weight: Array) -> ir.ExternalTensor:
    data = weight.astype(dtype)
    path.write_bytes(b"\1" * 24 + data.tobytes())
    kind = ir.DataType.from_numpy(data.dtype)
    return ir.ExternalTensor(
        path.name, 24, data.nbytes, kind, shape=ir.Shape(weight.shape), name="w", base_dir=path.parent
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_external_weights_are_read_as_they_are_stored(tmp_path: Path, dtype: type) -> None:
    weight = gaussian(70, 64).astype(dtype).astype(F)
    inline = Source(ir.Tensor(weight, name="w"))
    external = Source(stored(dtype, tmp_path / "weights.bin", weight))
    make: Callable[[Source], bytes] = lambda source: raw(list(int4.Int4Weight(source, 32, True).packed()))  # noqa: E731
    assert make(external) == make(inline)
    assert np.array_equal(external.rows(3, 5), weight[3:5])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_weights_are_refused(value: float) -> None:
    weight = gaussian(64, 8)
    weight[40, 3] = value
    with pytest.raises(BadInputError, match=r"model\.w: the weight holds non-finite values"):
        list(int4.Int4Weight(Source(ir.Tensor(weight, name="model.w")), 32, False).packed())
