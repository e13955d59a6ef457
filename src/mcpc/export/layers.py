"""Trace one layer of each kind: every other layer of a stack becomes one opaque node, which `graph/stack.py` expands.

While a component is traced, the layers of every `ModuleList` run under a wrapper. The first layer of a kind runs for
real between two marks; a later layer of that kind runs nothing and leaves a `mcpc::Layer` node with the same tensors in
and out. Two layers are of one kind when their modules are equal but for the values of their parameters, and they are
called with equal arguments but for the values of tensors. The loop around them is the model's own, so masks, rotary
embeddings and taps between layers stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from mcpc.graph.stack import LAYER, LAYER_INPUT, LAYER_OUTPUT

#: Attributes that hold a layer's number. They differ from layer to layer and say nothing of its kind.
_NUMBERS = ("layer_idx", "layer_id", "layer_index")
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_VERSION = 1


@contextlib.contextmanager
def one_layer_of_each_kind(model: torch.nn.Module) -> Iterator[None]:
    """Wrap the layers of every stack of `model` for the length of the block."""
    tracer = _Tracer()
    wrapped: list[torch.nn.Module] = []
    for name, layer in _stacked(model):
        if "forward" not in vars(layer):
            layer.forward = functools.partial(tracer.run, layer, name, layer.forward)
            wrapped.append(layer)
    try:
        yield
    finally:
        for layer in wrapped:
            del layer.forward


def _stacked(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the path and module of every entry of a `ModuleList` that holds two entries of one class or more."""
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList):
            classes = [type(layer) for layer in module]
            for number, layer in enumerate(module):
                if classes.count(type(layer)) > 1 and next(layer.children(), None) is not None:
                    yield f"{path}.{number}", layer


@dataclass(frozen=True)
class _Slot:
    """One tensor of a layer's cache."""

    layer: DynamicLayer
    part: str

    def get(self) -> torch.Tensor:
        value: torch.Tensor = getattr(self.layer, self.part)
        return value

    def set(self, value: torch.Tensor) -> None:
        setattr(self.layer, self.part, value)


