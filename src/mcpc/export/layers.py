"""Trace one layer of each kind; the other layers become opaque nodes, which `graph/stack.py` expands into clones.

Two layers are of one kind when their modules are equal but for the values of their parameters, and when they are
called with equal arguments but for the values of tensors. `survey` runs a component on fake tensors and finds the
kinds; under `one_of_each_kind` the first layer of a kind is then traced between marks, and a later one runs nothing and
leaves a `mcpc::Layer` node. The loop around the layers is the model's own, so masks, rotary embeddings and taps between
layers stay as they are. Cache tensors of later layers and their weights are kept out of the trace, whose cost would
grow with their number; expanding brings them back by name.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from mcpc.graph.stack import LAYER, LAYER_INPUT, LAYER_OUTPUT

#: Attributes that hold a layer's number. They differ from layer to layer and say nothing of its kind.
_NUMBERS = ("layer_idx", "layer_id", "layer_index")
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_VERSION = 1


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


@dataclass
class _Call:
    """A layer's call: arguments as leaves, which of them are tensors, and the cache slots."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    where: list[int]
    slots: list[_Slot]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*(self.leaves[index] for index in self.where), *(slot.get() for slot in self.slots)]

    def replaced(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put other tensors in the slots, and return the arguments with others in place."""
        leaves = list(self.leaves)
        for index, tensor in zip(self.where, tensors, strict=False):
            leaves[index] = tensor
        for slot, tensor in zip(self.slots, tensors[len(self.where) :], strict=True):
            slot.set(tensor)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


@dataclass(frozen=True)
class _Kind:
    """What a layer of a kind returns: its output as leaves, which of them are tensors, which slots it wrote."""

    number: int
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    where: tuple[int, ...]
    written: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]

    def output(self, tensors: Sequence[torch.Tensor]) -> Any:
        leaves = list(self.leaves)
        for index, tensor in zip(self.where, tensors, strict=False):
            leaves[index] = tensor
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass
class _Stub:
    """A later layer of a kind: the graph inputs of its slots and the graph outputs that it writes; "" is neither."""

    kind: int
    inputs: tuple[str, ...]
    written: tuple[torch.Tensor, ...]
    outputs: tuple[str, ...] = ()


@dataclass
class Survey:
    """Which layers of a component are traced, and which are not.

    Attributes:
        aliases: Graph input that is kept out of the trace -> the input of the traced layer that stands for it.
        outputs: Graph outputs that are kept out of the trace.
        first: Path of a traced layer -> its kind.
        later: Path of a layer that is not traced -> what stands for it.
        numbers: Path of either -> which layer of a cache is its own.
        silent: Layers of which nothing runs in this component.
    """

    aliases: dict[str, str] = field(default_factory=dict)
    outputs: set[str] = field(default_factory=set)
    first: dict[str, int] = field(default_factory=dict)
    later: dict[str, _Stub] = field(default_factory=dict)
    numbers: dict[str, int | None] = field(default_factory=dict)
    silent: list[torch.nn.Module] = field(default_factory=list)


def survey(
    model: torch.nn.Module,
    run: Callable[[Mapping[str, torch.Tensor]], Sequence[torch.Tensor]],
    tensors: Mapping[str, torch.Tensor],
    outputs: Sequence[str],
) -> Survey:
    """Run a component once on fake tensors of distinct sizes and find its kinds of layers.

    Args:
        model: The whole model.
        run: The component.
        tensors: Its inputs by name.
        outputs: Names of what it returns.
    """
    surveyor = _Surveyor({id(tensor): name for name, tensor in tensors.items()})
    called: set[int] = set()
    hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, _: called.add(id(module)))
    layers = list(_stacked(model))
    try:
        with _forwards((layer, _bound(surveyor.run, layer, path, layer.forward)) for path, layer in layers):
            results = run(tensors)
    finally:
        hook.remove()
    names = {id(tensor): name for name, tensor in zip(outputs, results, strict=True)}
    if surveyor.again:
        return Survey()
    found = surveyor.found
    kinds = {stub.kind for stub in found.later.values()}
    found.first = {path: kind for path, kind in found.first.items() if kind in kinds}
    for stub in found.later.values():
        stub.outputs = tuple(names.get(id(tensor), "") for tensor in stub.written)
        found.outputs |= {name for name in stub.outputs if name}
    found.silent = [layer for _, layer in layers if not any(id(module) in called for module in layer.modules())]
    return found


@contextlib.contextmanager
def one_of_each_kind(model: torch.nn.Module, found: Survey) -> Iterator[None]:
    """Trace the first layer of each kind between marks, and leave nodes for the others."""
    tracer = _Tracer(found)
    layers = [(path, layer) for path, layer in _stacked(model) if path in found.first or path in found.later]
    later = [layer for path, layer in layers if path in found.later]
    with (
        _forwards((layer, _bound(tracer.run, layer, path, layer.forward)) for path, layer in layers),
        _emptied([*later, *found.silent]),
    ):
        yield


def _bound(run: Callable[..., Any], layer: torch.nn.Module, path: str, original: Callable[..., Any]) -> Any:
    return lambda *args, **kwargs: run(layer, path, original, *args, **kwargs)


def _stacked(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield path and module of every entry of a `ModuleList` that holds at least two entries of its class."""
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList):
            classes = [type(layer) for layer in module]
            for number, layer in enumerate(module):
                if classes.count(type(layer)) > 1 and next(layer.children(), None) is not None:
                    yield f"{path}.{number}", layer


