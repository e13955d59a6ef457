"""Pad the columns of packed weights whose number TensorRT does not take packed.

Before:  MatMul(x, DequantizeLinear(w[K,N])), N odd            the plan pads and widens w at every run, in silence
After:   Slice(MatMul(x, DequantizeLinear(w[K,N+1])), [..., :N])

The added column is zero with scale one, so no other number changes.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from mcpc.backends.trt.lowering import release
from mcpc.core.runner import Array

_PACKED = frozenset({ir.DataType.INT4, ir.DataType.INT8})


def pad_columns(model: ir.Model, multiple: int) -> tuple[str, ...]:
    """Pad, in place, every packed weight [K,N] of MatMuls whose N is no multiple; return the names of the weights.

    Declines when anything but MatMul uses the weight, when it has a zero point, or when its scales are not per column.
    """
    padded = []
    for node in list(model.graph.all_nodes()):
        if node.op_type == "DequantizeLinear" and (columns := _columns(node)) is not None and columns % multiple:
            extra = -columns % multiple
            padded.append(str(node.inputs[0].name if node.inputs[0] is not None else ""))
            _pad_weight(node, extra)
            for use in list(node.outputs[0].uses()):
                _cut(use.node, columns, extra)
    return tuple(padded)


def _columns(node: ir.Node) -> int | None:
    """Return the columns of the weight of a DequantizeLinear that can be padded, or None."""
    weight, scale = node.inputs[0], node.inputs[1]
    if weight is None or scale is None or any(value is not None for value in node.inputs[2:]):
        return None
    if weight.const_value is None or scale.const_value is None or weight.dtype not in _PACKED:
        return None
    shape, scales = weight.const_value.shape.numpy(), scale.const_value.shape.numpy()
    users = node.outputs[0].uses()
    if len(shape) != 2 or not users or node.outputs[0].is_graph_output() or len(weight.uses()) != 1:
        return None
    if any(use.node.op_type != "MatMul" or use.idx != 1 for use in users):
        return None
    return int(shape[1]) if scales and scales[-1] == shape[1] else None


def _pad_weight(node: ir.Node, extra: int) -> None:
    for index, fill in ((0, 0), (1, 1)):
        value = node.inputs[index]
        assert value is not None and value.const_value is not None and value.graph is not None  # noqa: S101 (see `_columns`)
        twin = ir.Value(name=f"{value.name}.padded", type=value.type)
        twin.const_value = _padded(value.const_value, extra, fill, twin.name or "")
        twin.shape = ir.Shape(twin.const_value.shape)
        value.graph.register_initializer(twin)
        node.replace_input_with(index, twin)
    wide = node.outputs[0]
    wide.shape = node.inputs[0].shape if node.inputs[0] is not None else None


def _padded(tensor: ir.TensorProtocol, extra: int, fill: int, name: str) -> ir.LazyTensor:
    """Return a tensor with `extra` columns more, made when it is read."""

    def read() -> ir.TensorProtocol:
        whole = _with_columns(tensor.numpy(), extra, fill)
        release(tensor)
        return ir.Tensor(whole, dtype=tensor.dtype, name=name)

    shape = [int(size) for size in tensor.shape.numpy()]
    return ir.LazyTensor(read, dtype=tensor.dtype, shape=ir.Shape([*shape[:-1], shape[-1] + extra]), name=name)


def _with_columns(array: Array, extra: int, fill: int) -> Array:
    column = np.full((*array.shape[:-1], extra), fill).astype(array.dtype)
    return np.concatenate([array, column], axis=-1)


def _cut(matmul: ir.Node, columns: int, extra: int) -> None:
    """Cut the added columns off the product; the cut takes over its name."""
    product, graph = matmul.outputs[0], matmul.graph
    assert isinstance(graph, ir.Graph)  # noqa: S101 (functions are inlined)
    name, shape = product.name, product.shape
    bounds = []
    for what, number in (("start", 0), ("end", columns), ("axis", -1)):
        tensor = ir.Tensor(np.array([number]), name=f"{name}.{what}")
        bound = ir.Value(
            name=tensor.name, type=ir.TensorType(ir.DataType.INT64), shape=tensor.shape, const_value=tensor
        )
        graph.register_initializer(bound)
        bounds.append(bound)
    cut = ir.node("Slice", [product, *bounds], name=f"{matmul.name}.cut")
    cut.metadata_props.update(matmul.metadata_props)
    output = cut.outputs[0]
    output.type, output.shape = product.type, shape
    ir.convenience.replace_all_uses_with(product, output, replace_graph_outputs=True)
    cut.replace_input_with(0, product)
    product.name, output.name = f"{name}.padded", name
    if shape is not None:
        product.shape = ir.Shape([*shape[:-1], columns + extra])
    graph.insert_after(matmul, cut)
