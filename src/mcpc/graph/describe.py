"""Facts of a graph, read from the graph: inputs and outputs, precision, opsets. Nothing here is typed in."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from mcpc.errors import InternalError
from mcpc.graph.io import all_initializers, dtype_name
from mcpc.package import manifest


def tensors(values: Iterable[ir.Value]) -> tuple[manifest.Tensor, ...]:
    """Return graph inputs or outputs as manifest tensors."""
    return tuple(_tensor(value) for value in values)


def _tensor(value: ir.Value) -> manifest.Tensor:
    if value.name is None or value.dtype is None or value.shape is None:
        raise InternalError("a graph input or output has no dtype or shape", where=str(value.name))
    shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
    return manifest.Tensor(name=value.name, dtype=dtype_name(value.dtype), shape=shape)


def precision(model: ir.Model) -> manifest.Precision:
    """Return elements and bytes of the external weights by dtype; small inline constants are not weights."""
    weights: dict[str, int] = {}
    total = 0
    for value in all_initializers(model):
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            name = dtype_name(tensor.dtype)
            weights[name] = weights.get(name, 0) + tensor.size
            total += tensor.nbytes
    return manifest.Precision(weights=dict(sorted(weights.items())), bytes=total)


def weight_files(model: ir.Model) -> tuple[str, ...]:
    """Return the files that the graph's initializers point into, sorted."""
    return tuple(
        sorted(
            {
                str(v.const_value.location)
                for v in all_initializers(model)
                if isinstance(v.const_value, ir.ExternalTensor)
            }
        )
    )


def functions(model: ir.Model) -> tuple[str, ...]:
    """Return the qualified names of the model-local functions, sorted."""
    return tuple(sorted(f"{function.domain}::{function.name}" for function in model.functions.values()))


def opsets(models: Iterable[ir.Model]) -> dict[str, int]:
    """Return the highest opset of each domain."""
    result: dict[str, int] = {}
    for model in models:
        for domain, version in model.opset_imports.items():
            result[domain] = max(version, result.get(domain, 0))
    return dict(sorted(result.items()))
