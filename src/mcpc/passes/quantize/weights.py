"""Find every float weight of a package's graphs, and what each is used for."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from mcpc.graph.functions import DOMAIN
from mcpc.graph.io import dtype_name
from mcpc.graph.widen import WidenedTensor
from mcpc.passes.quantize.streams import bytes_key

#: Ops of ONNX, `com.microsoft` and mcpc that only quantized graphs hold, beside those that begin with QLinear.
_QUANTIZED_OPS = frozenset({
    "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "VisionEmbedInt8",
    "MatMulNBits", "GatherBlockQuantized", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QGemm", "QAttention",
})  # fmt: skip
_PACKED = frozenset({ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT4, ir.DataType.UINT4})
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})


@dataclass(frozen=True, eq=False)
class Site:
    """One use of a weight.

    Attributes:
        component: Name of the component.
        value: The weight as that graph names it.
        node: `MatMul`, `Gemm`, `Gather` or `mcpc::VisionEmbed`; the node that gives `unfit` its reason otherwise.
        transposed: A Linear weight is stored [N,K].
        unfit: Why this use keeps the weight wide; "" when a pass may replace it.
    """

    component: str
    value: ir.Value
    node: ir.Node
    transposed: bool = False
    unfit: str = ""

    @property
    def is_linear(self) -> bool:
        """Whether the weight is multiplied here."""
        return self.node.op_type in ("MatMul", "Gemm")


@dataclass(frozen=True, eq=False)
class Weight:
    """A float weight, with all its uses in the package; tied tensors are one weight.

    Attributes:
        name: `component/initializer` of its first use.
        source_name: Its name in the checkpoint, or the initializer's name when that is not known.
        tensor: Its bytes.
        sites: Its uses.
    """

    name: str
    source_name: str
    tensor: ir.TensorProtocol
    sites: list[Site] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape as stored."""
        return tuple(int(size) for size in self.tensor.shape.numpy())

    @property
    def dtype(self) -> str:
        """Its dtype name."""
        return dtype_name(self.tensor.dtype)

    @property
    def stored_dtype(self) -> str:
        """Its dtype name in the input, where a widened weight is still narrow."""
        return dtype_name(self.tensor.source.dtype) if isinstance(self.tensor, WidenedTensor) else self.dtype

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.tensor.size

    @property
    def unfit(self) -> str:
        """Why no pass may take it; "" when one may."""
        if len(self.shape) < 2:
            return "a vector, used by " + ", ".join(sorted({_op(site.node) for site in self.sites}))
        reasons = sorted({site.unfit for site in self.sites if site.unfit})
        if reasons:
            return "; ".join(reasons)
        if len(self.shape) != 2:
            return f"rank {len(self.shape)}"
        if self.tensor.dtype == ir.DataType.DOUBLE:
            return "float64"
        return ""


def survey(
    models: Mapping[str, ir.Model], source_names: Mapping[tuple[str, str], str] | None = None
) -> tuple[Weight, ...]:
    """Return the float weights (two elements or more) of all components, in graph order.

    Args:
        models: Component name to graph.
        source_names: (component, initializer) to the tensor's name in the checkpoint.
    """
    names = source_names or {}
    found: dict[Hashable, Weight] = {}
    for component, model in models.items():
        for graph in model.graphs():
            for value, tensor in _weights(graph):
                known = str(value.name)
                weight = Weight(
                    f"{component}/{known}" if component else known, names.get((component, known), known), tensor
                )
                found.setdefault(bytes_key(tensor), weight).sites.extend(sites_of(component, value))
        for name, tensor in _inside_functions(model):
            weight = Weight(f"{component}/{name}" if component else name, name, tensor)
            value, node = ir.Value(name=name), ir.Node("", "Constant", [], name=name)
            weight.sites.append(Site(component, value, node, unfit="inside a function body"))
            found.setdefault(bytes_key(tensor), weight)
    return tuple(weight for weight in found.values() if weight.sites)


