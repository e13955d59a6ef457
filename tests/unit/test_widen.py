"""Widening: nothing 16-bit is left anywhere, every number is the same, and no weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from google.protobuf.message import Message

from mcpc.backends.ort import open_model
from mcpc.errors import UnsupportedError
from mcpc.graph import io
from mcpc.graph.widen import widen

NARROW = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}

#: A dtype attribute, a constant, a subgraph, a function and a sequence; {h} is float16 or bfloat16, {n} its number,
#: {three} the bits of 3.0.
TEXT = """
<ir_version: 10, opset_import: ["" : 21, "local" : 1]>
g ({h}[N, 4] x, bool c) => ({h}[N, 4] y) <{h}[4] w> {{
    wide = Cast <to = 1> (x)
    narrow = Cast <to = {n}> (wide)
    shifted = Add (narrow, w)
    picked = If (c) <
        then_branch = yes () => ({h}[N, 4] a) {{ a = Mul (shifted, shifted) }},
        else_branch = no () => ({h}[N, 4] b) {{ k = Constant <value = {h}[1] {{{three}}}> ()  b = Mul (shifted, k) }}>
    normed = LayerNormalization <axis = -1, stash_type = 1> (picked, w)
    list = SequenceConstruct (normed)
    zero = Constant <value = int64 {{0}}> ()
    first = SequenceAt (list, zero)
    y = local.Twice (first)
}}
<domain: "local", opset_import: ["" : 21]>
Twice (t) => (u) {{
    f = Cast <to = 1> (t)
    two = Constant <value = float[1] {{2.0}}> ()
    g = Mul (f, two)
    u = Cast <to = {n}> (g)
}}
"""


def build(path: Path, kind: str) -> Path:
    number, three = {"float16": (10, 0x4200), "bfloat16": (16, 0x4040)}[kind]
    model = onnx.parser.parse_model(TEXT.format(h=kind, n=number, three=three))
    weight = np.array([0.1, -2.5, 3e-5, 7.0], np.float16 if kind == "float16" else ml_dtypes.bfloat16)
    del model.graph.initializer[:]
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    path.write_bytes(model.SerializeToString())
    return path


def narrow_places(message: Message) -> Iterator[str]:
    """Walk the whole protobuf, independently of the IR, for types and dtype attributes that are 16 bits wide."""
    if isinstance(message, onnx.AttributeProto) and message.name in ("to", "dtype") and message.i in NARROW:
        yield message.name
    for field, value in message.ListFields():
        if field.name in ("elem_type", "data_type") and value in NARROW:
            yield field.name
        if isinstance(value, Message):
            yield from narrow_places(value)
        elif field.type == field.TYPE_MESSAGE:
            for item in value:
                yield from narrow_places(item)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_nothing_narrow_is_left(kind: str, tmp_path: Path) -> None:
    model = io.load(build(tmp_path / "m.onnx", kind))
    assert list(narrow_places(ir.serde.serialize_model(model)))
    assert widen(model)
    assert not list(narrow_places(ir.serde.serialize_model(model)))
    assert not widen(model)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_numbers_are_the_same(kind: str, tmp_path: Path) -> None:
    path = build(tmp_path / "m.onnx", kind)
    model = io.load(path)
    before = model.graph.initializers["w"].const_value.numpy().astype(np.float32)  # type: ignore[union-attr]
    widen(model)
    after = model.graph.initializers["w"].const_value.numpy()  # type: ignore[union-attr]
    assert after.dtype == np.float32
    np.testing.assert_array_equal(after, before)

    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    for condition in (True, False):
        shifted = x + before
        picked = shifted * shifted if condition else shifted * 3
        centered = picked - picked.mean(-1, keepdims=True)
        expected = 2 * centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * before
        actual = open_model(path).run({"x": x, "c": np.array(condition)})["y"]
        assert np.abs(actual - expected).max() <= 1e-5


def test_a_float32_graph_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[N] x) => (float[N] y) { y = Cast <to = 1> (x) }'
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    model = io.load(path)
    before = io.serialize(model)
    assert not widen(model)
    assert io.serialize(model) == before


def test_weights_are_not_read(tmp_path: Path) -> None:
    model = io.load(build(tmp_path / "m.onnx", "float16"))
    value = model.graph.initializers["w"]
    value.const_value = ir.ExternalTensor(
        "gone.bin", 0, 8, ir.DataType.FLOAT16, shape=ir.Shape([4]), name="w", base_dir=tmp_path
    )
    assert widen(model)
    with pytest.raises(FileNotFoundError):
        value.const_value.numpy()


def test_a_dtype_from_a_function_attribute_is_refused(tmp_path: Path) -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 21, "local" : 1]>
    g (float16[N] x) => (float[N] y) { y = local.To <kind = 1> (x) }
    <domain: "local", opset_import: ["" : 21]>
    To <kind> (t) => (u) { u = Cast <to : int = @kind> (t) }
    """
    path = tmp_path / "m.onnx"
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    with pytest.raises(UnsupportedError, match="function attribute"):
        widen(io.load(path))
