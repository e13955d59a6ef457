"""Rewrites of traced graphs: what they leave alone and why, and convolutions that take a normalization in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from mcpc.backends.ort import open_model
from mcpc.checkpoint import Checkpoint
from mcpc.core.passes import PassResult
from mcpc.core.runner import Array
from mcpc.graph import io
from mcpc.graph.hide import unbound
from mcpc.passes.registry import REWRITES
from mcpc.passes.rewrite.batch_norm import Fold, fold_weights
from mcpc.storage.safetensors import Plan, read_header, write_stream
from mcpc.verify.compare import Gate, compare, failures

#: Float32 sums in another order.
GATE = Gate(max_abs=1e-5)


def graph(body: str, **integers: list[int]) -> ir.Model:
    inputs = "".join(f", int64[{len(values)}] {name}" for name, values in integers.items())
    head = f"g (float[b,3,4] x, int64[k] s{inputs}) => (float[o0] y)"
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\n{head} {{ {body} }}')
    for value in list(model.graph.inputs):
        if value.name in integers:
            model.graph.inputs.remove(value)
            value.const_value = ir.Tensor(np.array(integers[value.name], np.int64), name=value.name)
            model.graph.register_initializer(value)
    return model


LEFT_ALONE = {
    "a permutation that is not given": (
        "join-transposes",
        graph("a = Transpose (x) y = Transpose <perm = [1, 0, 2]> (a)"),
        "a permutation is not given",
    ),
    "turned twice, the first shared": (
        "join-transposes",
        graph("a = Transpose <perm = [1, 0, 2]> (x) y = Transpose <perm = [0, 2, 1]> (a) n = Neg (a)"),
        "used elsewhere",
    ),
    "cancelled at the graph's end": (
        "join-transposes",
        graph("a = Transpose <perm = [1, 0, 2]> (x) y = Transpose <perm = [1, 0, 2]> (a)"),
        "an output of the graph",
    ),
    "a computed shape": (
        "join-reshapes",
        graph("a = Reshape (x, t) y = Reshape (a, s)", t=[-1]),
        "not constant",
    ),
    "a shape that copies": (
        "join-reshapes",
        graph("a = Reshape (x, t) y = Reshape (a, u)", t=[3, -1], u=[0, -1]),
        "has a 0",
    ),
    "a shared reshape": (
        "join-reshapes",
        graph("a = Reshape (x, t) y = Reshape (a, u) n = Neg (a)", t=[3, -1], u=[-1]),
        "used elsewhere",
    ),
    "a squeeze of whatever is 1": (
        "join-squeezes",
        graph("a = Unsqueeze (x, t) b = Squeeze (a) y = Neg (b)", t=[1]),
        "not constant",
    ),
    "other axes": (
        "join-squeezes",
        graph("a = Unsqueeze (x, t) b = Squeeze (a, u) y = Neg (b)", t=[1], u=[0]),
        "the axes differ",
    ),
    "axes from the end": (
        "join-squeezes",
        graph("a = Unsqueeze (x, t) y = Unsqueeze (a, u)", t=[-1], u=[0]),
        "from the end",
    ),
    "a shared unsqueeze": (
        "join-squeezes",
        graph("a = Unsqueeze (x, t) y = Unsqueeze (a, u) n = Neg (a)", t=[1], u=[0]),
        "used elsewhere",
    ),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_what_cannot_be_proved_is_left_alone(case: str) -> None:
    name, model, reason = LEFT_ALONE[case]
    before = io.serialize(model)
    result = REWRITES[name](None)(model)
    assert not result.modified
    assert io.serialize(model) == before
    assert [reason in skip.reason for skip in result.skips] == [True], result.skips


WEIGHTS: dict[str, tuple[int, ...]] = {
    "conv.weight": (6, 2, 3), "conv.bias": (6,), "norm.weight": (6,), "norm.bias": (6,), "norm.mean": (6,),
    "norm.variance": (6,),
}  # fmt: skip
NORM = "BatchNormalization <epsilon = 0.01> (a, norm_weight, norm_bias, norm_mean, norm_variance)"


def conv_norm(body: str) -> ir.Model:
    """Return a graph of a grouped convolution and a normalization, its weights waiting for their bytes."""
    inputs = ", ".join(
        f"float[{','.join(map(str, shape))}] {name.replace('.', '_')}" for name, shape in WEIGHTS.items()
    )
    text = f'<ir_version: 10, opset_import: ["" : 21]>\ng (float[b,4,t] x, {inputs}) => (float[b,6,u] y) {{ {body} }}'
    model = ir.from_onnx_text(text)
    for value in list(model.graph.inputs):
        if value.name != "x":
            model.graph.inputs.remove(value)
            value.const_value = unbound(value)
            model.graph.register_initializer(value)
    return model


@pytest.fixture
def stored(tmp_path: Path) -> Checkpoint:
    """The weights on disk; a variance is positive."""
    random = np.random.default_rng(4)
    arrays = [random.standard_normal(shape).astype(np.float32) for shape in WEIGHTS.values()]
    arrays[-1] = np.abs(arrays[-1]) + 0.05
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        write_stream(file, [Plan(name, "float32", shape) for name, shape in WEIGHTS.items()], arrays)
    return Checkpoint(tmp_path, {}, (path.name,), read_header(path))


SOURCE = {name.replace(".", "_"): name for name in WEIGHTS}


def run(model: ir.Model, values: dict[str, Array], path: Path) -> Array:
    for name, value in model.graph.initializers.items():
        value.const_value = ir.Tensor(values[name], name=name)
    io.save(model, path)
    feeds = {"x": np.random.default_rng(5).standard_normal((2, 4, 9)).astype(np.float32)}
    return open_model(path, optimize=False).run(feeds)["y"]


def folded(model: ir.Model, checkpoint: Checkpoint) -> tuple[PassResult, dict[str, Array]]:
    """Fold, and return what the pass said and the weights that it wants."""
    result = REWRITES["fold-batch-norm"](None)(model)
    values: dict[str, Array] = {}
    for fold in result.details["folds"]:
        assert isinstance(fold, Fold)
        for name, made in fold_weights(fold, checkpoint, SOURCE).items():
            whole = Checkpoint(checkpoint.root, {}, checkpoint.files, checkpoint.tensors, made={made.name: made})
            values[name] = np.concatenate(list(whole.pieces(made.name))).reshape(made.value.shape)
            assert made.dtype == "float32" and "norm.variance" in made.sources
    return result, values


@pytest.mark.parametrize("bias", ["", ", conv_bias"])
def test_a_convolution_takes_its_normalization_in(bias: str, stored: Checkpoint, tmp_path: Path) -> None:
    body = f"a = Conv <group = 2> (x, conv_weight{bias}) n = {NORM} y = Relu (n)"
    original = {name: stored.tensors[key].read() for name, key in SOURCE.items()}
    unused = conv_norm(body)
    if not bias:
        del unused.graph.initializers["conv_bias"]
    expected = run(unused, original, tmp_path / "before.onnx")
    model = conv_norm(body)
    model.graph.initializers.pop("conv_bias") if not bias else None
    result, values = folded(model, stored)
    assert [node.op_type for node in model.graph] == ["Conv", "Relu"]
    assert result.modified and (result.details["nodes_before"], result.details["nodes_after"]) == (3, 2)
    assert set(model.graph.initializers) == set(values), "an old weight is left over"
    actual = run(model, values, tmp_path / "after.onnx")
    assert not failures(compare(actual, expected), GATE)
    for name in values:
        wrong = {**values, name: values[name] * np.float32(1.01)}
        assert failures(compare(run(model, wrong, tmp_path / "wrong.onnx"), expected), GATE), "a wrong fold passes"


TRAINING = NORM.replace("= 0.01", "= 0.01, training_mode = 1")
NOT_FOLDED = {
    "training": (f"a = Conv <group = 2> (x, conv_weight) n, m, v = {TRAINING} y = Relu (n)", "in training mode"),
    "shared": (f"a = Conv <group = 2> (x, conv_weight) n = {NORM} y = Add (n, a)", "used elsewhere"),
    "the graph's output": (f"a = Conv <group = 2> (x, conv_weight) y = {NORM}", "an output of the graph"),
    "no convolution": (f"a = Neg (x) n = {NORM} y = Relu (n)", "no convolution before it"),
    "a transposed convolution": (f"a = ConvTranspose <group = 2> (x, conv_weight) n = {NORM} y = Relu (n)",
                                 "no convolution before it"),
    "a computed weight": (f"w = Neg (conv_weight) a = Conv <group = 2> (x, w) n = {NORM} y = Relu (n)",
                          "no stored parameter"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_FOLDED)
def test_what_cannot_be_folded(case: str) -> None:
    body, reason = NOT_FOLDED[case]
    model = conv_norm(body)
    before = [node.op_type for node in model.graph]
    result = REWRITES["fold-batch-norm"](None)(model)
    assert not result.modified and not result.details["folds"]
    assert [node.op_type for node in model.graph] == before
    assert [reason in skip.reason for skip in result.skips] == [True], result.skips
