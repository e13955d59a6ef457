"""The weights of a float32 twin, streamed to a temporary file."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from mcpc.errors import StorageError
from mcpc.graph import io
from mcpc.graph.widen import WidenedTensor

_WEIGHTS = "weights.bin"
_ALIGNMENT_BYTES = 64  # a cache line; also enough for every element type
_INLINE_BYTES = 1024  # shapes and axes stay in the graph: shape inference must see them


def write_twin(model: ir.Model, folder: Path) -> None:
    """Write the initializers of a widened model into `folder`, and point the model at them.

    One tensor is in memory at a time. Initializers that share bytes are written once.

    Raises:
        StorageError: The temporary folder is full.
    """
    written: dict[tuple[object, ...], ir.ExternalTensor] = {}
    try:
        with (folder / _WEIGHTS).open("wb") as file:
            for value in io.all_initializers(model):
                tensor = value.const_value
                if tensor is None or tensor.dtype == ir.DataType.STRING:
                    continue
                if tensor.nbytes < _INLINE_BYTES:
                    value.const_value = _inlined(tensor)
                    continue
                key = _bytes_of(tensor)
                if key not in written:
                    file.write(b"\0" * (-file.tell() % _ALIGNMENT_BYTES))
                    offset = file.tell()
                    file.write(tensor.tobytes())
                    written[key] = ir.ExternalTensor(
                        _WEIGHTS, offset, file.tell() - offset, tensor.dtype, shape=_shape(tensor),
                        name=str(value.name), base_dir=folder,
                    )  # fmt: skip
                value.const_value = _renamed(written[key], str(value.name))
    except OSError as error:
        raise StorageError(f"cannot write the temporary float32 weights: {error.strerror}", where=str(folder),
                           hint="set TMPDIR to a folder with more room") from error  # fmt: skip


def _inlined(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor
    return ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, shape=_shape(tensor), name=tensor.name)


def _bytes_of(tensor: ir.TensorProtocol) -> tuple[object, ...]:
    """Return what tells whether two tensors share their bytes: file and place, else the object itself."""
    source = tensor.source if isinstance(tensor, WidenedTensor) else tensor
    if isinstance(source, ir.ExternalTensor):
        return (source.location, source.offset, source.length, tensor.dtype, *source.shape.numpy())
    return (id(source),)


def _renamed(tensor: ir.ExternalTensor, name: str) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        tensor.location,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=_shape(tensor),
        name=name,
        base_dir=tensor.base_dir,
    )


def _shape(tensor: ir.TensorProtocol) -> ir.Shape:
    return ir.Shape(tensor.shape.numpy())
