"""Base of the wrappers that are traced, and what they share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from mcpc.errors import InternalError
from mcpc.templates.plan import ExportPlan, PlannedComponent

Outputs = tuple[torch.Tensor, ...]


class Wrapper(torch.nn.Module):
    """Base: calls `compute` with the named tensors and returns a flat tuple in the order of the plan."""

    def __init__(self, model: transformers.PreTrainedModel, component: PlannedComponent, plan: ExportPlan) -> None:
        super().__init__()
        self.model = model
        self.component = component
        self.plan = plan

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return the outputs in the order of the plan."""
        raise InternalError("a wrapper must compute something", where=type(self).__name__)

    def eager(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return the same outputs in PyTorch; differs from `compute` where that uses a symbolic op."""
        return self.compute(tensors)

    def forward(self, *tensors: torch.Tensor) -> Outputs:
        """Trace entry: tensors in the order of `component.inputs`."""
        names = [spec.name for spec in self.component.inputs]
        return self.compute(dict(zip(names, tensors, strict=True)))

    def cache_of(self, tensors: Mapping[str, torch.Tensor], prefix: str) -> DynamicCache:
        """Return a transformers cache filled with `<prefix>.<i>.key|value`."""
        if self.component.cache is None:
            raise InternalError("a wrapper with a cache needs a component with one", where=self.component.name)
        layers = range(self.component.cache.layers)
        return DynamicCache([(tensors[f"{prefix}.{i}.key"], tensors[f"{prefix}.{i}.value"]) for i in layers])


def flat_cache(cache: DynamicCache) -> Outputs:
    """Return the keys and values of every layer, in order."""
    tensors: list[torch.Tensor] = []
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, CacheLayerMixin) or layer.keys is None or layer.values is None:
            raise InternalError("a cache layer holds no keys and values", where=f"layer {number}")
        tensors += (layer.keys, layer.values)
    return tuple(tensors)


def tensor_of(module: torch.nn.Module, name: str) -> torch.Tensor:
    """Return a parameter of a module; not `get_parameter`, because a trace puts plain tensors in their place."""
    tensor = getattr(module, name)
    if not isinstance(tensor, torch.Tensor):
        raise InternalError("the model has another layout than its wrapper expects", where=name, expected="a tensor")
    return tensor
