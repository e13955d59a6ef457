"""Cut matrices that are larger than a budget into rows, each a product of its own: a head of 128 000 words, say."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

_WIDE_BYTES = 4


def cut_large_matrices(model: ir.Model, budget_bytes: int) -> int:
    """Compute `x @ W.T` in parts of W [N,K] where W is larger than the budget as float32; the columns are joined.

    Covers what `convert` writes for a linear layer: a stored W, perhaps cast, transposed, and read by one MatMul. Each
    part is a reference to rows of the stored tensor, so no weight is read here. Changes the model in place.

    Args:
        model: Its weights are external tensors.
        budget_bytes: Of one part as float32; at least one row.

    Returns:
        How many products were cut.
    """
    cut = 0
    for node in list(model.graph):
        chain = _chain(node)
        if chain and _WIDE_BYTES * _stored(chain[0]).size > budget_bytes:
            _cut(model.graph, node, chain, budget_bytes)
            cut += 1
    return cut


def _chain(node: ir.Node) -> list[ir.Node]:
    """Return the nodes that make a MatMul's second operand of a stored matrix, in order; [] where they differ."""
    chain: list[ir.Node] = []
    if node.op_type != "MatMul" or node.domain:
        return []
    value = node.inputs[1]
    while value is not None and (producer := value.producer()) is not None:
        if producer.domain or producer.op_type not in ("Cast", "Transpose") or producer.inputs[0] is None:
            return []
        chain.insert(0, producer)
        value = producer.inputs[0]
    turned = [list(item.attributes["perm"].as_ints()) for item in chain if item.op_type == "Transpose"]
    is_stored = value is not None and isinstance(value.const_value, ir.ExternalTensor)
    return chain if is_stored and turned == [[1, 0]] else []


def _stored(first: ir.Node) -> ir.ExternalTensor:
    value = first.inputs[0]
    if value is None or not isinstance(value.const_value, ir.ExternalTensor):
        raise TypeError(f"{first.name} reads no stored tensor")
    return value.const_value


def _cut(graph: ir.Graph, node: ir.Node, chain: list[ir.Node], budget_bytes: int) -> None:
    stored = _stored(chain[0])
    rows, depth = (int(size) for size in stored.shape.numpy())
    row_bytes = (stored.length or 0) // rows
    step = max(1, budget_bytes // (_WIDE_BYTES * depth))
    products = []
    for start in range(0, rows, step):
        count = min(step, rows - start)
        name = f"{stored.name}.rows.{start}"
        part = ir.ExternalTensor(
            stored.location, (stored.offset or 0) + start * row_bytes, count * row_bytes, stored.dtype,
            shape=ir.Shape((count, depth)), name=name, base_dir=stored.base_dir,
        )  # fmt: skip
        value = ir.Value(name=name, type=ir.TensorType(stored.dtype), shape=part.shape, const_value=part)
        graph.initializers[name] = value
        operand = value
        for item in chain:
            operand = _insert(graph, node, item.op_type, [operand], list(item.attributes.values()), f".rows.{start}")
        left = node.inputs[0]
        products.append(_insert(graph, node, "MatMul", [left, operand], [], f".rows.{start}"))
    joined = _insert(graph, node, "Concat", products, [ir.AttrInt64("axis", -1)], ".joined")
    _take_the_place(graph, node, joined)


def _insert(
    graph: ir.Graph, before: ir.Node, op: str, inputs: Sequence[ir.Value | None], attributes: list[ir.Attr], suffix: str
) -> ir.Value:
    new = ir.Node("", op, inputs, attributes, name=f"{before.name}{suffix}.{op}")
    new.metadata_props.update(before.metadata_props)
    output = new.outputs[0]
    output.name = f"{before.outputs[0].name}{suffix}.{op}"
    output.type = before.outputs[0].type
    graph.insert_before(before, new)
    return output


def _take_the_place(graph: ir.Graph, node: ir.Node, joined: ir.Value) -> None:
    """Let a value stand for a node's output, under its name, as an output of the graph too."""
    old = node.outputs[0]
    name, shape = old.name, old.shape
    old.name = f"{name}.whole"
    ir.convenience.replace_all_uses_with(old, joined, replace_graph_outputs=True)
    joined.name, joined.shape = name, shape
    graph.remove(node, safe=True)
