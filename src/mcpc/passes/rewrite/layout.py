"""Nodes that only move data: pairs that cancel, and chains that are one step.

All of these passes are exact: no element is computed anew. They look at the main graph, where a traced model has its
nodes, and leave alone what they cannot prove from the graph itself.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import onnx_ir as ir

from mcpc.core.passes import Numerics, Pass, PassResult, Skip
from mcpc.passes.rewrite.edit import constant_integers, drop_unread, feed, remove_unread

_SHARED = "the first result is used elsewhere too"


class LayoutPass(Pass[None]):
    """Joins a node with the one that feeds it, again and again until no pair is left."""

    numerics = Numerics.BITWISE
    op_types: tuple[str, ...] = ()

    def rewrite(self, model: ir.Model) -> PassResult:
        """Join every pair that can be; the details count nodes before and after."""
        before = sum(1 for _ in model.graph)
        skips: dict[str, Skip] = {}
        modified = False
        for second in list(model.graph):
            while second.graph is not None and (first := self._pair(second)) is not None:
                reason = self.join(model.graph, first, second)
                if reason:
                    skips[str(second.name)] = Skip(str(second.name), reason)
                    break
                modified = True
                remove_unread(model.graph, first)
        after = sum(1 for _ in model.graph)
        return PassResult(modified, tuple(skips.values()), {"nodes_before": before, "nodes_after": after})

    def _pair(self, second: ir.Node) -> ir.Node | None:
        """Return the node that feeds a node, when both are of the kinds that the pass joins."""
        if second.domain or second.op_type not in self.op_types:
            return None
        source = second.inputs[0]
        first = None if source is None else source.producer()
        if first is None or first.domain or first.op_type not in self.op_types or first.graph is not second.graph:
            return None
        return first

    @abstractmethod
    def join(self, graph: ir.Graph, first: ir.Node, second: ir.Node) -> str:
        """Join a pair, or return why not."""


class JoinTransposes(LayoutPass):
    """Turn axes once.

    Before::

        a = Transpose <perm = p> (x)
        y = Transpose <perm = q> (a)

    After::

        y = Transpose <perm = p[q]> (x)

    or x itself where the two cancel.

    Declines when a permutation is not given, or when the first result is used elsewhere and the two do not cancel.

    Source: ONNX Transpose-23.
    """

    id = "rewrite.join-transposes"
    version = 1
    op_types = ("Transpose",)

    def join(self, graph: ir.Graph, first: ir.Node, second: ir.Node) -> str:
        """Compose two permutations."""
        if "perm" not in first.attributes or "perm" not in second.attributes:
            return "a permutation is not given"
        inner, outer = first.attributes["perm"].as_ints(), second.attributes["perm"].as_ints()
        composed = [inner[axis] for axis in outer]
        if composed == sorted(composed):
            return feed(graph, second, first.inputs[0])
        if len(first.outputs[0].uses()) > 1 or first.outputs[0].is_graph_output():
            return _SHARED
        second.attributes["perm"] = ir.AttrInt64s("perm", composed)
        second.replace_input_with(0, first.inputs[0])
        return ""


class JoinReshapes(LayoutPass):
    """Reshape once.

    Before::

        a = Reshape (x, s)
        y = Reshape (a, t)

    After::

        y = Reshape (x, t)

    Declines when t is not constant or has a 0 (which copies a size of a, or is empty), or when a is used elsewhere.

    Source: ONNX Reshape-23.
    """

    id = "rewrite.join-reshapes"
    version = 1
    op_types = ("Reshape",)

    def join(self, graph: ir.Graph, first: ir.Node, second: ir.Node) -> str:
        """Read the second shape, and let the second node take the first one's input."""
        shape = constant_integers(second.inputs[1])
        if shape is None:
            return "the shape is not constant"
        if 0 in shape:
            return "the shape has a 0, which refers to the first result"
        if len(first.outputs[0].uses()) > 1 or first.outputs[0].is_graph_output():
            return _SHARED
        second.replace_input_with(0, first.inputs[0])
        return ""


class JoinSqueezes(LayoutPass):
    """Add or take away axes of size 1 once.

    Before::

        a = Unsqueeze (x, axes)          a = Unsqueeze (x, p)
        y = Squeeze (a, axes)            y = Unsqueeze (a, q)

    the first also in the other order, the second also with two Squeezes.

    After::

        y = x                            y = Unsqueeze (x, axes of both)

    counted in the longest shape.

    Declines when the axes are not constant, when a Squeeze names none (which it takes is known only when the graph
    runs), when two of a kind count from the end, and when a first result that would have to stay is used elsewhere.

    Source: ONNX Squeeze-23, Unsqueeze-23.
    """

    id = "rewrite.join-squeezes"
    version = 1
    op_types = ("Squeeze", "Unsqueeze")

    def join(self, graph: ir.Graph, first: ir.Node, second: ir.Node) -> str:
        """Cancel two that undo each other, or join two of a kind."""
        axes = [constant_integers(node.inputs[1]) if len(node.inputs) > 1 else None for node in (first, second)]
        if axes[0] is None or axes[1] is None:
            return "the axes are not constant"
        if first.op_type != second.op_type:
            # Both count in the longer shape, the one between them or the ones outside.
            return feed(graph, second, first.inputs[0]) if sorted(axes[0]) == sorted(axes[1]) else "the axes differ"
        if min(*axes[0], *axes[1]) < 0:
            return "axes count from the end"
        if len(first.outputs[0].uses()) > 1 or first.outputs[0].is_graph_output():
            return _SHARED
        outer, inner = (axes[1], axes[0]) if first.op_type == "Unsqueeze" else (axes[0], axes[1])
        joined = ir.tensor(np.array(_joined(outer, inner), np.int64), name=f"{second.outputs[0].name}.axes")
        value = ir.Value(name=joined.name, type=ir.TensorType(joined.dtype), shape=ir.Shape(joined.shape.numpy()))
        value.const_value = joined
        graph.register_initializer(value)
        old = second.inputs[1]
        second.replace_input_with(0, first.inputs[0])
        second.replace_input_with(1, value)
        drop_unread(graph, [old] if old is not None else [])
        return ""


def _joined(outer: list[int], inner: list[int]) -> list[int]:
    """Return all axes in the longest shape: `outer` count there already, `inner` without the outer ones."""
    others = [axis for axis in range(max(outer) + max(inner) + len(outer) + 2) if axis not in outer]
    return sorted([*outer, *(others[axis] for axis in inner)])