def quantized_places(model: ir.Model) -> Iterator[tuple[str, str]]:
    """Yield (node or initializer, reason) of everything that is quantized already."""
    for node in model.graph.all_nodes():
        if node.op_type in _QUANTIZED_OPS or node.op_type.startswith("QLinear"):
            yield str(node.name or node.outputs[0].name), f"a {_op(node)} node"
    for graph in model.graphs():
        for name, value in graph.initializers.items():
            users = {use.node.op_type for use in value.uses()}
            if value.dtype in _PACKED and "Gather" in users and value.const_value is not None:
                yield name, f"a gathered table of {dtype_name(value.const_value.dtype)}"


def weight_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the bytes of an initializer or of a Constant node's output, or None when the value is computed."""
    if value is None:
        return None
    if value.is_initializer():
        return value.const_value
    node = value.producer()
    if node is not None and node.op_type == "Constant" and not node.domain and "value" in node.attributes:
        return node.attributes["value"].as_tensor()
    return None


def _weights(graph: ir.Graph) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    constants = (node.outputs[0] for node in graph if node.op_type == "Constant" and not node.domain)
    for value in (*graph.initializers.values(), *constants):
        tensor = weight_tensor(value)
        if tensor is not None and tensor.dtype in _FLOATS and tensor.size > 1:
            yield value, tensor


def _inside_functions(model: ir.Model) -> Iterator[tuple[str, ir.TensorProtocol]]:
    for function in model.functions.values():
        for node in function.all_nodes():
            tensor = weight_tensor(node.outputs[0]) if node.op_type == "Constant" else None
            if tensor is not None and tensor.dtype in _FLOATS and tensor.size > 1:
                yield f"{function.name}/{node.outputs[0].name}", tensor


def sites_of(component: str, value: ir.Value) -> Iterator[Site]:
    """Yield the uses of a weight, through a Transpose where there is one."""
    if value.is_graph_output():
        yield Site(component, value, ir.Node("", "Output", [], name=value.name), unfit="is a graph output")
    for use in value.uses():
        node, index = use.node, use.idx
        if _is(node, "Transpose") and _perm(node) == [1, 0] and not node.outputs[0].is_graph_output():
            for inner in node.outputs[0].uses():
                yield _site(component, value, inner.node, inner.idx, transposed=True)
        else:
            yield _site(component, value, node, index, transposed=False)


def _site(component: str, value: ir.Value, node: ir.Node, index: int, transposed: bool) -> Site:
    def unfit(reason: str) -> Site:
        return Site(component, value, node, transposed, reason)

    if _is(node, "MatMul"):
        return Site(component, value, node, transposed) if index == 1 else unfit("left operand of a MatMul")
    if _is(node, "Gemm"):
        if index != 1:
            return unfit("left operand or bias of a Gemm")
        if _number(node, "transA", 0) or _number(node, "alpha", 1) != 1 or _number(node, "beta", 1) != 1:
            return unfit("a Gemm with transA, alpha or beta")
        return Site(component, value, node, transposed != bool(_number(node, "transB", 0)))
    if not transposed and _is(node, "Gather"):
        if index == 0 and _number(node, "axis", 0) == 0:
            return Site(component, value, node)
        return unfit("gathered along another axis than rows")
    if not transposed and (node.domain, node.op_type, index) == (DOMAIN, "VisionEmbed", 1):
        return Site(component, value, node)
    if _is(node, "Conv"):
        return unfit("a convolution stays wide")
    return unfit(f"used by {_op(node)}" + (" after a Transpose" if transposed else ""))


def _op(node: ir.Node) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def _is(node: ir.Node, op_type: str) -> bool:
    return not node.domain and node.op_type == op_type


def _perm(node: ir.Node) -> list[int]:
    return list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else [1, 0]


def _number(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else float(attribute.value)
