"""Which nodes keep float32 when the rest of a graph is lowered to 16 bits.

Squares overflow float16 (RMS normalization), and a position times a frequency loses bits in 16 (rotary angles).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import onnx_ir as ir

from mcpc.graph.io import module_of

#: Modules of Hugging Face models that compute in float32 in every precision: RMS norms and rotary embeddings.
_WIDE_MODULE = re.compile(r"(norm\d*|rotary_emb|rotary_pos_emb)$")
#: Fused normalizations accumulate in float32 by their own specification (`stash_type`).
_FUSED_NORMS = frozenset(
    {"LayerNormalization", "RMSNormalization", "GroupNormalization", "InstanceNormalization", "BatchNormalization"}
)
_TRIGONOMETRY = frozenset({"Sin", "Cos"})
_SQUARE_SUMS = frozenset({"ReduceL2", "ReduceSumSquare"})
_AFTER_MEAN = frozenset({"Add", "Sqrt", "Reciprocal", "Div", "Pow", "Mul"})
#: Ops that the ONNX standard defines for float32 but not for 16-bit floats.
_FLOAT32_ONLY = frozenset({"Range"})


def wide_nodes(model: ir.Model) -> set[ir.Node]:
    """Return the nodes that stay float32: by the module they came from, and by their shape where no module is known."""
    wide: set[ir.Node] = set()
    for node in model.graph.all_nodes():
        if node.op_type in _FUSED_NORMS:
            continue
        if node.op_type in _FLOAT32_ONLY or node.op_type in _SQUARE_SUMS or _WIDE_MODULE.search(module_of(node)):
            wide.add(node)
        if node.op_type in _TRIGONOMETRY:
            wide.update(_backward(node))
        if node.op_type in ("ReduceMean", "ReduceSum") and _is_square(node.inputs[0]):
            wide.update(_norm(node))
    return wide


def _backward(node: ir.Node) -> Iterable[ir.Node]:
    """Yield a node and everything its angles are computed from."""
    seen: set[ir.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in seen:
            seen.add(current)
            yield current
            producers = (value.producer() for value in current.inputs if value is not None)
            stack += [producer for producer in producers if producer is not None]


def _is_square(value: ir.Value | None) -> bool:
    producer = value.producer() if value is not None else None
    if producer is None:
        return False
    if producer.op_type == "Mul":
        return producer.inputs[0] is producer.inputs[1]
    if producer.op_type != "Pow":
        return False
    exponent = producer.inputs[1]
    tensor = exponent.const_value if exponent is not None else None
    return tensor is not None and tensor.size == 1 and float(tensor.numpy().reshape(-1)[0]) == 2.0


def _norm(mean: ir.Node) -> Iterable[ir.Node]:
    """Yield square -> mean -> (+ epsilon, root, reciprocal) -> the product with the input, of a norm written out."""
    square = mean.inputs[0]
    producer = square.producer() if square is not None else None
    if producer is not None:
        yield producer
    yield mean
    node = mean
    while len(users := [use.node for use in node.outputs[0].uses()]) == 1 and users[0].op_type in _AFTER_MEAN:
        node = users[0]
        yield node
        if node.op_type in ("Mul", "Div") and not _is_scalar_operand(node):
            return


def _is_scalar_operand(node: ir.Node) -> bool:
    """Tell whether one operand is a constant scalar (1 / root), so that the norm's own product still follows."""
    return any(
        value is not None and value.const_value is not None and value.const_value.size == 1 for value in node.inputs
    )
