"""The preflight check: every refusal by its text, with the node's name, and all of them at once."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from trt_graphs import FLOAT, HALF, constant, model, packed_linear, step, value

from mcpc.backends.trt.check import check_graph
from mcpc.config.target import Runtime, load_runtime, load_target, target_names
from mcpc.errors import UnsupportedError


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return load_runtime("tensorrt-rtx")


def texts(made: ir.Model, runtime: Runtime) -> list[str]:
    return [str(problem) for problem in check_graph(made, runtime, "part")]


def test_every_target_is_valid_and_names_a_runtime() -> None:
    assert target_names() == ["rtx", "rtx-sm120", "rtx-sm86", "rtx-sm89"]
    for name in target_names():
        target = load_target(name)
        assert target.name == name
        assert load_runtime(target.runtime).op_dtypes
    assert load_target("rtx").compute_capabilities == ("SM86", "SM89", "SM120")


def test_an_unknown_target_lists_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match="unknown target") as caught:
        load_target("h100")
    assert caught.value.where == "h100"
    assert "rtx-sm89" in caught.value.expected


def test_a_good_graph_has_no_problems(runtime: Runtime) -> None:
    made, _ = packed_linear()
    assert texts(made, runtime) == []


def test_an_op_of_another_domain(runtime: Runtime) -> None:
    x = value("x", FLOAT, ["batch", 8])
    y = step("MatMulNBits", [x], "y", shape=["batch", 8], domain="com.microsoft")
    (problem,) = texts(model([x], [y], **{"com.microsoft": 1}), runtime)
    assert "part: node y_node [MatMulNBits]" in problem
    assert "com.microsoft" in problem


def test_unsupported_ops_say_why(runtime: Runtime) -> None:
    x = value("x", FLOAT, ["batch", 8])
    found = step("NonZero", [x], "found", ir.DataType.INT64, [2, "n"])
    (problem,) = texts(model([x], [found]), runtime)
    assert problem == "part: node found_node [NonZero]: unsupported op: its output size depends on the data [op]"
    x = value("x", FLOAT, ["batch", 8])
    y = step("Bernoulli", [x], "y", shape=["batch", 8])
    assert texts(model([x], [y]), runtime) == ["part: node y_node [Bernoulli]: unsupported op [op]"]


@pytest.mark.parametrize("opset", [12, 25, 99])
def test_an_opset_that_the_parser_would_read_wrongly(runtime: Runtime, opset: int) -> None:
    x = value("x", FLOAT, ["batch", 8])
    (problem,) = texts(model([x], [step("Relu", [x], "y", shape=["batch", 8])], opset), runtime)
    assert problem == f"part: unsupported opset (expected 13 to 24, got {opset}) [opset]"


@pytest.mark.parametrize("dtype", [ir.DataType.DOUBLE, ir.DataType.UINT8, ir.DataType.INT16])
def test_a_dtype_that_the_runtime_narrows_or_refuses(runtime: Runtime, dtype: ir.DataType) -> None:
    x = value("x", dtype, [4])
    y = step("Identity", [x], "y", dtype, [4])
    found = texts(model([x], [y]), runtime)
    assert [text.split(":")[1].split()[0] for text in found] == ["input", "output", "node"]
    assert all("unsupported dtype" in text for text in found)


def test_attention_takes_no_float32(runtime: Runtime) -> None:
    def attention(dtype: ir.DataType, **attributes: float) -> ir.Model:
        q, k, v = (value(name, dtype, [1, 2, 16, 64]) for name in "qkv")
        return model([q, k, v], [step("Attention", [q, k, v], "y", dtype, [1, 2, 16, 64], attributes)], 23)

    assert texts(attention(HALF), runtime) == []
    assert any("got float32" in text for text in texts(attention(FLOAT), runtime))
    assert any("softcap is not supported" in text for text in texts(attention(HALF, softcap=30.0), runtime))


def test_a_zero_point_must_be_zero(runtime: Runtime) -> None:
    zero, name = packed_linear(zero_point=0)
    assert texts(zero, runtime) == []
    made, _ = packed_linear(zero_point=3)
    (problem,) = texts(made, runtime)
    assert problem.startswith(f"part: node {name} [DequantizeLinear], w_zero: non-zero zero point")
    assert "128 of 128 not zero, such as 3" in problem


@pytest.mark.parametrize(
    ("rows", "columns", "block", "text"),
    [
        (80, 64, 32, "partial INT4 block (expected a multiple of 32 along axis 0, got 80)"),
        (64, 64, 16, "unsupported INT4 block size (expected 32, 64, 128, got 16)"),
        (64, 63, 32, "widened at every run (expected columns in multiples of 2, got 63)"),
    ],
)
def test_int4_blocks(runtime: Runtime, rows: int, columns: int, block: int, text: str) -> None:
    made, name = packed_linear(rows, columns, block)
    (problem,) = texts(made, runtime)
    assert f"node {name} [DequantizeLinear], w_int4" in problem
    assert text in problem


def test_an_int8_constant_must_be_dequantized_first(runtime: Runtime) -> None:
    ids = value("ids", ir.DataType.INT64, ["batch"])
    rows = step("Gather", [constant("table", np.ones((4, 8), np.int8)), ids], "rows", ir.DataType.INT8, ["batch", 8])
    found = texts(model([ids], [rows]), runtime)
    place = "part: node rows_node [Gather], table"
    assert found == [
        f"{place}: a packed constant that is not dequantized first (expected DequantizeLinear, got Gather) [packed]"
    ]


@pytest.mark.parametrize(
    ("op", "attributes", "text"),
    [
        ("ScatterND", {"reduction": "add"}, "the attribute reduction is not supported (expected none, got add)"),
        ("Resize", {"antialias": 1}, "the attribute antialias is not supported (expected 0, got 1)"),
    ],
)
def test_attributes(runtime: Runtime, op: str, attributes: dict[str, int | str], text: str) -> None:
    x = value("x", FLOAT, [1, 2, 4, 4])
    found = texts(model([x], [step(op, [x], "y", shape=[1, 2, 4, 4], attributes=attributes)]), runtime)
    assert any(text in problem for problem in found)


def test_all_problems_come_at_once(runtime: Runtime) -> None:
    x = value("x", FLOAT, ["batch", 8])
    first = step("BitShift", [x], "first", shape=["batch", 8])
    second = step("Det", [first], "second", shape=["batch", 8])
    third = step("Conv2", [second], "third", shape=["batch", 8], domain="vendor")
    found = texts(model([x], [third], 99, vendor=1), runtime)
    assert len(found) == 4