@contextlib.contextmanager
def _forwards(replacements: Iterator[tuple[torch.nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Give modules another forward for the length of the block."""
    replaced = list(replacements)
    for module, forward in replaced:
        module.forward = forward
    try:
        yield
    finally:
        for module, _ in replaced:
            vars(module).pop("forward", None)


@contextlib.contextmanager
def _emptied(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Take submodules, parameters and buffers out of modules for the length of the block: a trace lifts every one."""
    parts = ("_modules", "_parameters", "_buffers")
    saved = [(module, part, vars(module)[part]) for module in modules for part in parts]
    for module, part, _ in saved:
        vars(module)[part] = {}
    try:
        yield
    finally:
        for module, part, value in saved:
            vars(module)[part] = value


class _Surveyor:
    """Runs the first layer of each kind, and imitates the others by tensors of the same shapes."""

    def __init__(self, inputs: Mapping[int, str]) -> None:
        self.found = Survey()
        self.again = False  # a layer that is called twice has two places in the graph, and one name
        self._inputs = inputs
        self._kinds: dict[Hashable, tuple[_Kind, tuple[str, ...]]] = {}
        self._inside = False

    def run(self, layer: torch.nn.Module, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.again |= path in self.found.first or path in self.found.later
        number = _number(layer)
        call = None if self._inside or self.again else _call(number, args, kwargs)
        if call is None:
            return forward(*args, **kwargs)
        self.found.numbers[path] = number
        names = tuple(self._inputs.get(id(slot.get()), "") for slot in call.slots)
        described = tuple(map(_described, [*call.leaves, *call.tensors]))
        key = (_signature(layer), str(call.spec), described, tuple(bool(name) for name in names))
        if key in self._kinds:
            kind, owner = self._kinds[key]
            tensors = [torch.empty_like(tensor) for tensor in kind.tensors]
            written = tensors[len(kind.where) :]
            for index, tensor in zip(kind.written, written, strict=True):
                call.slots[index].set(tensor)
            self.found.later[path] = _Stub(kind.number, names, tuple(written))
            self.found.aliases |= {name: other for name, other in zip(names, owner, strict=True) if name}
            return kind.output(tensors)
        before = [slot.get() for slot in call.slots]
        self._inside = True
        try:
            output = forward(*args, **kwargs)
        finally:
            self._inside = False
        kind_or_none = _kind(len(self._kinds), output, call, before)
        if kind_or_none is not None:
            self._kinds[key] = (kind_or_none, names)
            self.found.first[path] = kind_or_none.number
        return output


class _Tracer:
    """Marks the traced layers and leaves a node for each of the others."""

    def __init__(self, found: Survey) -> None:
        self._found = found
        self._kinds: dict[int, _Kind] = {}
        # Stands for a cache tensor that is kept out: it can be passed along, and any computation with it fails.
        with FakeTensorMode():
            self._unreadable = torch.empty(1)

    def run(self, layer: torch.nn.Module, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = _call(self._found.numbers[path], args, kwargs)
        if call is None:
            raise RuntimeError(f"{path} is called in another way than in the survey")
        stub = self._found.later.get(path)
        if stub is not None:
            return self._node(path, stub, call)
        kind_number = self._found.first[path]
        marked = _marked(LAYER_INPUT, call.tensors, kind_number, path)
        marked_args, marked_kwargs = call.replaced(marked)
        output = forward(*marked_args, **marked_kwargs)
        kind = _kind(kind_number, output, call, marked[len(call.where) :])
        if kind is None:
            raise RuntimeError(f"{path} returns another thing than in the survey")
        results = _marked(LAYER_OUTPUT, kind.tensors, kind_number, path)
        for index, tensor in zip(kind.written, results[len(kind.where) :], strict=True):
            call.slots[index].set(tensor)
        self._kinds[kind_number] = kind
        return kind.output(results)

    def _node(self, path: str, stub: _Stub, call: _Call) -> Any:
        kind = self._kinds[stub.kind]
        inputs = call.tensors[: len(call.where)]
        inputs += [slot.get() for slot, name in zip(call.slots, stub.inputs, strict=True) if not name]
        kept = [*kind.tensors[: len(kind.where)]]
        kept += [t for t, name in zip(kind.tensors[len(kind.where) :], stub.outputs, strict=True) if not name]
        values = list(
            torch.onnx.ops.symbolic_multi_out(
                LAYER, inputs,
                {"kind": stub.kind, "path": path, "inputs": ",".join(("",) * len(call.where) + stub.inputs),
                 "outputs": ",".join(("",) * len(kind.where) + stub.outputs)},
                dtypes=[tensor.dtype for tensor in kept], shapes=[tensor.shape for tensor in kept], version=_VERSION,
            )
        )  # fmt: skip
        written = iter(values[len(kind.where) :])
        for index, name in zip(kind.written, stub.outputs, strict=True):
            call.slots[index].set(self._unreadable if name else next(written))
        return kind.output(values)


def _marked(op: str, tensors: Sequence[torch.Tensor], kind: int, path: str) -> list[torch.Tensor]:
    return [
        torch.onnx.ops.symbolic(
            op, (tensor,), {"kind": kind, "index": index, "path": path},
            dtype=tensor.dtype, shape=tensor.shape, version=_VERSION,
        )
        for index, tensor in enumerate(tensors)
    ]  # fmt: skip


def _number(layer: torch.nn.Module) -> int | None:
    """Return the number that a layer's modules agree on."""
    numbers = {value for module in layer.modules() for key, value in vars(module).items() if key in _NUMBERS}
    return numbers.pop() if len(numbers) == 1 else None


def _call(number: int | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call | None:
    """Return a layer's call, or None when a node could not stand for it."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)), is_leaf=lambda leaf: isinstance(leaf, Cache))
    slots = _slots(number, [leaf for leaf in leaves if isinstance(leaf, Cache)])
    # A layer may write into a list or dict that it is given; a node cannot.
    mutable = any(isinstance(value, (list, dict)) for value in (*args, *kwargs.values()))
    known = all(isinstance(leaf, (*_PLAIN, torch.Tensor, Cache)) for leaf in leaves)
    if slots is None or mutable or not known:
        return None
    return _Call(leaves, spec, [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)], slots)


def _kind(number: int, output: Any, call: _Call, before: Sequence[torch.Tensor]) -> _Kind | None:
    """Return what a layer returned and wrote, or None when a node could not return the like."""
    leaves, spec = pytree.tree_flatten(output)
    if not all(isinstance(leaf, (*_PLAIN, torch.Tensor)) for leaf in leaves):
        return None
    where = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    written = tuple(
        index for index, (slot, old) in enumerate(zip(call.slots, before, strict=True)) if slot.get() is not old
    )
    tensors = (*(leaves[index] for index in where), *(call.slots[index].get() for index in written))
    return _Kind(number, tuple(leaves), spec, where, written, tensors)


def _slots(number: int | None, caches: Sequence[Cache]) -> list[_Slot] | None:
    """Return the cache tensors of a layer, [] without a cache, None for a cache that a node could not imitate."""
    if not caches:
        return []
    parts: list[Cache] = []
    for cache in caches:
        if isinstance(cache, EncoderDecoderCache):
            parts += [cache.self_attention_cache, cache.cross_attention_cache]
        else:
            parts.append(cache)
    if number is None or not all(type(part) is DynamicCache for part in parts):
        return None
    entries = [part.layers[number] for part in parts if number < len(part.layers)]
    if len(entries) != len(parts) or not all(type(entry) is DynamicLayer and entry.is_initialized for entry in entries):
        return None
    return [_Slot(entry, part) for entry in entries if isinstance(entry, DynamicLayer) for part in ("keys", "values")]


def _described(leaf: Any) -> Hashable:
    """Return what must be equal of an argument."""
    if isinstance(leaf, torch.Tensor):
        return (str(leaf.dtype), *leaf.shape)
    return "cache" if isinstance(leaf, Cache) else (type(leaf).__name__, leaf)


def _signature(module: torch.nn.Module) -> Hashable:
    """Return what two layers must share to trace to the same graph: everything but numbers and parameter values."""
    values = [
        (name, type(value).__name__, _plain(value))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name not in (*_NUMBERS, "forward")
    ]
    return (
        type(module),
        tuple(values),
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
