"""Check a graph against a target before anything is parsed or built: every problem at once, each with its node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import onnx_ir as ir

from mcpc.config.target import Runtime
from mcpc.errors import Problem
from mcpc.graph.io import all_initializers, dtype_name

_STANDARD = ("", "ai.onnx")


def check_graph(model: ir.Model, runtime: Runtime, component: str) -> list[Problem]:
    """Return everything in a lowered graph that the runtime refuses, or takes only in silence at a loss.

    Args:
        model: Flat (no functions), in the precision of the engine.
        runtime: What it is checked against.
        component: Named in the problems.
    """
    problems = [*_opset(model, runtime, component), *_borders(model, runtime, component)]
    problems += _packed_constants(model, runtime, component)
    for node in model.graph.all_nodes():
        where = f"{component}: node {node.name or '(unnamed)'} [{node.op_type}]"
        problems += _op(node, runtime, where)
        if node.domain in _STANDARD and (rule := _RULES.get(node.op_type)) is not None:
            problems += rule(node, runtime, where)
    return problems


def _opset(model: ir.Model, runtime: Runtime, component: str) -> Iterator[Problem]:
    version = next((model.opset_imports[domain] for domain in _STANDARD if domain in model.opset_imports), None)
    if version is not None and not runtime.opset.min <= version <= runtime.opset.max:
        yield Problem(
            "unsupported opset", component, f"{runtime.opset.min} to {runtime.opset.max}", str(version), "opset"
        )


def _borders(model: ir.Model, runtime: Runtime, component: str) -> Iterator[Problem]:
    for kind, values in (("input", model.graph.inputs), ("output", model.graph.outputs)):
        for value in values:
            where = f"{component}: {kind} {value.name}"
            if value.dtype is None or value.shape is None:
                yield Problem("no dtype or shape", where, code="untyped")
            elif dtype_name(value.dtype) not in runtime.io_dtypes:
                yield Problem(
                    "unsupported dtype", where, ", ".join(runtime.io_dtypes), dtype_name(value.dtype), "dtype"
                )


def _packed_constants(model: ir.Model, runtime: Runtime, component: str) -> Iterator[Problem]:
    for value in all_initializers(model):
        dtype = dtype_name(value.dtype) if value.dtype is not None else ""
        if dtype not in runtime.weights.dtypes:
            continue
        for node in dict.fromkeys(use.node for use in value.uses()):
            if node.op_type not in ("DequantizeLinear", "QuantizeLinear"):  # of the latter it is the zero point
                where = f"{component}: node {node.name or '(unnamed)'} [{node.op_type}], {value.name}"
                yield Problem(
                    "a packed constant that is not dequantized first", where, "DequantizeLinear", node.op_type, "packed"
                )


def _op(node: ir.Node, runtime: Runtime, where: str) -> Iterator[Problem]:
    if node.domain not in _STANDARD:
        yield Problem(
            f"an op of the domain {node.domain!r}, which has no body in the graph",
            where,
            "standard ONNX ops",
            node.domain,
            "op",
        )
        return
    if node.op_type in runtime.refused:
        yield Problem(f"unsupported op: {runtime.refused[node.op_type]}", where, code="op")
        return
    allowed = runtime.op_dtypes.get(node.op_type)
    if allowed is None:
        yield Problem("unsupported op", where, code="op")
        return
    for dtype in sorted(_dtypes(node) - allowed - _side_dtypes(node)):
        yield Problem("unsupported dtype", where, ", ".join(sorted(allowed)), dtype, "dtype")


def _dtypes(node: ir.Node) -> set[str]:
    """Return the dtypes of a node's data: its inputs and outputs."""
    return {
        dtype_name(value.dtype)
        for value in (*node.inputs, *node.outputs)
        if value is not None and value.dtype is not None
    }


#: What a node may touch besides its data: indices, shapes, axes and truth values.
_SIDE: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsInf", "IsNaN"), frozenset({"bool"})),
    **dict.fromkeys(("ReduceL2", "ReduceLogSum", "ReduceLogSumExp"), frozenset({"int64"})),
    "Resize": frozenset({"int64", "float32"}),
    "ConstantOfShape": frozenset({"int64"}),
    "RotaryEmbedding": frozenset({"int64"}),
    "Attention": frozenset({"bool", "int64"}),
    "Pow": frozenset({"int64", "int32"}),
}


def _side_dtypes(node: ir.Node) -> frozenset[str]:
    return _SIDE.get(node.op_type, frozenset())


Rule = Callable[[ir.Node, Runtime, str], Iterable[Problem]]


