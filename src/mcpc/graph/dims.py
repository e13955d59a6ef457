"""Give dynamic dimensions their readable names: torch calls them s17, s29, ..."""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx_ir as ir

from mcpc.core.tensors import Dimension, TensorSpec
from mcpc.errors import InternalError

_SYMBOL = re.compile(r"\bs\d+\b")


def rename_dimensions(model: ir.Model, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> dict[str, str]:
    """Rename every symbolic dimension after the graph inputs' named dimensions.

    Outputs and inputs get the shapes of their specs; intermediate values get the same names, sums such as
    `past+sequence` included.

    Returns:
        What the graph itself says of an output dimension whose name no input has, such as
        {"feature_rows": "16*images"}.

    Raises:
        InternalError: Two names claim one symbol.
    """
    names: dict[str, str] = {}
    for value, spec in zip(model.graph.inputs, inputs, strict=True):
        for got, want in zip(value.shape or (), spec.shape, strict=True):
            if isinstance(want, str) and "+" not in want:
                symbol = str(got)
                if names.setdefault(symbol, want) != want:
                    raise InternalError(f"dimensions {names[symbol]} and {want} were traced as one", where=spec.name)
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value.shape is not None:
                value.shape = ir.Shape([_renamed(dim, names) for dim in value.shape])
    relations = {
        want: str(_renamed(got, names))
        for value, spec in zip(model.graph.outputs, outputs, strict=True)
        for got, want in zip(value.shape or (), spec.shape, strict=True)
        if isinstance(want, str) and "+" not in want and want not in names.values()
    }
    for values, specs in ((model.graph.inputs, inputs), (model.graph.outputs, outputs)):
        for value, spec in zip(values, specs, strict=True):
            value.shape = ir.Shape(list(spec.shape))
    return relations


def _renamed(dim: int | ir.SymbolicDim, names: dict[str, str]) -> Dimension | None:
    if isinstance(dim, int):
        return dim
    if dim.value is None:
        return None
    text = _SYMBOL.sub(lambda match: names.get(match[0], match[0]), str(dim.value))
    if " + " in text and re.fullmatch(r"[a-z_]+( \+ [a-z_]+)+", text):
        text = "+".join(sorted(text.split(" + ")))
    return text
