"""ONNX Runtime makes a MatMulNBits of every quantized MatMul, and it computes what it should."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from quantize_graphs import INT4, INT8, fused_ops, gaussian, model_of, quantized

from mcpc.backends.ort import open_model
from mcpc.config.recipe import Recipe
from mcpc.core.runner import Array
from mcpc.graph import io
from mcpc.graph.functions import attach, vision_embed
from mcpc.passes.quantize.tables import DequantizeTables
from mcpc.verify.compare import Gate, compare, failures

#: Sums in another order and activations in float32: nothing else may differ from the float graph over the same weights.
EXACT = Gate(max_abs=2e-5)
BOTH = pytest.mark.parametrize("recipe", [INT4, INT8], ids=["int4", "int8"])

LINEARS = {
    "transposed": ("xt = Transpose <perm = [1, 0]> (w)\n y = MatMul (x, xt)", (48, 64)),
    "gemm, transB": ("y = Gemm <transB = 1> (x, w, b)", (48, 64)),
    "gemm, no bias": ("y = Gemm <transB = 1> (x, w)", (48, 64)),
    "gemm [K,N]": ("y = Gemm (x, w, b)", (64, 48)),
    "gemm, transposed": ("wt = Transpose <perm = [1, 0]> (w)\n y = Gemm (x, wt, b)", (48, 64)),
    "matmul [K,N]": ("y = MatMul (x, w)", (64, 48)),
    "odd width": ("wt = Transpose <perm = [1, 0]> (w)\n y = MatMul (x, wt)", (411, 64)),
    "odd width, gemm": ("y = Gemm <transB = 1> (x, w, b)", (33, 64)),
    "one column": ("y = MatMul (x, w)", (1024, 1)),
}


def bias_of(body: str, shape: tuple[int, ...]) -> dict[str, Array]:
    width = shape[0] if "transB" in body or "wt" in body else shape[1]
    return {"b": gaussian(width, seed=9)} if ", b)" in body else {}


def linear(body: str, shape: tuple[int, int], tail: str = "") -> ir.Model:
    depth = shape[1] if "transB" in body or "perm" in body else shape[0]
    weights = {"w": gaussian(*shape), **bias_of(body, shape)}
    declared = "".join(f", float[{','.join(map(str, value.shape))}] {name}" for name, value in weights.items())
    last = "z" if tail else "y"
    return model_of(f"g (float[rows,{depth}] x{declared}) => (float[rows,n] {last}) {{ {body} {tail} }}", **weights)


def run(path: Path, **feeds: Array) -> dict[str, Array]:
    return open_model(path, accuracy_level=1).run(feeds)


def assert_close(actual: Array, expected: Array, gate: Gate) -> None:
    assert not failures(compare(actual, expected), gate)


@BOTH
@pytest.mark.parametrize("name", list(LINEARS))
@pytest.mark.parametrize(
    "tail", ["", "r = Relu (y)\n z = Neg (r)", "r = Gelu (y)\n z = Neg (r)"], ids=["", "relu", "gelu"]
)
def test_every_linear_form_is_fused(name: str, tail: str, recipe: Recipe, tmp_path: Path) -> None:
    body, shape = LINEARS[name]
    model = linear(body, shape, tail)
    io.save(model, tmp_path / "float.onnx")
    path, plan = quantized(model, recipe, tmp_path)
    assert [str(decision.form)[:4] for decision in plan if decision.form] == [recipe.steps[1].pass_id[-4:]]
    ops = fused_ops(path)
    assert ops["MatMulNBits"] == 1
    assert not ops.keys() & {"MatMul", "Gemm", "FusedGemm", "FusedMatMul", "DequantizeLinear"}
    x = np.random.default_rng(1).standard_normal(
        (5, shape[1] if "transB" in body or "perm" in body else shape[0]), np.float32
    )
    expected = run(tmp_path / "float.onnx", x=x)
    actual = run(path, x=x)
    for output, value in expected.items():
        assert actual[output].shape == value.shape
        assert_close(actual[output], value, Gate(cosine=0.99))


@BOTH
@pytest.mark.parametrize("rank", [1, 2, 3, 4])
@pytest.mark.parametrize("after", ["Relu", "Clip", "Sigmoid", "Add", "Add Relu", "Add Clip", "Mul"])
def test_what_follows_a_linear_does_not_unfuse_it(rank: int, after: str, recipe: Recipe, tmp_path: Path) -> None:
    dims = ",".join(["a", "b", "c", "64"][-rank:])
    lines, last = ["t0 = MatMul (x, w)"], "t0"
    for number, op in enumerate(after.split(), 1):
        lines.append(f"t{number} = {op} ({last}{', b' if op in ('Add', 'Mul') else ''})")
        last = f"t{number}"
    head = f"g (float[{dims}] x, float[64,64] w, float[64] b) => (float[{dims}] y)"
    model = model_of(f"{head} {{ {' '.join(lines)} y = Neg ({last}) }}", w=gaussian(64, 64), b=gaussian(64, seed=9))
    io.save(model, tmp_path / "float.onnx")
    path, _ = quantized(model, recipe, tmp_path)
    assert fused_ops(path)["MatMulNBits"] == 1
    x = np.random.default_rng(1).standard_normal([2, 3, 4, 64][-rank:]).astype(np.float32)
    expected = run(tmp_path / "float.onnx", x=x)["y"]
    assert_close(run(path, x=x)["y"], expected, Gate(cosine=0.99))


@BOTH
def test_the_quantized_graph_computes_with_the_dequantized_weights(recipe: Recipe, tmp_path: Path) -> None:
    model = linear(*LINEARS["odd width, gemm"])
    path, _ = quantized(model, recipe, tmp_path)
    (dequantize,) = (node for node in model.graph if node.op_type == "DequantizeLinear")
    integers, scale = (value.const_value.numpy().astype(np.float32) for value in dequantize.inputs)  # type: ignore[union-attr]
    wide = integers * (np.repeat(scale, 32, axis=0) if scale.ndim == 2 else scale)
    x = np.random.default_rng(2).standard_normal((4, 64), np.float32)
    assert_close(run(path, x=x)["y"], x @ wide[:, :33] + gaussian(33, seed=9), EXACT)


@BOTH
def test_weights_in_constant_nodes_are_quantized(recipe: Recipe, tmp_path: Path) -> None:
    model = model_of(
        "g (float[b,s,64] x, float[64,48] w) => (float[b,s,48] y) { y = MatMul (x, w) }", w=gaussian(64, 48)
    )
    weight = model.graph.initializers.pop("w")
    constant = ir.Node(
        "", "Constant", [], [ir.AttrTensor("value", ir.Tensor(gaussian(64, 48), name="w"))], num_outputs=1, name="c"
    )
    constant.outputs[0].name = "w"
    model.graph.insert_before(next(iter(model.graph)), constant)
    ir.convenience.replace_all_uses_with(weight, constant.outputs[0])
    path, plan = quantized(model, recipe, tmp_path)
    assert plan[0].form is not None
    assert fused_ops(path) == {"MatMulNBits": 1}
    assert "Constant" not in {node.op_type for node in model.graph}


@BOTH
def test_one_weight_of_two_layers_is_stored_once_and_fused_twice(recipe: Recipe, tmp_path: Path) -> None:
    body = """g (float[b,s,64] x, float[64,64] w) => (float[b,s,64] y) {
        h = MatMul (x, w)
        r = Relu (h)
        y = MatMul (r, w) }"""
    model = model_of(body, w=gaussian(64, 64))
    path, _ = quantized(model, recipe, tmp_path)
    assert fused_ops(path)["MatMulNBits"] == 2
    stored = [value.const_value for value in io.all_initializers(model)]
    spans = {(tensor.offset, tensor.length) for tensor in stored if isinstance(tensor, ir.ExternalTensor)}
    assert len(spans) == 2, "one span of integers, one of scales"


def test_a_head_tied_to_the_table_reads_the_same_bytes(tmp_path: Path) -> None:
    body = """g (int64[b,s] ids, float[101,64] w) => (float[b,s,64] e, float[b,s,101] y) {
        e = Gather (w, ids)
        wt = Transpose <perm = [1, 0]> (w)
        y = MatMul (e, wt) }"""
    model = model_of(body, w=gaussian(101, 64))
    io.save(model, tmp_path / "float.onnx")
    path, plan = quantized(model, INT4, tmp_path)
    assert str(plan[0].form) == "int8 per row and column, table and head"
    ops = fused_ops(path)
    assert ops["MatMulNBits"] == 1
    assert not ops.keys() & {"MatMul", "DequantizeLinear"}
    sizes = [value.const_value.offset for value in io.all_initializers(model) if value.dtype == ir.DataType.INT8]  # type: ignore[union-attr]
    assert len(sizes) == 2
    assert len(set(sizes)) == 1
    ids = np.arange(12).reshape(3, 4) * 9
    expected, actual = run(tmp_path / "float.onnx", ids=ids), run(path, ids=ids)
    for name, value in expected.items():
        assert_close(actual[name], value, Gate(cosine=0.9999))


def test_a_step_widens_only_the_rows_it_gathers(tmp_path: Path) -> None:
    model = model_of(
        "g (int64[b] ids, float[300,64] w) => (float[b,64] y) { y = Gather (w, ids) }", w=gaussian(300, 64)
    )
    path, _ = quantized(model, INT8, tmp_path)
    assert "DequantizeLinear" not in fused_ops(path)
    widened = [value for node in model.graph for value in node.outputs if value.dtype == ir.DataType.FLOAT]
    assert all(value.shape is not None and 300 not in value.shape for value in widened)


def vision_embed_model() -> ir.Model:
    body = """g (int64[b,s] ids, float[40,64] table, float[n,64] features, int32[b,s] pos_map) => (float[b,s,64] y) {
        y = mcpc.VisionEmbed (ids, table, features, pos_map) }"""
    model = model_of(body, table=gaussian(40, 64))
    attach(model, vision_embed())
    return model


@pytest.mark.parametrize("images", [0, 3])
def test_vision_embed_reads_int8_rows(images: int, tmp_path: Path) -> None:
    model = vision_embed_model()
    io.save(model, tmp_path / "float.onnx")
    path, _ = quantized(model, INT4, tmp_path)
    assert [function.name for function in model.functions.values()] == ["VisionEmbedInt8"]
    feeds = {
        "ids": np.arange(10).reshape(2, 5) * 4,
        "features": gaussian(images, 64, seed=3),
        "pos_map": np.array([[-1, 0, 1, 2, -1], [-1, -1, -1, 2, 0]], np.int32)
        if images
        else np.full((2, 5), -1, np.int32),
    }
    expected, actual = run(tmp_path / "float.onnx", **feeds)["y"], run(path, **feeds)["y"]
    assert_close(actual, expected, Gate(cosine=0.9999))
    if images:
        assert np.array_equal(actual[0, 1:4], feeds["features"]), "features pass unchanged"


@pytest.mark.parametrize("kind", ["gather", "vision_embed"])
def test_the_lowering_of_tables_changes_no_bit(kind: str, tmp_path: Path) -> None:
    if kind == "gather":
        body = "g (int64[b,s] ids, float[40,64] w) => (float[b,s,64] y) { y = Gather (w, ids) }"
        model = model_of(body, w=gaussian(40, 64))
    else:
        model = vision_embed_model()
    path, _ = quantized(model, INT8, tmp_path)
    lowered = io.load(path)
    assert DequantizeTables(None)(lowered).modified
    io.save(lowered, tmp_path / "lowered.onnx")
    io.check(tmp_path / "lowered.onnx")
    feeds: dict[str, Array] = {"ids": np.arange(10).reshape(2, 5) * 4}
    if kind == "vision_embed":
        feeds |= {"features": gaussian(2, 64, seed=3), "pos_map": np.array([[-1, 0, 1, -1, -1]] * 2, np.int32)}
    outputs = [open_model(file, optimize=False).run(feeds)["y"] for file in (path, tmp_path / "lowered.onnx")]
    assert np.array_equal(outputs[0], outputs[1])
    users = {
        use.node.op_type
        for value in io.all_initializers(lowered)
        if value.dtype == ir.DataType.INT8
        for use in value.uses()
    }
    assert users == {"DequantizeLinear"}, "TensorRT takes INT8 constants nowhere else"
