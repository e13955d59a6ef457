"""The values at which the modules of the source model end, found by the module path that every node carries."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from mcpc.graph.io import module_of


@dataclass(frozen=True)
class ModuleOutput:
    """The last value computed inside a module of the source model."""

    module: str
    value: str
    node: str


def module_outputs(model: ir.Model) -> list[ModuleOutput]:
    """Return, in execution order, the value at which each innermost module ends; of several calls, the last."""
    last: dict[str, tuple[int, ir.Node]] = {}
    for number, node in enumerate(model.graph):
        module = module_of(node)
        if module and node.outputs and node.outputs[0].name is not None:
            last[module] = (number, node)
    ordered = sorted(last.items(), key=lambda item: item[1][0])
    return [ModuleOutput(module, str(node.outputs[0].name), str(node.name)) for module, (_, node) in ordered]


def producer_of(model: ir.Model, output: str) -> str:
    """Return the name of the node that computes a graph output, or "" when there is none."""
    for value in model.graph.outputs:
        if value.name == output and (node := value.producer()) is not None:
            return str(node.name)
    return ""
