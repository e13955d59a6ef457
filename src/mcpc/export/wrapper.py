"""Base of the wrappers that are traced, and what they share."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionLayer

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
        self._aliases: Mapping[str, str] = {}
        self._dropped: Collection[str] = ()

    def leave_out(self, aliases: Mapping[str, str], outputs: Collection[str]) -> None:
        """Trace without some inputs, for which others stand in, and without some outputs."""
        self._aliases, self._dropped = aliases, outputs

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return the outputs in the order of the plan."""
        raise InternalError("a wrapper must compute something", where=type(self).__name__)

    def eager(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return the same outputs in PyTorch; differs from `compute` where that uses a symbolic op."""
        return self.compute(tensors)

    def forward(self, *tensors: torch.Tensor) -> Outputs:
        """Trace entry: tensors in the order of `component.inputs`, without those that are left out."""
        names = [spec.name for spec in self.component.inputs if spec.name not in self._aliases]
        given = dict(zip(names, tensors, strict=True))
        given |= {name: given[other] for name, other in self._aliases.items()}
        results = zip(self.component.outputs, self.compute(given), strict=True)
        return tuple(tensor for spec, tensor in results if spec.name not in self._dropped)

    def cache_of(self, tensors: Mapping[str, torch.Tensor], prefix: str) -> DynamicCache:
        """Return a transformers cache filled with `<prefix>.<i>.key|value`, or the state of a convolution."""
        if self.component.cache is None:
            raise InternalError("a wrapper with a cache needs a component with one", where=self.component.name)
        cache = DynamicCache()
        cache.layers = [
            _filled(tensors[f"{prefix}.{i}.key"], tensors[f"{prefix}.{i}.value"])
            if prefix == "cross" or "key" in parts
            else _convolved(tensors[f"{prefix}.{i}.conv"])
            for i, parts in enumerate(self.component.cache.parts)
        ]
        return cache


def _filled(keys: torch.Tensor, values: torch.Tensor) -> DynamicLayer:
    """Return a cache layer that holds these very tensors; the constructor of a cache would concatenate them anew."""
    layer = DynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer


def _convolved(state: torch.Tensor) -> LinearAttentionLayer:
    """Return a cache layer with the last inputs of a convolution; zeros are the state before the first token."""
    layer = LinearAttentionLayer()
    layer.lazy_initialization(conv_states=state)
    layer.conv_states[0] = state.clone()  # written in place, which a graph's input is not
    layer.has_previous_state[0] = True
    return layer


def flat_cache(cache: DynamicCache) -> Outputs:
    """Return the keys and values, or the state, of every layer, in order."""
    tensors: list[torch.Tensor] = []
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionLayer) and layer.conv_states[0] is not None:
            tensors.append(layer.conv_states[0])
            continue
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
