"""Small edits that the rewrites share."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir


def constant_integers(value: ir.Value | None) -> list[int] | None:
    """Return the integers of a constant, None when a value is computed."""
    if value is None or value.is_graph_input():
        return None
    tensor = value.const_value
    producer = value.producer()
    if tensor is None and producer is not None and producer.op_type == "Constant" and "value" in producer.attributes:
        tensor = producer.attributes["value"].as_tensor()
    return None if tensor is None else [int(item) for item in tensor.numpy().reshape(-1)]


def feed(graph: ir.Graph, node: ir.Node, value: ir.Value | None) -> str:
    """Let a value take the place of a node's output, and remove the node; return why not, "" when it did."""
    output = node.outputs[0]
    if value is None:
        return "an input is missing"
    if output.is_graph_output():
        return "the result is an output of the graph"
    ir.convenience.replace_all_uses_with(output, value)
    remove(graph, node)
    return ""


def remove_unread(graph: ir.Graph, node: ir.Node) -> None:
    """Remove a node whose results nothing reads."""
    if node.graph is graph and not any(output.uses() or output.is_graph_output() for output in node.outputs):
        remove(graph, node)


def remove(graph: ir.Graph, node: ir.Node) -> None:
    """Remove a node, and the initializers that only it read."""
    read = [value for value in node.inputs if value is not None]
    graph.remove(node, safe=True)
    drop_unread(graph, read)


def drop_unread(graph: ir.Graph, values: Iterable[ir.Value]) -> None:
    """Remove those of some values that are initializers of the graph and that nothing reads."""
    for value in values:
        if value.is_initializer() and not value.uses() and not value.is_graph_output():
            graph.initializers.pop(str(value.name), None)
