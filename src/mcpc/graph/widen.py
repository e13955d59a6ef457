"""Turn every 16-bit float of a graph into float32, exactly: the twin on which a half-precision graph is executed."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

import numpy as np
import onnx_ir as ir

from mcpc.errors import UnsupportedError

_NARROW = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})

#: Attributes of standard ops that hold an ONNX dtype number.
#: Source: the operator specifications (Cast.to, RandomNormal.dtype, QuantizeLinear.output_dtype and .precision,
#: LayerNormalization.stash_type, Attention.softmax_precision).
_DTYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype", "precision", "stash_type", "softmax_precision"})


def widen(model: ir.Model) -> bool:
    """Make every float16 and bfloat16 type of a model float32, in place.

    Covers graph inputs and outputs, values, initializers, dtype attributes such as `Cast.to`, constant tensors,
    subgraphs and the bodies of functions. Each tensor becomes a `WidenedTensor`, which widens when it is read, so no
    weight is read here. Every float16 and bfloat16 number is a float32 number, so the values do not change; what
    changes is that results are no longer rounded to 16 bits between nodes.

    Returns:
        Whether anything was narrow.

    Raises:
        UnsupportedError: The graph passes a dtype to a function as an attribute, or holds a sparse constant.
    """
    modified = False
    for graph in _graphs(model):
        modified |= _widen_values(graph)
        for node in graph:
            modified |= _widen_attributes(node.attributes, f"node {node.name}", standard=node.domain == "")
    for function in model.functions.values():
        modified |= _widen_attributes(function.attributes, f"function {function.name}", standard=False)
    if modified:
        _drop_weight_casts(model.graph)
    return modified


def _drop_weight_casts(graph: ir.Graph) -> None:
    """Remove the Cast of a weight that is stored narrow: once widened, it casts float32 to float32."""
    for node in list(graph):
        if node.op_type != "Cast" or node.domain or (weight := node.inputs[0]) is None or not weight.is_initializer():
            continue
        output = node.outputs[0]
        if weight.dtype == output.dtype == ir.DataType.FLOAT and not output.is_graph_output():
            ir.convenience.replace_all_uses_with(output, weight)
            graph.remove(node, safe=True)


def _graphs(model: ir.Model) -> Iterator[ir.Graph]:
    yield from model.graphs()
    for function in model.functions.values():
        yield function.graph
        yield from function.subgraphs()


def _widen_values(graph: ir.Graph) -> bool:
    modified = False
    initializers = graph.initializers.values()
    for value in [*graph.inputs, *initializers, *(output for node in graph for output in node.outputs)]:
        if value.type is not None and value.type.dtype in _NARROW:
            value.type.dtype = ir.DataType.FLOAT  # reaches into Sequence and Optional types as well
            modified = True
    for value in initializers:
        if value.const_value is not None and value.const_value.dtype in _NARROW:
            value.const_value = WidenedTensor(value.const_value)
            value.type = ir.TensorType(ir.DataType.FLOAT)
            modified = True
    return modified


def _widen_attributes(attributes: MutableMapping[str, ir.Attr], where: str, standard: bool) -> bool:
    modified = False
    for name, attribute in list(attributes.items()):
        is_dtype = standard and name in _DTYPE_ATTRIBUTES
        if attribute.is_ref():
            if is_dtype:
                raise UnsupportedError(
                    "a dtype comes from a function attribute, which cannot be widened",
                    where=where,
                    got=f"{name} = @{attribute.ref_attr_name}",
                )
            continue
        replacement = _widened_attribute(attribute, where, is_dtype)
        if replacement is not None:
            attributes[name] = replacement
            modified = True
    return modified


def _widened_attribute(attribute: ir.Attr, where: str, is_dtype: bool) -> ir.Attr | None:
    """Return the widened attribute, or None when nothing in it is narrow."""
    match attribute.type:
        case ir.AttributeType.INT if is_dtype and attribute.as_int() in _NARROW:
            return ir.AttrInt64(attribute.name, int(ir.DataType.FLOAT))
        case ir.AttributeType.TENSOR if attribute.as_tensor().dtype in _NARROW:
            return ir.AttrTensor(attribute.name, WidenedTensor(attribute.as_tensor()))
        case ir.AttributeType.TENSORS if any(tensor.dtype in _NARROW for tensor in attribute.as_tensors()):
            tensors = [
                WidenedTensor(tensor) if tensor.dtype in _NARROW else tensor for tensor in attribute.as_tensors()
            ]
            return ir.AttrTensors(attribute.name, tensors)
        case ir.AttributeType.TYPE_PROTO if attribute.value.type.dtype in _NARROW:
            attribute.value.type.dtype = ir.DataType.FLOAT
            return attribute
        case ir.AttributeType.SPARSE_TENSOR | ir.AttributeType.SPARSE_TENSORS:
            raise UnsupportedError("a sparse constant cannot be widened", where=where, got=attribute.name)
    return None


class WidenedTensor(ir.LazyTensor):
    """The float32 form of a 16-bit tensor, made whenever it is read; `source` is the tensor itself."""

    __slots__ = ("source",)

    def __init__(self, source: ir.TensorProtocol) -> None:
        def read() -> ir.TensorProtocol:
            return ir.Tensor(source.numpy().astype(np.float32), name=source.name)

        shape = ir.Shape(int(size) for size in source.shape.numpy())
        super().__init__(read, dtype=ir.DataType.FLOAT, shape=shape, name=source.name)
        self.source = source
