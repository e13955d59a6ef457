"""Packing of four-bit integers: every value comes back, in ONNX's order."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mcpc.core.runner import Array
from mcpc.passes.quantize.pack import pack_int4, unpack_int4

SHAPES = arrays.array_shapes(min_dims=1, max_dims=3, max_side=17)
INT4 = arrays.arrays(np.int8, SHAPES, elements=st.integers(-8, 7))


@given(INT4)
def test_unpack_returns_what_was_packed(values: Array) -> None:
    packed = pack_int4(values)
    assert packed.dtype == np.uint8
    assert packed.size == (values.size + 1) // 2
    assert np.array_equal(unpack_int4(packed, values.size).reshape(values.shape), values)


@given(INT4)
def test_the_order_is_that_of_onnx(values: Array) -> None:
    tensor = ir.Tensor(values.astype(ml_dtypes.int4), name="w")
    assert pack_int4(values).tobytes() == tensor.tobytes()


@given(arrays.arrays(np.uint8, st.integers(1, 40)))
def test_pack_returns_what_was_unpacked(packed: Array) -> None:
    assert np.array_equal(pack_int4(unpack_int4(packed, packed.size * 2)), packed)


@given(INT4)
def test_the_input_is_not_changed(values: Array) -> None:
    before = values.copy()
    pack_int4(values)
    assert np.array_equal(values, before)