@dataclass(frozen=True)
class _Kind:
    """What a layer of this kind returns.

    Attributes:
        number: Of the kind.
        spec, leaves: The structure of its output; tensors in `leaves` are those of the layer that ran.
        where: Which leaves are tensors.
        marked: Those tensors, then the cache tensors that it wrote.
        written: Which cache slots those are.
    """

    number: int
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    where: tuple[int, ...]
    marked: tuple[torch.Tensor, ...]
    written: tuple[int, ...]

    def output(self, values: Sequence[torch.Tensor]) -> Any:
        """Return the output with other tensors in place."""
        leaves = list(self.leaves)
        for index, value in zip(self.where, values, strict=False):
            leaves[index] = value
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass
class _Tracer:
    kinds: dict[Hashable, _Kind] = field(default_factory=dict)
    traced: int = 0
    inside: bool = False

    def run(self, layer: torch.nn.Module, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer for real when it is the first of its kind or lies inside another layer, else leave a node."""
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, Cache))
        slots = _slots(layer, [leaf for leaf in leaves if isinstance(leaf, Cache)])
        # A layer may write into a list or dict that it is given; a stub cannot.
        mutable = any(isinstance(value, (list, dict)) for value in (*args, *kwargs.values()))
        known = all(isinstance(leaf, (*_PLAIN, torch.Tensor, Cache)) for leaf in leaves)
        if self.inside or slots is None or mutable or not known:
            return forward(*args, **kwargs)
        where = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [*(leaves[index] for index in where), *(slot.get() for slot in slots)]
        key = (_signature(layer), str(spec), tuple(map(_described, leaves)), tuple(map(_described, tensors)))
        if key in self.kinds:
            return _stub(self.kinds[key], name, tensors, slots)
        number = self.traced
        self.traced += 1
        marked = [_mark(LAYER_INPUT, tensor, number, index, name) for index, tensor in enumerate(tensors)]
        for index, value in zip(where, marked, strict=False):
            leaves[index] = value
        cached = marked[len(where) :]
        for slot, value in zip(slots, cached, strict=True):
            slot.set(value)
        marked_args, marked_kwargs = pytree.tree_unflatten(leaves, spec)
        self.inside = True
        try:
            output = forward(*marked_args, **marked_kwargs)
        finally:
            self.inside = False
        written = tuple(
            index for index, (slot, old) in enumerate(zip(slots, cached, strict=True)) if slot.get() is not old
        )
        kind, result = _remember(number, name, output, [slots[index] for index in written], written)
        if kind is not None:
            self.kinds[key] = kind
        return result


def _remember(
    number: int, name: str, output: Any, slots: Sequence[_Slot], written: tuple[int, ...]
) -> tuple[_Kind | None, Any]:
    """Mark the outputs of a layer that ran; return its kind, or None when a stub could not return the like."""
    leaves, spec = pytree.tree_flatten(output)
    if not all(isinstance(leaf, (*_PLAIN, torch.Tensor)) for leaf in leaves):
        return None, output
    where = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    results = [*(leaves[index] for index in where), *(slot.get() for slot in slots)]
    marked = [_mark(LAYER_OUTPUT, tensor, number, index, name) for index, tensor in enumerate(results)]
    for slot, value in zip(slots, marked[len(where) :], strict=True):
        slot.set(value)
    kind = _Kind(number, spec, tuple(leaves), tuple(where), tuple(marked), written)
    return kind, kind.output(marked)


def _stub(kind: _Kind, name: str, tensors: Sequence[torch.Tensor], slots: Sequence[_Slot]) -> Any:
    """Leave one node with the layer's tensors in and out; return what the layer would return."""
    values = torch.onnx.ops.symbolic_multi_out(
        LAYER, list(tensors), {"kind": kind.number, "path": name},
        dtypes=[tensor.dtype for tensor in kind.marked], shapes=[tensor.shape for tensor in kind.marked],
        version=_VERSION,
    )  # fmt: skip
    for index, value in zip(kind.written, values[len(kind.where) :], strict=True):
        slots[index].set(value)
    return kind.output(values)


def _mark(op: str, tensor: torch.Tensor, kind: int, index: int, name: str) -> torch.Tensor:
    attributes: dict[str, Any] = {"kind": kind, "index": index, "path": name}
    return torch.onnx.ops.symbolic(op, (tensor,), attributes, dtype=tensor.dtype, shape=tensor.shape, version=_VERSION)


def _slots(layer: torch.nn.Module, caches: Sequence[Cache]) -> list[_Slot] | None:
    """Return the cache tensors of a layer, [] without a cache, None for a cache that a stub could not imitate."""
    if not caches:
        return []
    numbers = {value for module in layer.modules() for key, value in vars(module).items() if key in _NUMBERS}
    parts: list[Cache] = []
    for cache in caches:
        parts += (
            [cache.self_attention_cache, cache.cross_attention_cache]
            if isinstance(cache, EncoderDecoderCache)
            else [cache]
        )
    if len(numbers) != 1 or not all(type(part) is DynamicCache for part in parts):
        return None
    number = numbers.pop()
    entries = [part.layers[number] for part in parts if number < len(part.layers)]
    if len(entries) != len(parts) or not all(type(entry) is DynamicLayer and entry.is_initialized for entry in entries):
        return None
    return [_Slot(entry, part) for entry in entries if isinstance(entry, DynamicLayer) for part in ("keys", "values")]


def _described(leaf: Any) -> Hashable:
    """Return what must be equal of an argument.

    A dynamic size is known by its traced size: every named dimension is traced at its own, while torch gives each
    input symbols of its own, and relates them only when a layer runs.
    """
    if isinstance(leaf, torch.Tensor):
        return (str(leaf.dtype), *map(_traced_size, leaf.shape))
    return "cache" if isinstance(leaf, Cache) else (type(leaf).__name__, leaf)


def _traced_size(size: Any) -> Hashable:
    return ("dynamic", size.node.hint) if isinstance(size, torch.SymInt) else size


def _signature(module: torch.nn.Module) -> Hashable:
    """Return what two layers must share to trace to the same graph: everything but numbers and parameter values."""
    values = [
        (name, value if isinstance(value, _PLAIN) else _plain(value))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name not in (*_NUMBERS, "forward")
    ]
    return (
        type(module),
        tuple((name, type(value).__name__, value) for name, value in values),
        tuple((name, _described(tensor)) for name, tensor in module._parameters.items()),
        tuple((name, _content(tensor)) for name, tensor in module._buffers.items()),
        tuple((name, None if child is None else _signature(child)) for name, child in module._modules.items()),
    )


def _plain(value: Any) -> Hashable:
    """Return a value that is equal for equal data; another object counts as another kind."""
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item) for item in value)
    return value if isinstance(value, _PLAIN) else id(value)


def _content(buffer: torch.Tensor | None) -> Hashable:
    if buffer is None:
        return None
    raw = buffer.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return (_described(buffer), hashlib.sha256(raw.tobytes()).hexdigest())
