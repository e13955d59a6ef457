"""Write a lowered graph: its weights go into one safetensors file, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir

from mcpc.backends.trt.lowering import release
from mcpc.core.runner import Array
from mcpc.core.tensors import BITS
from mcpc.graph import io
from mcpc.storage.safetensors import Plan, write_stream

#: Shapes, axes and scalars stay in the graph: TensorRT's parser must see them as constants.
_INLINE_BYTES = 1024


def write_lowered(model: ir.Model, folder: Path) -> Path:
    """Write `model.onnx` and `model.safetensors` into a folder and return the path of the graph.

    The parser of TensorRT reads initializers from a safetensors file by offset and length.
    """
    constants = [(value, tensor) for value in io.all_initializers(model) if (tensor := value.const_value) is not None]
    large = [(value, tensor) for value, tensor in constants if _is_large(tensor)]
    for value, tensor in constants:
        if not _is_large(tensor):
            value.const_value = _inline(tensor)
    # initializers of different subgraphs may share a name
    plans = [
        Plan(f"{index}.{value.name}", io.dtype_name(tensor.dtype), _shape(tensor))
        for index, (value, tensor) in enumerate(large)
    ]
    weights = folder / "model.safetensors"
    with weights.open("wb") as file:
        spans = write_stream(file, plans, _arrays(tensor for _, tensor in large))
    for plan, (value, tensor) in zip(plans, large, strict=True):
        offset, length = spans[plan.name]
        value.const_value = ir.ExternalTensor(
            weights.name,
            offset,
            length,
            tensor.dtype,
            shape=ir.Shape(plan.shape),
            name=str(value.name),
            base_dir=folder,
        )
    path = folder / "model.onnx"
    io.save(model, path)
    return path


def _is_large(tensor: ir.TensorProtocol) -> bool:
    return tensor.nbytes >= _INLINE_BYTES and io.dtype_name(tensor.dtype) in BITS


def _inline(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Return a small tensor whose bytes lie in the graph."""
    if not isinstance(tensor, ir.ExternalTensor | ir.LazyTensor):
        return tensor
    return ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, shape=ir.Shape(_shape(tensor)), name=tensor.name)


def _shape(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    return tuple(int(size) for size in tensor.shape.numpy())


def _arrays(tensors: Iterable[ir.TensorProtocol]) -> Iterator[Array]:
    for tensor in tensors:
        yield np.frombuffer(tensor.tobytes(), np.uint8)
        release(tensor)
