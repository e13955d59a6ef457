"""Insert nodes and initializers into a graph, keep module names on them, and remove what is no longer used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from mcpc.core.runner import Array

Shape = Iterable[int | ir.SymbolicDim]


class Editor:
    """Edits one model.

    Attributes:
        made: For each new initializer, the name of the weight it was made from and its transform.
    """

    def __init__(self, model: ir.Model) -> None:
        self.made: dict[str, tuple[str, str]] = {}
        self._constants: dict[tuple[int, str], ir.Value] = {}
        self._names = {str(value.name) for graph in model.graphs() for value in _values(graph)}

    def name(self, wanted: str) -> str:
        """Return `wanted`, or with a number when a value of the model has that name; it is taken from now on."""
        name, number = wanted, 1
        while name in self._names:
            name, number = f"{wanted}_{number}", number + 1
        self._names.add(name)
        return name

    def initializer(self, graph: ir.Graph, tensor: ir.TensorProtocol, weight: str, transform: str) -> ir.Value:
        """Register a tensor made from a weight; its name must come from `name`."""
        self.made[str(tensor.name)] = (weight, transform)
        return _register(graph, tensor)

    def integers(self, graph: ir.Graph, values: list[int]) -> ir.Value:
        """Return an int64 initializer [len(values)], one for all its uses in a graph."""
        label = "mcpc.int64." + "_".join(str(value) for value in values)
        key = (id(graph), label)
        if key not in self._constants:
            array: Array = np.array(values, np.int64)
            self._constants[key] = _register(graph, ir.Tensor(array, name=self.name(label)))
        return self._constants[key]

    def insert(
        self,
        before: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        output: str,
        dtype: ir.DataType,
        shape: Shape | None,
        attributes: Sequence[ir.Attr] = (),
        domain: str = "",
    ) -> ir.Value:
        """Insert a node with one output before `before`, with the metadata of `before`; return the output."""
        name = self.name(output)
        node = ir.Node(domain, op_type, inputs, attributes, num_outputs=1, name=name)
        node.metadata_props.update(before.metadata_props)
        result = node.outputs[0]
        result.name, result.type = name, ir.TensorType(dtype)
        result.shape = None if shape is None else ir.Shape(shape)
        graph_of(before).insert_before(before, node)
        return result

    def replace(self, node: ir.Node, result: ir.Value) -> None:
        """Let `result` take the place, name, shape and type of the only output of `node`, and remove `node`."""
        old = node.outputs[0]
        name, shape, kind = old.name, old.shape, old.type
        ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
        graph_of(node).remove(node, safe=True)
        self._names.discard(str(result.name))
        result.name, result.shape, result.type = name, shape, kind

    def drop_unused(self, value: ir.Value) -> None:
        """Remove a weight (and Transposes of it) that nothing uses any more."""
        for use in value.uses():
            if use.node.op_type == "Transpose" and _is_unused(use.node.outputs[0]):
                graph_of(use.node).remove(use.node, safe=True)
        if not _is_unused(value):
            return
        producer = value.producer()
        if producer is not None:
            graph_of(producer).remove(producer, safe=True)
        elif value.graph is not None:
            del value.graph.initializers[str(value.name)]


def _register(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    shape = ir.Shape(int(size) for size in tensor.shape.numpy())
    value = ir.Value(name=tensor.name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def _is_unused(value: ir.Value) -> bool:
    return not value.uses() and not value.is_graph_output()


def graph_of(node: ir.Node) -> ir.Graph:
    """Return the graph that a node is in."""
    graph = node.graph
    if not isinstance(graph, ir.Graph):
        raise TypeError(f"node {node.name} is in no graph")
    return graph


def _values(graph: ir.Graph) -> list[ir.Value]:
    outputs = [value for node in graph for value in node.outputs]
    return [*graph.inputs, *graph.initializers.values(), *outputs]
