"""What every pass promises, on graphs that hold what it looks for (in subgraphs too) and on graphs that do not."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from mcpc.backends.ort import open_model
from mcpc.config.recipe import EmbeddingInt8Options, LinearInt4Options, LinearInt8Options
from mcpc.core.passes import Numerics, Pass
from mcpc.core.runner import Array
from mcpc.graph import io
from mcpc.graph.functions import attach, vision_embed
from mcpc.passes.registry import PASSES
from mcpc.verify.compare import Gate, compare, failures

SCOPES = {io.NAME_SCOPES: "['', 'model', 'model.layer', 'linear']"}
CONFIGS: dict[str, Any] = {
    "quantize.embedding-int8": EmbeddingInt8Options(minimum_elements=64),
    "quantize.linear-int4": LinearInt4Options(),
    "quantize.linear-int8": LinearInt8Options(),
    "lower.dequantize-tables": None,
    "rewrite.join-transposes": None,
    "rewrite.join-reshapes": None,
    "rewrite.join-squeezes": None,
}
#: What a lossy pass must meet on these graphs; the others are compared bit by bit.
GATES = {
    "quantize.embedding-int8": Gate(cosine=0.9999),
    "quantize.linear-int4": Gate(cosine=0.99),
    "quantize.linear-int8": Gate(cosine=0.9999),
}


def model_of(body: str, **weights: Array) -> ir.Model:
    model = ir.from_onnx_text('<ir_version: 10, opset_import: ["" : 21, "mcpc" : 1]>\n' + body)
    for value in list(model.graph.inputs):
        if value.name in weights:
            model.graph.inputs.remove(value)
            value.const_value = ir.Tensor(weights[value.name], name=value.name)
            model.graph.register_initializer(value)
    for node in model.graph.all_nodes():
        node.metadata_props.update(SCOPES)
    return model


def weight(*shape: int) -> Array:
    return (np.random.default_rng(sum(shape)).standard_normal(shape) * 0.05).astype(np.float32)


def linear() -> ir.Model:
    return model_of(
        """g (float[b,s,64] x, float[33,64] w, float[33] bias) => (float[b,s,33] y) {
        wt = Transpose <perm = [1, 0]> (w)
        h = MatMul (x, wt)
        y = Add (h, bias) }""",
        w=weight(33, 64), bias=weight(33),
    )  # fmt: skip


def linear_in_subgraph() -> ir.Model:
    return model_of(
        """g (bool c, float[b,s,64] x, float[64,34] w) => (float[b,s,34] y) {
        y = If (c) <then_branch = t () => (float[b,s,34] u) { u = MatMul (x, w) },
                    else_branch = e () => (float[b,s,34] v) { n = Neg (x)  v = MatMul (n, w) }> }""",
        w=weight(64, 34),
    )  # fmt: skip


def table() -> ir.Model:
    return model_of("g (int64[b,s] ids, float[40,64] w) => (float[b,s,64] y) { y = Gather (w, ids) }", w=weight(40, 64))


def table_in_subgraph() -> ir.Model:
    return model_of(
        """g (bool c, int64[b,s] ids, float[40,64] w) => (float[b,s,64] y) {
        y = If (c) <then_branch = t () => (float[b,s,64] u) { u = Gather (w, ids) },
                    else_branch = e () => (float[b,s,64] v) { g = Gather (w, ids)  v = Neg (g) }> }""",
        w=weight(40, 64),
    )  # fmt: skip


def vision_table() -> ir.Model:
    body = """g (int64[b,s] ids, float[40,64] table, float[n,64] features, int32[b,s] pos_map) => (float[b,s,64] y) {
        y = mcpc.VisionEmbed (ids, table, features, pos_map) }"""
    model = model_of(body, table=weight(40, 64))
    attach(model, vision_embed())
    return model


def nothing() -> ir.Model:
    return model_of(
        "g (float[b,s,64] x, float[64] w) => (float[b,s,64] y) { h = Mul (x, w)  y = Relu (h) }", w=weight(64)
    )


def quantized_tables(make: Callable[[], ir.Model]) -> Callable[[], ir.Model]:
    def build() -> ir.Model:
        model = make()
        PASSES["quantize.embedding-int8"](CONFIGS["quantize.embedding-int8"])(model)
        return model

    return build


def moving(body: str) -> Callable[[], ir.Model]:
    """Return how to make a graph of nodes that move data, with shapes and axes as initializers."""
    constants = {
        "flat": [-1, 64], "halves": [2, 5, 2, 32], "wide": [2, 5, 64], "zero": [0], "one": [1], "two": [2], "last": [3],
        "ends": [0, 3],
    }  # fmt: skip

    def build() -> ir.Model:
        used = {name: values for name, values in constants.items() if re.search(rf"\b{name}\b", body)}
        inputs = "".join(f", int64[{len(values)}] {name}" for name, values in used.items())
        text = f"g (float[2,5,64] x{inputs}) => (float[o0,o1,o2] y) {{ {body} }}"
        return model_of(text, **{name: np.array(values, np.int64) for name, values in used.items()})

    return build


TRANSPOSES = {
    "two": "a = Transpose <perm = [1, 0, 2]> (x) y = Transpose <perm = [2, 0, 1]> (a)",
    "three": "a = Transpose <perm = [1, 2, 0]> (x) b = Transpose <perm = [1, 2, 0]> (a) "
    "y = Transpose <perm = [0, 2, 1]> (b)",
    "two that cancel": "a = Transpose <perm = [1, 2, 0]> (x) b = Transpose <perm = [2, 0, 1]> (a) y = Neg (b)",
    "two that cancel, the first shared": "a = Transpose <perm = [0, 2, 1]> (x) b = Transpose <perm = [0, 2, 1]> (a) "
    "c = Transpose <perm = [0, 2, 1]> (a) d = Neg (b) y = Add (c, d)",
}
RESHAPES = {
    "two": "a = Reshape (x, flat) y = Reshape (a, wide)",
    "three": "a = Reshape (x, flat) b = Reshape (a, halves) y = Reshape (b, wide)",
}
SQUEEZES = {
    "there and back": "a = Unsqueeze (x, one) b = Squeeze (a, one) y = Neg (b)",
    "back and there": "s = ReduceSum (x, two) a = Squeeze (s, two) b = Unsqueeze (a, two) y = Neg (b)",
    "two added": "a = Unsqueeze (x, one) b = Unsqueeze (a, ends) c = Squeeze (b, ends) d = Neg (c) "
    "y = Squeeze (d, one)",
    "two taken": "a = Unsqueeze (x, ends) n = Neg (a) b = Squeeze (n, last) y = Squeeze (b, zero)",
}
LINEARS = {"linear": linear, "linear in subgraphs": linear_in_subgraph}
TABLES = {"table": table, "table in subgraphs": table_in_subgraph, "VisionEmbed": vision_table}
MODELS: dict[str, dict[str, Callable[[], ir.Model]]] = {
    "quantize.embedding-int8": TABLES,
    "quantize.linear-int4": LINEARS,
    "quantize.linear-int8": LINEARS,
    "lower.dequantize-tables": {name: quantized_tables(make) for name, make in TABLES.items()},
    "rewrite.join-transposes": {name: moving(body) for name, body in TRANSPOSES.items()},
    "rewrite.join-reshapes": {name: moving(body) for name, body in RESHAPES.items()},
    "rewrite.join-squeezes": {name: moving(body) for name, body in SQUEEZES.items()},
}
CASES = [(id_, name) for id_ in PASSES for name in MODELS[id_]]
each_case = pytest.mark.parametrize(("id_", "name"), CASES)
each_pass = pytest.mark.parametrize("id_", list(PASSES))

FEEDS: dict[str, Array] = {
    "x": np.random.default_rng(1).standard_normal((2, 5, 64)).astype(np.float32),
    "ids": np.arange(10).reshape(2, 5) * 4,
    "features": weight(3, 64),
    "pos_map": np.array([[-1, 0, 1, 2, -1], [-1, -1, -1, 2, 0]], np.int32),
}


def make_pass(id_: str) -> Pass[Any]:
    return PASSES[id_](CONFIGS[id_])


def run(model: ir.Model, path: Path) -> list[Array]:
    """Outputs with ONNX Runtime's optimizations off, for both values of a condition."""
    io.save(model, path)
    runner = open_model(path, optimize=False)
    results = []
    for condition in (True, False):
        feeds = {
            value.name: FEEDS[value.name] if value.name in FEEDS else np.array(condition)
            for value in model.graph.inputs
            if value.name
        }
        results += list(runner.run(feeds).values())
    return results


