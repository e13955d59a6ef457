"""Tensor specifications: name, dtype and named dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: Bits of one element, by dtype name. The names are those of ONNX in lower case, as torch and numpy spell them.
BITS: Mapping[str, int] = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16,
    "float8_e4m3fn": 8, "float8_e5m2": 8, "float8_e8m0fnu": 8,
    "int64": 64, "int32": 32, "int16": 16, "int8": 8, "int4": 4,
    "uint64": 64, "uint32": 32, "uint16": 16, "uint8": 8, "uint4": 4, "bool": 8,
}  # fmt: skip

FLOAT_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16"})

#: One dimension: a size, or a name such as "batch" or a sum of names such as "past+sequence".
Dimension = int | str


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of one graph input or output; dynamic dimensions are named."""

    name: str
    dtype: str
    shape: tuple[Dimension, ...]

    def concrete(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape with every named dimension replaced by its size.

        Raises:
            KeyError: A named dimension is not in `sizes`.
        """
        return tuple(evaluate_dimension(dim, sizes) for dim in self.shape)


def evaluate_dimension(dim: Dimension, sizes: Mapping[str, int]) -> int:
    """Return the size of `dim`, where a name may be a sum such as "past+sequence".

    Raises:
        KeyError: A name is not in `sizes`.
    """
    if isinstance(dim, int):
        return dim
    return sum(int(part) if part.isdigit() else sizes[part] for part in dim.split("+"))


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a dense tensor; 4-bit elements are packed two to a byte."""
    count = 1
    for size in shape:
        count *= size
    return (count * BITS[dtype] + 7) // 8
