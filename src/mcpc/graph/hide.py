"""Hide weights from an optimizer: with their values absent it must not fold, deduplicate or move them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import onnx_ir as ir

#: Location of an initializer whose bytes are bound later.
UNBOUND = "mcpc-unbound"


def unbound(value: ir.Value) -> ir.ExternalTensor:
    """Return a placeholder tensor for a value; reading it fails, binding replaces it."""
    if value.dtype is None or value.shape is None:
        raise ValueError(f"{value.name}: dtype or shape is unknown")
    return ir.ExternalTensor(UNBOUND, 0, 0, value.dtype, shape=value.shape, name=value.name or "")


def is_unbound(value: ir.Value) -> bool:
    """Return True for an initializer whose bytes are bound later."""
    return isinstance(value.const_value, ir.ExternalTensor) and value.const_value.location == UNBOUND


@contextlib.contextmanager
def hidden_initializers(model: ir.Model, is_weight: Callable[[str], bool]) -> Iterator[None]:
    """Turn weights into graph inputs for the length of the block, then back into unbound initializers.

    Weights that nothing uses afterwards are dropped.
    """
    graph = model.graph
    hidden: list[ir.Value] = []
    for name, value in list(graph.initializers.items()):
        if is_weight(name):
            del graph.initializers[name]
            value.const_value = None
            graph.inputs.append(value)
            hidden.append(value)
    yield
    ids = {id(value) for value in hidden}
    kept = [value for value in graph.inputs if id(value) not in ids]
    weights = [value for value in graph.inputs if id(value) in ids]
    graph.inputs.clear()
    graph.inputs.extend(kept)
    for value in weights:
        if value.uses():
            value.const_value = unbound(value)
            graph.register_initializer(value)
