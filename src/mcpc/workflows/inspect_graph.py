"""What an ONNX file holds: opsets, inputs and outputs, ops, weights, functions. Weights are not loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx_ir as ir

from mcpc.core.tensors import BITS
from mcpc.graph import io

Weight = tuple[str, ir.TensorProtocol]

_LARGEST = 5
#: Attributes of Constant that hold a tensor; the others are scalars and lists of a few elements.
_CONSTANT_TENSOR = "value"


def graph_summary(path: Path) -> dict[str, Any]:
    """Return the facts of one ONNX file."""
    model = io.load(path)
    graph = model.graph
    initialized = set(graph.initializers)
    stored, constants = _initializers(model), _constants(model)
    return {
        "file_bytes": path.stat().st_size,
        "ir_version": model.ir_version,
        "producer": f"{model.producer_name or ''} {model.producer_version or ''}".strip(),
        "opsets": {domain or "ai.onnx": version for domain, version in sorted(model.opset_imports.items())},
        "metadata": dict(sorted(model.metadata_props.items())),
        "inputs": [_value(value) for value in graph.inputs if value.name not in initialized],
        "outputs": [_value(value) for value in graph.outputs],
        "nodes": sum(1 for _ in graph.all_nodes()),
        "ops": _ops(graph.all_nodes()),
        "subgraphs": sum(1 for _ in model.graphs()) - 1,
        "initializers": _weights(stored),
        "constants": _weights(constants),
        "external_files": _external(stored + constants, path.parent),
        "functions": [_function(function) for function in model.functions.values()],
    }


def _value(value: ir.Value) -> dict[str, Any]:
    shape = None if value.shape is None else [dim if isinstance(dim, int) else str(dim) for dim in value.shape]
    dtype = "unknown" if value.dtype is None else io.dtype_name(value.dtype)
    return {"name": value.name or "", "dtype": dtype, "shape": shape}


def _ops(nodes: Iterable[ir.Node]) -> dict[str, int]:
    """Count ops, most frequent first; ops of other domains are spelled `domain::Op`."""
    counts = Counter(f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in nodes)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _initializers(model: ir.Model) -> list[Weight]:
    """Return (name, tensor) of the initializers of the graph and its subgraphs."""
    values = io.all_initializers(model)
    return [(value.name or "", value.const_value) for value in values if value.const_value is not None]


def _constants(model: ir.Model) -> list[Weight]:
    """Return (name, tensor) of weights in Constant nodes: some exporters put every weight there."""
    found = []
    for node in model.graph.all_nodes():
        attribute = node.attributes.get(_CONSTANT_TENSOR) if node.op_type == "Constant" else None
        if attribute is not None and attribute.value is not None and node.outputs:
            found.append((node.outputs[0].name or "", attribute.as_tensor()))
    return found


def _weights(weights: list[Weight]) -> dict[str, Any]:
    groups: dict[str, dict[str, int]] = {}
    sizes: list[dict[str, Any]] = []
    for name, tensor in weights:
        dtype = io.dtype_name(tensor.dtype)
        size = (tensor.size * BITS.get(dtype, 0) + 7) // 8
        group = groups.setdefault(dtype, {"tensors": 0, "elements": 0, "bytes": 0})
        group["tensors"] += 1
        group["elements"] += tensor.size
        group["bytes"] += size
        shape = [dim if isinstance(dim, int) else str(dim) for dim in tensor.shape]
        sizes.append({"name": name, "dtype": dtype, "shape": shape, "bytes": size})
    sizes.sort(key=lambda item: (-item["bytes"], item["name"]))
    total = {key: sum(group[key] for group in groups.values()) for key in ("tensors", "elements", "bytes")}
    return {**total, "dtypes": dict(sorted(groups.items())), "largest": sizes[:_LARGEST]}


def _external(weights: list[Weight], base: Path) -> dict[str, int]:
    """Return {file, relative to the graph: its bytes} of external data."""
    names = {str(tensor.location) for _, tensor in weights if isinstance(tensor, ir.ExternalTensor)}
    return {name: (base / name).stat().st_size for name in sorted(names)}


def _function(function: ir.Function) -> dict[str, Any]:
    return {
        "name": f"{function.domain}::{function.name}",
        "inputs": [value.name or "" for value in function.inputs],
        "outputs": [value.name or "" for value in function.outputs],
        "ops": _ops(function.all_nodes()),
    }
