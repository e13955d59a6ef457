"""ONNX Runtime as a runner: twins of 16-bit graphs, intermediate values, and one-line errors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from manifests import component, manifest

from mcpc.backends.ort import open_model, package_runners
from mcpc.backends.ort.twin import write_twin
from mcpc.core.runner import Array
from mcpc.errors import BadInputError, UnsupportedError
from mcpc.graph import io
from mcpc.graph.widen import widen

K, N = 64, 32
_RNG = np.random.default_rng(0)
WEIGHT = _RNG.standard_normal((K, N)).astype(np.float32)
X = _RNG.standard_normal((3, K)).astype(np.float32)


def linear(folder: Path, dtype: str = "float32") -> Path:
    """Write `y = relu(x @ w + b) * w[0]` with its weight in a file beside it, tied twice; return the ONNX file."""
    kind = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
    weight = WEIGHT.astype(kind[dtype])
    (folder / "w.bin").write_bytes(b"\0" * 24 + weight.tobytes())
    name = "float" if dtype == "float32" else dtype
    text = f"""
    <ir_version: 10, opset_import: ["" : 21]>
    g ({name}[rows, {K}] x) => ({name}[rows, {N}] y) {{
        zero = Constant <value = int64 {{0}}> ()
        product = MatMul (x, w)
        positive = Relu (product)
        row = Gather <axis = 0> (tied, zero)
        y = Mul (positive, row)
    }}"""
    model = ir.serde.deserialize_model(onnx.parser.parse_model(text))
    for value_name in ("w", "tied"):
        value = next(v for n in model.graph for v in n.inputs if v is not None and v.name == value_name)
        tensor = ir.ExternalTensor(
            "w.bin", 24, weight.nbytes, ir.serde.deserialize_tensor(onnx.numpy_helper.from_array(weight)).dtype,
            shape=ir.Shape([K, N]), name=value_name, base_dir=folder,
        )  # fmt: skip
        value.const_value, value.type, value.shape = tensor, ir.TensorType(tensor.dtype), ir.Shape([K, N])
        model.graph.register_initializer(value)
    io.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def expected(dtype: str) -> Array:
    kind = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    weight = WEIGHT.astype(kind).astype(np.float32)
    result: Array = np.maximum(X @ weight, 0) * weight[0]
    return result


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_runs_in_float32_and_leaves_nothing(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    runner = open_model(linear(tmp_path, dtype))
    assert list(temporary.iterdir()) == []  # gone already while the session lives
    result = runner.run({"x": X})["y"]
    assert result.dtype == np.float32
    assert np.abs(result - expected(dtype)).max() <= 2e-5


def test_a_float16_graph_as_it_is(tmp_path: Path) -> None:
    path = linear(tmp_path, "float16")
    result = open_model(path, twin=False).run({"x": X})["y"]
    assert result.dtype == np.float32
    error = np.abs(result - expected("float16")).max()
    assert 1e-4 < error <= 0.1  # rounded to 16 bits, unlike the twin


def test_a_bfloat16_graph_as_it_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError):
        open_model(linear(tmp_path, "bfloat16"), twin=False)


def test_shared_bytes_are_written_once(tmp_path: Path) -> None:
    model = io.load(linear(tmp_path, "bfloat16"))
    widen(model)
    folder = tmp_path / "twin"
    folder.mkdir()
    write_twin(model, folder)
    assert (folder / "weights.bin").stat().st_size == K * N * 4
    for value in io.all_initializers(model):
        assert value.const_value is not None
        np.testing.assert_array_equal(value.const_value.numpy(), WEIGHT.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_intermediate_values(dtype: str, tmp_path: Path) -> None:
    runner = open_model(linear(tmp_path, dtype), extra_outputs=["product", "y"])
    assert runner.outputs == ("y", "product")
    only = runner.run({"x": X}, ["product"])
    assert list(only) == ["product"]
    weight = WEIGHT if dtype == "float32" else WEIGHT.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.abs(only["product"] - X @ weight).max() <= 2e-5


def quantized(path: Path, size: int) -> Array:
    """Write a MatMul with an INT4 weight in blocks of 32 and float16 scales; return the weight as ONNX defines it."""
    codes = _RNG.integers(-7, 8, (size, N)).astype(ml_dtypes.int4)
    scales = _RNG.uniform(0.5, 1.5, (size // 32, N)).astype(np.float16)
    model = onnx.parser.parse_model(f"""
    <ir_version: 10, opset_import: ["" : 21]>
    g (float16[rows, {size}] x) => (float16[rows, {N}] y) {{
        w = DequantizeLinear <axis = 0, block_size = 32> (codes, scales)
        y = MatMul (x, w)
    }}""")
    packed = (codes.reshape(-1).view(np.uint8)[::2] & 15) | (codes.reshape(-1).view(np.uint8)[1::2] << 4)
    model.graph.initializer.append(
        onnx.TensorProto(name="codes", data_type=onnx.TensorProto.INT4, dims=codes.shape, raw_data=packed.tobytes())
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(scales, "scales"))
    path.write_bytes(model.SerializeToString())
    result: Array = codes.astype(np.float32) * scales.astype(np.float32).repeat(32, axis=0)
    return result


def test_int4_weights_at_accuracy_level_1(tmp_path: Path) -> None:
    """Level 1 keeps the activations in float32; at the default they become INT8, which the gates must not see."""
    size = 1024
    weight = quantized(tmp_path / "m.onnx", size)
    x = _RNG.standard_normal((1, size)).astype(np.float32)
    reference = x @ weight

    def error(level: int | None) -> float:
        actual = open_model(tmp_path / "m.onnx", accuracy_level=level).run({"x": x})["y"]
        return float(np.linalg.norm(actual - reference) / np.linalg.norm(reference))

    assert error(1) <= 1e-5
    assert error(None) > 1e-4


def test_without_optimizations(tmp_path: Path) -> None:
    runner = open_model(linear(tmp_path), optimize=False)
    assert np.abs(runner.run({"x": X})["y"] - expected("float32")).max() <= 2e-5


@pytest.mark.parametrize(
    ("feeds", "outputs", "text"),
    [
        ({}, None, "not those of the graph"),
        ({"x": X, "z": X}, None, "not those of the graph"),
        ({"x": X.astype(np.int64)}, None, "expected float32, got int64"),
        ({"x": X[0]}, None, "refuses the inputs"),
        ({"x": X[:, :5]}, None, "refuses the inputs"),
        ({"x": X}, ["q"], "no such output"),
    ],
)
def test_wrong_feeds(feeds: dict[str, Array], outputs: list[str] | None, text: str, tmp_path: Path) -> None:
    runner = open_model(linear(tmp_path))
    with pytest.raises(BadInputError, match=text) as caught:
        runner.run(feeds, outputs)
    assert "\n" not in str(caught.value)


def _truncate_weights(path: Path) -> None:
    weights = path.parent / "w.bin"
    weights.write_bytes(weights.read_bytes()[:-1])


def _misspell_op(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"Relu", b"Relo"))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize("damage", [_truncate_weights, _misspell_op, _cut, Path.unlink])
def test_a_damaged_file(damage: Callable[[Path], object], tmp_path: Path) -> None:
    path = linear(tmp_path)
    damage(path)
    with pytest.raises(BadInputError) as caught:
        open_model(path)
    assert "\n" not in str(caught.value)


def test_an_unknown_intermediate_value(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no such value"):
        open_model(linear(tmp_path), extra_outputs=["nothing"])


def test_package_runners_open_each_component_once(tmp_path: Path) -> None:
    linear(tmp_path)
    open_component = package_runners(tmp_path, manifest(components=[component("m"), component("absent")]))
    runner = open_component("m")
    assert open_component("m") is runner
    assert np.abs(runner.run({"x": X})["y"] - expected("float32")).max() <= 2e-5
    with pytest.raises(BadInputError, match="no such component"):
        open_component("n")
    with pytest.raises(BadInputError, match="no such file"):
        open_component("absent")