def interface(model: ir.Model) -> list[tuple[object, ...]]:
    return [
        (value.name, value.dtype, str(value.shape))
        for value in itertools.chain(model.graph.inputs, model.graph.outputs)
    ]


def test_every_pass_has_cases() -> None:
    assert set(MODELS) == set(CONFIGS) == set(PASSES)


@each_pass
def test_a_pass_says_what_it_is(id_: str) -> None:
    kind = PASSES[id_]
    assert kind.id == id_
    assert kind.version >= 1
    text = inspect.getdoc(kind) or ""
    for part in ("Before::", "After::", "Declines when", "Source:"):
        assert part in text, part


@each_case
def test_modified_is_true_when_bytes_change(id_: str, name: str) -> None:
    model = MODELS[id_][name]()
    before = io.serialize(model)
    result = make_pass(id_)(model)
    assert result.modified
    assert io.serialize(model) != before


@each_case
def test_a_second_run_changes_nothing(id_: str, name: str) -> None:
    model = MODELS[id_][name]()
    make_pass(id_)(model)
    before = io.serialize(model)
    result = make_pass(id_)(model)
    assert not result.modified
    assert io.serialize(model) == before


@each_pass
def test_a_graph_without_its_pattern_stays_as_it_is(id_: str) -> None:
    model = nothing()
    before = io.serialize(model)
    result = make_pass(id_)(model)
    assert not result.modified
    assert io.serialize(model) == before
    if id_.startswith("quantize."):
        assert [(skip.where, skip.reason) for skip in result.skips] == [("w", "a vector, used by Mul")]


