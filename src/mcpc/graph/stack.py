"""Expand stacks of equal layers: the one that was traced is cloned in place of every `mcpc::Layer` node.

before                                              after
a = mcpc::LayerInput <kind=0, index=0> (x)          b = Op (x, layers.0.w)
b = Op (a, layers.0.w)
c = mcpc::LayerOutput <kind=0, index=0> (b)
d = mcpc::Layer <kind=0, path="layers.1"> (c)       d = Op (b, layers.1.w)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import onnx_ir as ir

from mcpc.errors import InternalError
from mcpc.graph.hide import is_unbound, unbound
from mcpc.graph.io import NAME_SCOPES

_DOMAIN = "mcpc"
LAYER = "mcpc::Layer"
LAYER_INPUT = "mcpc::LayerInput"
LAYER_OUTPUT = "mcpc::LayerOutput"


@dataclass
class _Template:
    """The traced layer of one kind: marks by index, and the nodes between them in order."""

    path: str = ""
    inputs: dict[int, ir.Node] = field(default_factory=dict)
    outputs: dict[int, ir.Node] = field(default_factory=dict)
    body: tuple[ir.Node, ...] = ()
    weights: tuple[ir.Value, ...] = ()


def expand_layers(model: ir.Model) -> int:
    """Replace every `mcpc::Layer` node by a clone of its kind's layer, with that layer's own weights.

    Weights are the unbound initializers whose names start with the layer's path; everything else that the layer
    reads from outside (constants, sizes) is shared by the clones. Numerics: BITWISE.

    Returns:
        The number of clones.

    Raises:
        InternalError: The traced layer has another form than its stubs.
    """
    graph = model.graph
    templates: dict[int, _Template] = {}
    stubs: list[ir.Node] = []
    for node in graph:
        name = f"{node.domain}::{node.op_type}"
        if name == LAYER:
            stubs.append(node)
        elif name in (LAYER_INPUT, LAYER_OUTPUT):
            template = templates.setdefault(_integer(node, "kind"), _Template(_text(node, "path")))
            marks = template.inputs if name == LAYER_INPUT else template.outputs
            marks[_integer(node, "index")] = node
    for kind in sorted({_integer(stub, "kind") for stub in stubs}):
        _find_body(graph, templates[kind])
    for stub in stubs:
        _expand(graph, stub, templates[_integer(stub, "kind")])
    for template in templates.values():
        for mark in (*template.inputs.values(), *template.outputs.values()):
            _replace(mark.outputs[0], _required(mark.inputs[0], mark))
            graph.remove(mark, safe=True)
    if all(node.domain != _DOMAIN for node in graph):
        model.opset_imports.pop(_DOMAIN, None)
    return len(stubs)


def _integer(node: ir.Node, name: str) -> int:
    return node.attributes[name].as_int()


def _text(node: ir.Node, name: str) -> str:
    return node.attributes[name].as_string()


def _required(value: ir.Value | None, node: ir.Node) -> ir.Value:
    if value is None:
        raise InternalError("a layer mark has no input", where=str(node.name))
    return value


def _replace(old: ir.Value, new: ir.Value) -> None:
    """Let a value take the place of another; a graph output keeps its name."""
    if old.is_graph_output():
        old.name, new.name = f"{old.name}@mark", old.name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def _find_body(graph: ir.Graph, template: _Template) -> None:
    """Fill in the layer's weights, and the nodes that depend on its inputs or weights and lead to its outputs."""
    template.weights = tuple(
        value for name, value in graph.initializers.items() if _inside(name, template.path) and is_unbound(value)
    )
    after = _readers([*(mark.outputs[0] for mark in template.inputs.values()), *template.weights])
    needed: set[ir.Node] = set()
    pending = [mark.inputs[0] for mark in template.outputs.values()]
    while pending:
        value = pending.pop()
        node = None if value is None else value.producer()
        if node in after and node not in needed and not _is_mark(node):
            needed.add(node)
            pending += node.inputs
    template.body = tuple(node for node in graph if node in needed)


