"""Cut a graph into pieces of bounded weights, so that it can run with few of them in memory at a time.

What depends on weights alone (a Cast, a Transpose of a matrix) goes into every piece that reads it; everything else
keeps its order. Values that cross a cut are inputs and outputs of the pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True)
class Segment:
    """A piece of a graph: nodes in order, the values that it reads, and the values that others read of it."""

    nodes: tuple[ir.Node, ...]
    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]


def has_subgraphs(model: ir.Model) -> bool:
    """Return True when a node of the main graph holds a subgraph."""
    kinds = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return any(attr.type in kinds for node in model.graph for attr in node.attributes.values())


def split(model: ir.Model, budget_bytes: int, wanted: Collection[str]) -> list[Segment]:
    """Return the pieces of a graph without subgraphs.

    Args:
        model: The graph.
        budget_bytes: Weights of one piece as float32; one node's own weights may be more.
        wanted: Names of values that a caller wants besides those that the pieces exchange.
    """
    constant: dict[ir.Node, None] = {}
    groups: list[dict[ir.Node, None]] = []
    sizes: dict[str, int] = {}
    for node in model.graph:
        if _is_constant(node, constant) and not any(output.name in wanted for output in node.outputs):
            constant[node] = None
            continue
        needed = _ancestors(node, constant)
        new = {name: size for name, size in _weights([*needed, node]).items() if name not in sizes}
        if not groups or sum(sizes.values()) + sum(new.values()) > budget_bytes:
            groups.append({})
            sizes = {}
            new = _weights([*needed, node])
        sizes |= new
        groups[-1] |= dict.fromkeys([*needed, node])
    return _segments(groups, wanted)


def _is_constant(node: ir.Node, constant: Mapping[ir.Node, None]) -> bool:
    return all(value is None or value.is_initializer() or (value.producer() in constant) for value in node.inputs)


def _ancestors(node: ir.Node, constant: Mapping[ir.Node, None]) -> list[ir.Node]:
    """Return the constant nodes that a node depends on, in an order in which they can run."""
    found: dict[ir.Node, None] = {}

    def visit(value: ir.Value | None) -> None:
        producer = None if value is None else value.producer()
        if producer is not None and producer in constant and producer not in found:
            for earlier in producer.inputs:
                visit(earlier)
            found[producer] = None

    for value in node.inputs:
        visit(value)
    return list(found)


def _weights(nodes: Collection[ir.Node]) -> dict[str, int]:
    """Return {initializer: bytes as float32} of what some nodes read."""
    values = [value for node in nodes for value in node.inputs if value is not None and value.is_initializer()]
    return {
        str(value.name): 4 * int(value.const_value.size) if value.const_value is not None else 0 for value in values
    }


def _segments(groups: list[dict[ir.Node, None]], wanted: Collection[str]) -> list[Segment]:
    readers: dict[ir.Value, int] = {}
    for number, nodes in enumerate(groups):
        for node in nodes:
            readers |= {value: number for value in node.inputs if value is not None}
    result = []
    for number, nodes in enumerate(groups):
        made = {output: None for node in nodes for output in node.outputs}
        read = {value: None for node in nodes for value in node.inputs if value is not None}
        inputs = tuple(value for value in read if value not in made and not value.is_initializer())
        outputs = tuple(
            value
            for value in made
            if readers.get(value, -1) > number or value.is_graph_output() or value.name in wanted
        )
        result.append(Segment(tuple(nodes), inputs, outputs))
    return result


def segment_model(model: ir.Model, segment: Segment) -> ir.Model:
    """Return a piece as a model of its own; weights stay references, functions come along."""
    twins: dict[ir.Value, ir.Value] = {}
    for read in segment.inputs:
        twins[read] = ir.Value(name=read.name, type=read.type)
    nodes = []
    initializers: dict[str, ir.Value] = {}
    for node in segment.nodes:
        for value in node.inputs:
            if value is not None and value.is_initializer() and value not in twins:
                twins[value] = ir.Value(
                    name=value.name, type=value.type, shape=value.shape, const_value=value.const_value
                )
                initializers[str(value.name)] = twins[value]
        clone = ir.Node(
            node.domain, node.op_type, [None if value is None else twins[value] for value in node.inputs],
            list(node.attributes.values()), overload=node.overload, num_outputs=len(node.outputs),
            version=node.version, name=node.name,
        )  # fmt: skip
        for old, new in zip(node.outputs, clone.outputs, strict=True):
            new.name, new.type = old.name, old.type
            twins[old] = new
        nodes.append(clone)
    graph = ir.Graph(
        [twins[value] for value in segment.inputs],
        [twins[value] for value in segment.outputs],
        nodes=nodes,
        initializers=list(initializers.values()),
        opset_imports=model.graph.opset_imports,
        name=model.graph.name,
    )
    functions = [function.clone() for function in model.functions.values()]
    return ir.Model(graph, ir_version=model.ir_version, functions=functions)