@each_case
def test_interface_and_metadata_stay(id_: str, name: str, tmp_path: Path) -> None:
    model = MODELS[id_][name]()
    before = interface(model)
    make_pass(id_)(model)
    assert interface(model) == before
    io.save(model, tmp_path / "model.onnx")
    io.check(tmp_path / "model.onnx")
    assert all(io.name_scopes(node) for node in model.graph.all_nodes()), "every new node names its module"
    assert all(value.uses() or value.is_graph_output() for value in io.all_initializers(model)), "nothing is left over"


@each_case
def test_the_numbers(id_: str, name: str, tmp_path: Path) -> None:
    model = MODELS[id_][name]()
    expected = run(model, tmp_path / "before.onnx")
    make_pass(id_)(model)
    actual = run(model, tmp_path / "after.onnx")
    for got, want in zip(actual, expected, strict=True):
        if PASSES[id_].numerics is Numerics.BITWISE:
            assert np.array_equal(got, want)
        else:
            assert not failures(compare(got, want), GATES[id_])


@each_case
def test_the_bytes_are_the_same_each_time(id_: str, name: str) -> None:
    texts = []
    for _ in range(2):
        model = MODELS[id_][name]()
        make_pass(id_)(model)
        texts.append(io.serialize(model))
    assert texts[0] == texts[1]


@each_pass
def test_weights_in_function_bodies_are_declined(id_: str) -> None:
    text = """<ir_version: 10, opset_import: ["" : 21, "f" : 1]>
        g (float[b,2] x) => (float[b,2] y) { y = f.Linear (x) }
        <opset_import: ["" : 21], domain: "f">
        Linear (x) => (y) { w = Constant <value = float[2,2] {1, 2, 3, 4}> ()  y = MatMul (x, w) }"""
    model = ir.from_onnx_text(text)
    before = io.serialize(model)
    result = make_pass(id_)(model)
    assert not result.modified
    assert io.serialize(model) == before
    if id_.startswith("quantize."):
        assert [skip.reason for skip in result.skips] == ["inside a function body"]