def _is_mark(node: ir.Node) -> bool:
    return f"{node.domain}::{node.op_type}" in (LAYER, LAYER_INPUT, LAYER_OUTPUT)


def _inside(name: str, path: str) -> bool:
    return name.startswith(f"{path}.")


def _readers(values: Iterable[ir.Value]) -> set[ir.Node]:
    """Return every node that depends on one of the values."""
    found: set[ir.Node] = set()
    pending = list(values)
    while pending:
        for node in pending.pop().consumers():
            if node not in found:
                found.add(node)
                pending += node.outputs
    return found


def _expand(graph: ir.Graph, stub: ir.Node, template: _Template) -> None:
    """Put a clone of the template's body in the place of a stub."""
    path = _text(stub, "path")
    twins: dict[ir.Value, ir.Value] = {}
    given = iter(stub.inputs)
    for index, name in enumerate(_text(stub, "inputs").split(",")):
        own = None if name else _required(next(given), stub)
        mark = template.inputs.get(index)  # absent when the layer reads no such input
        if mark is not None:
            twins[mark.outputs[0]] = own or _own_input(graph, _required(mark.inputs[0], mark), name)
        elif name:
            raise InternalError("a layer does not read its own cache", where=path, got=name)
    for weight in template.weights:
        twins[weight] = _own_weight(graph, weight, path + str(weight.name)[len(template.path) :])
    clones = [_clone(node, twins, template.path, path) for node in template.body]
    graph.insert_before(stub, clones)
    returned = iter(stub.outputs)
    for index, name in enumerate(_text(stub, "outputs").split(",")):
        mark = template.outputs.get(index)  # absent when nothing reads this output
        source = None if mark is None else _required(mark.inputs[0], mark)
        result = None if source is None else twins.get(source, source)
        if name and result is not None:
            result.name = name
            graph.outputs.append(result)
        elif not name:
            output = next(returned)
            if result is not None:
                _replace(output, result)
    graph.remove(stub, safe=True)


def _own_input(graph: ir.Graph, first: ir.Value, name: str) -> ir.Value:
    """Return the graph input of a layer's own cache, of the form of the first layer's."""
    own = ir.Value(name=name)
    _same_form(own, first)
    graph.inputs.append(own)
    return own


def _own_weight(graph: ir.Graph, weight: ir.Value, name: str) -> ir.Value:
    if name in graph.initializers:
        return graph.initializers[name]
    own = ir.Value(name=name)
    _same_form(own, weight)
    own.const_value = unbound(own)
    graph.register_initializer(own)
    return own


def _same_form(new: ir.Value, old: ir.Value) -> None:
    """Give a value the dtype and shape of another, as objects of its own: binding changes them in place."""
    new.shape = None if old.shape is None else old.shape.copy()
    new.type = None if old.dtype is None else ir.TensorType(old.dtype)


def _clone(node: ir.Node, twins: dict[ir.Value, ir.Value], old_path: str, path: str) -> ir.Node:
    clone = ir.Node(
        node.domain,
        node.op_type,
        [None if value is None else twins.get(value, value) for value in node.inputs],
        list(node.attributes.values()),
        overload=node.overload,
        num_outputs=len(node.outputs),
        version=node.version,
        name=f"{node.name}@{path}",
    )
    for old, new in zip(node.outputs, clone.outputs, strict=True):
        new.name = f"{old.name}@{path}"
        _same_form(new, old)
        twins[old] = new
    scopes = node.metadata_props.get(NAME_SCOPES)
    if scopes:
        scopes = scopes.replace(f"'{old_path}'", f"'{path}'").replace(f"'{old_path}.", f"'{path}.")
        clone.metadata_props[NAME_SCOPES] = scopes
    return clone
