"""Lowering: casts, islands, limits and ranges, executed on ONNX Runtime where numbers matter."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from trt_graphs import BF16, FLOAT, HALF, constant, linear, model, packed_linear, saved, step, value

from mcpc.backends.ort import open_model
from mcpc.backends.trt.lowering import lower, open_flat
from mcpc.backends.trt.padding import pad_columns
from mcpc.backends.trt.ranges import mask_values
from mcpc.backends.trt.stream import write_lowered
from mcpc.errors import UnsupportedError
from mcpc.graph import io
from mcpc.graph.io import NAME_SCOPES
from mcpc.storage.safetensors import read_header
from mcpc.verify.cases import Case
from mcpc.workflows.engine_checks import beyond_float16


def dtypes(made: ir.Model) -> dict[str, ir.DataType | None]:
    values = [*made.graph.inputs, *(output for node in made.graph for output in node.outputs)]
    return {str(item.name): item.dtype for item in values}


def norm(path: Path, scopes: bool) -> Path:
    """Write an RMS norm behind a MatMul, with or without the module it came from."""
    x = value("x", FLOAT, ["batch", 8])
    h = step("MatMul", [x, constant("w", np.eye(8, dtype=np.float32))], "h", shape=["batch", 8])
    square = step("Pow", [h, constant("two", np.float32(2))], "square", shape=["batch", 8])
    mean = step("ReduceMean", [square, constant("axis", np.array([-1]))], "mean", shape=["batch", 1])
    shifted = step("Add", [mean, constant("epsilon", np.float32(1e-6))], "shifted", shape=["batch", 1])
    root = step("Sqrt", [shifted], "root", shape=["batch", 1])
    inverse = step("Reciprocal", [root], "inverse", shape=["batch", 1])
    scaled = step("Mul", [h, inverse], "scaled", shape=["batch", 8])
    y = step("Mul", [scaled, constant("weight", np.full(8, 2, np.float32))], "y", shape=["batch", 8])
    made = model([x], [y])
    if scopes:
        for node in made.graph:
            owner = "layers.0.proj" if node.op_type == "MatMul" else "layers.0.input_layernorm"
            node.metadata_props[NAME_SCOPES] = repr(["", owner, node.name])
    return saved(made, path)


@pytest.mark.parametrize("scopes", [True, False])
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_norm_stays_float32_between_casts(tmp_path: Path, scopes: bool, precision: str) -> None:
    lowered = lower(open_flat(norm(tmp_path / "m.onnx", scopes)), precision)
    found = dtypes(lowered.model)
    narrow = io.dtype_of(precision)
    assert all(found[name] == FLOAT for name in ("square", "mean", "shifted", "root", "inverse"))
    assert found["x"] == found["h"] == found["y"] == narrow
    assert lowered.model.graph.outputs[0].name == "y"
    assert lowered.casts == 2


def test_a_norm_of_large_values_survives_float16(tmp_path: Path) -> None:
    path = norm(tmp_path / "m.onnx", scopes=True)
    graph = write_lowered(lower(open_flat(path), "float16").model, tmp_path)
    feeds = {"x": np.full((2, 8), 3000.0, np.float32)}  # its square is beyond float16
    assert np.array_equal(open_model(graph, twin=False, optimize=False).run(feeds)["y"], np.full((2, 8), 2.0))


def test_keep_changes_no_dtype_and_float32_widens(tmp_path: Path) -> None:
    path = linear(tmp_path / "m.onnx")
    kept = lower(open_flat(path), "keep")
    assert (kept.precision, kept.casts, set(dtypes(kept.model).values())) == ("float32", 0, {FLOAT})
    narrow = write_lowered(lower(open_flat(path), "bfloat16").model, tmp_path)
    assert set(dtypes(open_flat(narrow)).values()) == {BF16}
    wide = lower(open_flat(narrow), "float32")
    assert (wide.precision, set(dtypes(wide.model).values())) == ("float32", {FLOAT})


def test_weights_are_streamed_in_the_dtype_of_the_engine(tmp_path: Path) -> None:
    lowered = lower(open_flat(linear(tmp_path / "m.onnx")), "float16")
    write_lowered(lowered.model, tmp_path)
    (entry,) = read_header(tmp_path / "model.safetensors").values()
    assert (entry.dtype, entry.shape) == ("float16", (64, 64))
    original = io.load(tmp_path / "m.onnx").graph.initializers["w"].const_value
    assert original is not None
    assert np.array_equal(entry.read(), original.numpy().astype(np.float16))


def test_scales_of_packed_weights_take_the_dtype_of_the_activation(tmp_path: Path) -> None:
    made, _ = packed_linear()
    lowered = lower(open_flat(saved(made, tmp_path / "m.onnx")), "bfloat16")
    node = next(node for node in lowered.model.graph if node.op_type == "DequantizeLinear")
    data, scale = node.inputs
    assert data is not None and scale is not None
    assert (data.dtype, scale.dtype, node.outputs[0].dtype) == (ir.DataType.INT4, BF16, BF16)
    graph = write_lowered(lowered.model, tmp_path)
    assert open_flat(graph).graph.initializers["w_int4"].const_value.tobytes() == data.const_value.tobytes()  # type: ignore[union-attr]


@pytest.mark.parametrize(("precision", "limit"), [("float16", 65504.0), ("bfloat16", 3.3895313892515355e38)])
def test_a_mask_constant_is_limited(tmp_path: Path, precision: str, limit: float) -> None:
    x = value("x", FLOAT, ["batch", 4])
    allowed = value("allowed", FLOAT, ["batch", 4])
    lowest = constant("lowest", np.array(np.finfo(np.float32).min))
    mask = step("Mul", [allowed, lowest], "mask", shape=["batch", 4])
    scores = step("Add", [x, mask], "scores", shape=["batch", 4])
    y = step("Softmax", [scores], "y", shape=["batch", 4], attributes={"axis": -1})
    lowered = lower(open_flat(saved(model([x, allowed], [y]), tmp_path / "m.onnx")), precision)
    assert lowered.clamped == ("lowest",)
    name = f"lowest.{precision}"
    tensor = lowered.model.graph.initializers[name].const_value
    assert tensor is not None
    assert float(tensor.numpy().astype(np.float64)) == -limit
    assert mask_values(lowered.model) == {name, "mask", "scores"}


def test_a_weight_beyond_float16_keeps_its_node_float32(tmp_path: Path) -> None:
    path = linear(tmp_path / "m.onnx", scale=1e5)
    lowered = lower(open_flat(path), "float16")
    assert len(lowered.kept) == 1
    assert lowered.kept[0].startswith("w: it holds ")
    assert "product_node" in lowered.wide
    assert lowered.model.graph.initializers["w"].dtype == FLOAT
    assert lower(open_flat(path), "bfloat16").kept == ()


def overflowing(path: Path, at_output: bool) -> Path:
    """Write a graph whose inner value is 1000 times its input, and its output a thousandth of that."""
    x = value("x", FLOAT, ["batch", 8])
    large = step("Mul", [x, constant("thousand", np.float32(1000))], "large", shape=["batch", 8])
    y = step("Mul", [large, constant("thousandth", np.float32(0.001))], "y", shape=["batch", 8])
    return saved(model([x], [large if at_output else y]), path)


def test_a_value_that_leaves_the_range_is_found_and_kept_float32(tmp_path: Path) -> None:
    path = overflowing(tmp_path / "m.onnx", at_output=False)
    case = Case("m", "large", {"x": np.full((2, 8), 100.0, np.float32)})
    lowered = lower(open_flat(path), "float16")
    graph = write_lowered(lowered.model, tmp_path)
    found = beyond_float16(graph, [case])
    assert found == {"large"}
    again = lower(open_flat(path), "float16", found)
    assert dtypes(again.model)["large"] == FLOAT
    assert again.kept == ("large: its values leave the float16 range",)
    graph = write_lowered(again.model, tmp_path)
    assert beyond_float16(graph, [case]) == frozenset()
    y = open_model(graph, twin=False, optimize=False).run(case.feeds)["y"]
    assert np.abs(y - 100.0).max() < 0.1


def test_an_output_that_leaves_the_range_is_refused(tmp_path: Path) -> None:
    path = overflowing(tmp_path / "m.onnx", at_output=True)
    with pytest.raises(UnsupportedError, match="graph input or output cannot be float16") as caught:
        lower(open_flat(path), "float16", frozenset({"large"}))
    assert caught.value.hint == "--precision bfloat16"


def test_rotary_angles_stay_float32_from_the_positions_on(tmp_path: Path) -> None:
    positions = value("positions", ir.DataType.INT64, ["sequence", 1])
    as_float = step("Cast", [positions], "as_float", shape=["sequence", 1], attributes={"to": int(FLOAT)})
    angles = step("Mul", [as_float, constant("frequency", np.ones(4, np.float32))], "angles", shape=["sequence", 4])
    cosine = step("Cos", [angles], "cosine", shape=["sequence", 4])
    x = value("x", FLOAT, ["sequence", 4])
    y = step("Mul", [x, cosine], "y", shape=["sequence", 4])
    lowered = lower(open_flat(saved(model([positions, x], [y]), tmp_path / "m.onnx")), "bfloat16")
    found = dtypes(lowered.model)
    assert found["as_float"] == found["angles"] == found["cosine"] == FLOAT
    assert found["y"] == BF16


def test_a_16_bit_source_keeps_what_its_authors_compute_in_float32(tmp_path: Path) -> None:
    x = value("x", BF16, ["batch", 4])
    wide = step("Cast", [x], "wide", FLOAT, ["batch", 4], {"to": int(FLOAT)})
    soft = step("Softmax", [wide], "soft", FLOAT, ["batch", 4], {"axis": -1})
    y = step("Cast", [soft], "y", BF16, ["batch", 4], {"to": int(BF16)})
    lowered = lower(open_flat(saved(model([x], [y]), tmp_path / "m.onnx")), "float16")
    assert dtypes(lowered.model) == {"x": HALF, "wide": FLOAT, "soft": FLOAT, "y": HALF}
    assert [node.attributes["to"].as_int() for node in lowered.model.graph if node.op_type == "Cast"] == [FLOAT, HALF]


def test_the_cast_of_a_weight_is_folded(tmp_path: Path) -> None:
    x = value("x", FLOAT, ["batch", 4])
    stored = constant("w", np.arange(16, dtype=np.float32).reshape(4, 4).astype(ml_dtypes.bfloat16))
    wide = step("Cast", [stored], "wide", shape=[4, 4], attributes={"to": int(FLOAT)})
    y = step("MatMul", [x, wide], "y", shape=["batch", 4])
    path = saved(model([x], [y]), tmp_path / "m.onnx")
    for precision, dtype in (("keep", FLOAT), ("bfloat16", BF16), ("float16", HALF)):
        lowered = lower(open_flat(path), precision)
        assert [node.op_type for node in lowered.model.graph] == ["MatMul"]
        assert [item.dtype for item in lowered.model.graph.initializers.values()] == [dtype]


@pytest.mark.parametrize(("columns", "padded"), [(63, ("w_int4",)), (64, ())])
def test_odd_columns_of_a_packed_weight_are_padded(tmp_path: Path, columns: int, padded: tuple[str, ...]) -> None:
    path = saved(packed_linear(columns=columns)[0], tmp_path / "m.onnx")
    made = open_flat(path)
    assert pad_columns(made, 2) == padded
    assert made.graph.outputs[0].name == "y"
    weight = next(node.inputs[0] for node in made.graph if node.op_type == "DequantizeLinear")
    assert weight is not None and weight.shape is not None
    assert weight.shape.numpy() == (64, 64)
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 3, 64)).astype(np.float32)}
    (tmp_path / "padded").mkdir()
    y = open_model(write_lowered(made, tmp_path / "padded"), optimize=False).run(feeds)["y"]
    assert np.array_equal(y, open_model(path, optimize=False).run(feeds)["y"])


def test_a_mask_and_an_empty_value_do_not_count_as_overflow(tmp_path: Path) -> None:
    x = value("x", FLOAT, ["batch", 4])
    allowed = value("allowed", FLOAT, ["batch", 4])
    mask = step("Mul", [allowed, constant("lowest", np.array(np.finfo(np.float32).min))], "mask", shape=["batch", 4])
    scores = step("Sub", [mask, x], "scores", shape=["batch", 4])
    y = step("Softmax", [scores], "y", shape=["batch", 4], attributes={"axis": -1})
    lowered = lower(open_flat(saved(model([x, allowed], [y]), tmp_path / "m.onnx")), "float16")
    graph = write_lowered(lowered.model, tmp_path)
    feeds = {"x": np.full((2, 4), 100, np.float32), "allowed": np.eye(2, 4, dtype=np.float32)}
    empty = {name: array[:0] for name, array in feeds.items()}
    assert beyond_float16(graph, [Case("m", "masked", feeds), Case("m", "empty", empty)]) == frozenset()
    above = {"x": np.full((2, 4), -1e5, np.float32), "allowed": feeds["allowed"]}
    assert beyond_float16(graph, [Case("m", "above", above)]) == {"scores"}
