"""Measure inside a graph how large its values become, so that only one number per value leaves it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from mcpc.backends.trt.lowering import HALVES, largest, release
from mcpc.graph import io

#: A mask adds to attention scores, and has no effect behind their Softmax.
_MASK_ENDS = frozenset({"Softmax", "Attention"})
_SUFFIX = ".range"


def probe_ranges(model: ir.Model) -> dict[str, str]:
    """Make the largest magnitude of every float16 value of the main graph an output, and drop the other outputs.

    What comes of a mask is meant to be far below zero, so only how far it is above zero counts there.

    Returns:
        The names of the new outputs, and the value that each measures.
    """
    masked = mask_values(model)
    graph = model.graph
    values = [value for node in graph for value in node.outputs if value.dtype == ir.DataType.FLOAT16 and value.name]
    flat = _constant(graph, "range.flat", np.array([-1]))
    zero = _constant(graph, "range.zero", np.zeros(1, np.float16))
    graph.outputs.clear()
    measured = {}
    for value in values:
        source = value if value.name in masked else _append(graph, "Abs", [value], f"{value.name}.abs")
        row = _append(graph, "Reshape", [source, flat], f"{value.name}.flat")
        # a value may be empty (no past, no image): the zero gives it a largest element
        safe = _append(graph, "Concat", [row, zero], f"{value.name}.safe", axis=0)
        top = _append(graph, "ReduceMax", [safe], f"{value.name}{_SUFFIX}", keepdims=0)
        top.shape = ir.Shape([])
        graph.outputs.append(top)
        measured[str(top.name)] = str(value.name)
    return measured


def _constant(graph: ir.Graph, name: str, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> ir.Value:
    tensor = ir.Tensor(array, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    graph.register_initializer(value)
    return value


def _append(graph: ir.Graph, op: str, inputs: list[ir.Value], name: str, **attributes: int) -> ir.Value:
    node = ir.node(op, inputs, attributes, name=name)
    graph.append(node)
    node.outputs[0].name, node.outputs[0].type = name, ir.TensorType(ir.DataType.FLOAT16)
    return node.outputs[0]


def mask_values(model: ir.Model) -> frozenset[str]:
    """Return the names of the values that come of a mask constant, up to the Softmax that ends its effect."""
    stack = [
        value for value in io.all_initializers(model) if value.const_value is not None and _is_limit(value.const_value)
    ]
    seen: set[ir.Value] = set()
    while stack:
        value = stack.pop()
        if value not in seen:
            seen.add(value)
            stack += [
                output for use in value.uses() if use.node.op_type not in _MASK_ENDS for output in use.node.outputs
            ]
    return frozenset(str(value.name) for value in seen)


def _is_limit(tensor: ir.TensorProtocol) -> bool:
    if tensor.dtype not in HALVES:
        return False
    lowest = -largest(tensor.dtype)
    values = tensor.numpy().astype(np.float32)
    release(tensor)
    return bool((values <= lowest).any())