def _quantized(node: ir.Node, runtime: Runtime, where: str) -> Iterator[Problem]:
    """Check a QuantizeLinear or DequantizeLinear: packed dtype, zero point, blocks, scale dtype."""
    data, scale = node.inputs[0], node.inputs[1]
    zero_point = node.inputs[2] if len(node.inputs) > 2 else None
    packed = data if node.op_type == "DequantizeLinear" else node.outputs[0]
    if packed is not None and packed.dtype is not None and dtype_name(packed.dtype) not in runtime.weights.dtypes:
        yield Problem(
            "unsupported quantized dtype", where, ", ".join(runtime.weights.dtypes), dtype_name(packed.dtype), "dtype"
        )
    if zero_point is not None:
        yield from _zero_point(zero_point, where)
    if data is not None and data.dtype == ir.DataType.INT4:
        yield from _blocks(node, data, scale, runtime, where)
    if data is not None and data.dtype in (ir.DataType.INT4, ir.DataType.INT8):
        yield from _columns(data, runtime, where)


def _zero_point(zero_point: ir.Value, where: str) -> Iterator[Problem]:
    if zero_point.const_value is None:
        yield Problem("the zero point is not a constant", f"{where}, {zero_point.name}", "all zero", code="zero-point")
        return
    values = np.asarray(zero_point.const_value.numpy()).astype(np.int32)
    if values.any():
        got = f"{np.count_nonzero(values)} of {values.size} not zero, such as {values[values != 0].flat[0]}"
        yield Problem(
            "non-zero zero point", f"{where}, {zero_point.name}", "all zero (symmetric quantization)", got, "zero-point"
        )


def _blocks(node: ir.Node, data: ir.Value, scale: ir.Value | None, runtime: Runtime, where: str) -> Iterator[Problem]:
    place = f"{where}, {data.name}"
    sizes = ", ".join(map(str, runtime.weights.block_sizes))
    block = node.attributes["block_size"].as_int() if "block_size" in node.attributes else 0
    if block not in runtime.weights.block_sizes:
        yield Problem(
            "unsupported INT4 block size",
            place,
            sizes,
            str(block) if block else "none (per tensor or channel)",
            "block",
        )
    if (
        data.shape is None
        or not data.shape.is_static()
        or scale is None
        or scale.shape is None
        or not scale.shape.is_static()
    ):
        return
    shape, scales = data.shape.numpy(), scale.shape.numpy()
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    axis += len(shape) if axis < 0 else 0
    if (
        block
        and axis < len(shape)
        and (shape[axis] % block or len(scales) != len(shape) or scales[axis] * block != shape[axis])
    ):
        yield Problem(
            "partial INT4 block", place, f"a multiple of {block} along axis {axis}", str(shape[axis]), "block"
        )


def _columns(data: ir.Value, runtime: Runtime, where: str) -> Iterator[Problem]:
    """Check that a packed weight [K,N] stays packed; lowering pads those that it can."""
    multiple = runtime.weights.columns_multiple
    if data.const_value is None or data.shape is None or len(data.shape) != 2:
        return
    columns = data.shape.numpy()[1]
    if columns % multiple and any(
        use.node.op_type in ("MatMul", "Gemm") for node in data.consumers() for use in node.outputs[0].uses()
    ):
        place, expected = f"{where}, {data.name}", f"columns in multiples of {multiple}"
        yield Problem("a packed weight that is widened at every run", place, expected, str(columns), "columns")


def _single_output(node: ir.Node, _runtime: Runtime, where: str) -> Iterator[Problem]:
    used = [value.name for value in node.outputs[1:] if value.name and (value.uses() or value.is_graph_output())]
    if used:
        yield Problem(
            "only the first output is supported", where, got=", ".join(str(name) for name in used), code="outputs"
        )


def _attention(node: ir.Node, runtime: Runtime, where: str) -> Iterator[Problem]:
    yield from _single_output(node, runtime, where)
    if "softcap" in node.attributes and node.attributes["softcap"].as_float() != 0.0:
        yield Problem("softcap is not supported", where, "0", f"{node.attributes['softcap'].as_float():g}", "attribute")


def _attribute_rule(name: str, allowed: tuple[str | int, ...]) -> Rule:
    def rule(node: ir.Node, _runtime: Runtime, where: str) -> Iterator[Problem]:
        if name in node.attributes:
            value = node.attributes[name].value
            if value not in allowed:
                yield Problem(
                    f"the attribute {name} is not supported",
                    where,
                    ", ".join(map(str, allowed)),
                    str(value),
                    "attribute",
                )

    return rule


_RULES: Mapping[str, Rule] = {
    "QuantizeLinear": _quantized,
    "DequantizeLinear": _quantized,
    "LayerNormalization": _single_output,
    "Attention": _attention,
    "ScatterND": _attribute_rule("reduction", ("none",)),
    "Resize": _attribute_rule("antialias", (0,)),
    "TensorScatter": _attribute_rule("mode", ("linear",)),
}
