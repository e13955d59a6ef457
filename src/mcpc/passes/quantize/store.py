"""Write the weights of rewritten graphs, one piece of a tensor in memory at a time, and point the graphs at them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from mcpc.core.progress import Progress
from mcpc.core.runner import Array
from mcpc.errors import BadInputError
from mcpc.graph.io import all_initializers, dtype_name
from mcpc.graph.widen import WidenedTensor
from mcpc.passes.quantize.streams import StreamedTensor, bytes_key
from mcpc.storage.safetensors import Plan, write_stream

_PIECE_ELEMENTS = 1 << 22
_ALIGNMENT_BYTES = 8
_WIDEST_BITS = 65


@dataclass(frozen=True)
class _Span:
    location: str
    offset: int
    length: int


def write_weights(models: Mapping[str, ir.Model], files: Mapping[str, str], root: Path, progress: Progress) -> None:
    """Write each component's weights into a safetensors file of its own.

    Tensors of equal bytes are written once, into the file of the first component that has them. What is not external in
    the input and not made by a pass stays inside the graph.

    Args:
        models: Component name to graph; its initializers point into the new files afterwards.
        files: Component name to its weight file, relative to `root`.
        root: Folder of the graphs.
        progress: Shows the tensors.
    """
    written: dict[Hashable, _Span] = {}
    for component, model in models.items():
        location = files[component]
        values = [value for value in all_initializers(model) if _is_stored(value.const_value)]
        new: dict[Hashable, ir.Value] = {}
        for value in values:
            if _key(value) not in written:
                new.setdefault(_key(value), value)
        ordered = sorted(new.items(), key=lambda item: _order(item[1]))
        if ordered:
            path = root / location
            path.parent.mkdir(parents=True, exist_ok=True)
            names = _names([str(value.name) for _, value in ordered])
            plans = [
                Plan(name, dtype_name(_dtype(value)), _shape(value))
                for name, (_, value) in zip(names, ordered, strict=True)
            ]
            with path.open("wb") as file:
                spans = write_stream(file, plans, _all_pieces([value for _, value in ordered], component, progress))
            written.update({key: _Span(location, *spans[name]) for name, (key, _) in zip(names, ordered, strict=True)})
        for value in values:
            span = written[_key(value)]
            value.const_value = ir.ExternalTensor(
                span.location,
                span.offset,
                span.length,
                _dtype(value),
                shape=ir.Shape(_shape(value)),
                name=str(value.name),
                base_dir=root,
            )


def _order(value: ir.Value) -> int:
    """Keep every tensor aligned to its elements, and the scales behind their integers wherever sizes allow it."""
    return 0 if _tensor(value).nbytes % _ALIGNMENT_BYTES == 0 else -_dtype(value).bitwidth + _WIDEST_BITS


def _is_stored(tensor: ir.TensorProtocol | None) -> bool:
    inner = tensor.source if isinstance(tensor, WidenedTensor) else tensor
    return isinstance(inner, (StreamedTensor, ir.ExternalTensor))


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    if value.const_value is None:
        raise BadInputError("an initializer has no value", where=str(value.name))
    return value.const_value


def _dtype(value: ir.Value) -> ir.DataType:
    return _tensor(value).dtype


def _shape(value: ir.Value) -> tuple[int, ...]:
    return tuple(int(size) for size in _tensor(value).shape.numpy())


def _key(value: ir.Value) -> Hashable:
    tensor = _tensor(value)
    return tensor.key if isinstance(tensor, StreamedTensor) else (bytes_key(tensor), tensor.dtype)


def _names(wanted: list[str]) -> list[str]:
    """Return the names, with a number where subgraphs use one twice."""
    seen: dict[str, int] = {}
    result = []
    for name in wanted:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return result


def _all_pieces(values: list[ir.Value], component: str, progress: Progress) -> Iterator[Iterator[Array]]:
    for number, value in enumerate(values):
        progress.advance(number, len(values), f"{component}: {value.name}")
        yield _pieces(_tensor(value))
    progress.advance(len(values), len(values), component)


def _pieces(tensor: ir.TensorProtocol) -> Iterator[Array]:
    if isinstance(tensor, StreamedTensor):
        yield from tensor.pieces()
        return
    if isinstance(tensor, WidenedTensor):
        for piece in _pieces(tensor.source):
            yield piece.astype(np.float32)
        return
    if not isinstance(tensor, ir.ExternalTensor):
        raise TypeError(f"{tensor.name} is stored inside the graph")
    # Packed elements are copied as bytes; others in whole elements, so that they can be widened.
    dtype = np.dtype(np.uint8) if tensor.dtype.bitwidth < 8 else tensor.dtype.numpy()
    left, offset = tensor.nbytes // dtype.itemsize, tensor.offset or 0
    while left:
        piece = np.fromfile(tensor.path, dtype, min(left, _PIECE_ELEMENTS), offset=offset)
        yield piece
        left -= piece.size
        offset += piece.nbytes
        if not piece.size:
            raise BadInputError("the external data file is truncated", where=str(tensor.path))
