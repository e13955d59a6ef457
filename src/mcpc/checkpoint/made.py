"""Tensors that no file holds: where a model wants others joined, cut or turned. They are made a piece at a time.

Source: transformers `core_model_loading.ConversionOps`, whose arithmetic this is in numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mcpc.core.runner import Array

_PIECE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Part:
    """An array that is read when its turn has come."""

    shape: tuple[int, ...]
    read: Callable[[], Array]


@dataclass(frozen=True)
class Stack:
    """Values of one shape along a new first axis, such as the experts of a layer; never in memory together."""

    parts: tuple[Value, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the number of parts, then the shape of one."""
        return (len(self.parts), *self.parts[0].shape)


@dataclass(frozen=True)
class Flow:
    """An array that is computed anew, some rows at a time, whenever it is asked for."""

    shape: tuple[int, ...]
    rows: Callable[[], Iterator[Array]]


Value = Part | Stack | Flow


@dataclass(frozen=True)
class Made:
    """One tensor that is made of others.

    Attributes:
        parameter: The parameter that it fills.
        origin: The tensors that it is made of, `*` for a number in their names.
        transform: What is done with them, in order.
        sources: Their names.
        dtype: Of all of them.
        value: The result.
    """

    parameter: str
    origin: str
    transform: str
    sources: tuple[str, ...]
    dtype: str
    value: Value

    @property
    def name(self) -> str:
        """Return a name that no tensor of a file has."""
        return f"{self.parameter} = {self.transform}"


def pieces(value: Value) -> Iterator[Array]:
    """Yield a value in flat pieces, in C order."""
    if isinstance(value, Stack):
        for part in value.parts:
            yield from pieces(part)
    elif isinstance(value, Flow):
        for rows in value.rows():
            yield rows.reshape(-1)
    else:
        yield from _flat(value.read())


def _flat(array: Array) -> Iterator[Array]:
    """Yield pieces of an array, which may be a turned view of mapped bytes."""
    if array.ndim < 2 or array.flags.c_contiguous:
        flat = array.reshape(-1)
        for start in range(0, flat.size, _PIECE_ELEMENTS):
            yield flat[start : start + _PIECE_ELEMENTS]
    elif array.ndim == 2:
        step = max(1, _PIECE_ELEMENTS // max(1, array.shape[1]))
        for start in range(0, len(array), step):
            yield array[start : start + step].reshape(-1)
    else:
        for item in array:
            yield from _flat(item)


def concatenate(values: Sequence[Value], axis: int) -> Value:
    """Join values along an axis.

    Raises:
        ValueError: They differ along another axis.
    """
    if len({(*value.shape[:axis], *value.shape[axis + 1 :]) for value in values}) > 1:
        raise ValueError(f"{[list(value.shape) for value in values]} differ beside axis {axis}")
    stacks = [value for value in values if isinstance(value, Stack)]
    if axis > 0 and len(stacks) == len(values):
        columns = zip(*(stack.parts for stack in stacks), strict=True)
        return Stack(tuple(concatenate(column, axis - 1) for column in columns))
    parts = [_whole(value) for value in values]
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    return Part(tuple(shape), lambda: np.concatenate([part.read() for part in parts], axis))


def transpose(value: Value, first: int, second: int) -> Value:
    """Exchange two axes."""
    if isinstance(value, Stack) and min(first, second) > 0:
        return Stack(tuple(transpose(part, first - 1, second - 1) for part in value.parts))
    part = _whole(value)
    shape = list(part.shape)
    shape[first], shape[second] = shape[second], shape[first]
    return Part(tuple(shape), lambda: np.swapaxes(part.read(), first, second))


def cut(value: Value, axis: int, number: int, count: int) -> Value:
    """Return one of `count` equal parts along an axis.

    Raises:
        ValueError: The axis does not divide.
    """
    if value.shape[axis] % count:
        raise ValueError(f"{value.shape[axis]} do not make {count} equal parts")
    if isinstance(value, Stack) and axis > 0:
        return Stack(tuple(cut(part, axis - 1, number, count) for part in value.parts))
    part, size = _whole(value), value.shape[axis] // count
    where = (*(slice(None),) * axis, slice(number * size, (number + 1) * size))
    return Part((*part.shape[:axis], size, *part.shape[axis + 1 :]), lambda: part.read()[where])


def interleave(value: Value, axis: int, inverse: bool) -> Value:
    """Put the even places of an axis before the odd ones; inverse: alternate its two halves.

    Raises:
        ValueError: The axis has no two halves.
    """
    if value.shape[axis] % 2:
        raise ValueError(f"{value.shape[axis]} along axis {axis} have no two halves")
    if isinstance(value, Stack) and axis > 0:
        return Stack(tuple(interleave(part, axis - 1, inverse) for part in value.parts))
    part, half = _whole(value), value.shape[axis] // 2
    pairs = (2, half) if inverse else (half, 2)
    split = (*part.shape[:axis], *pairs, *part.shape[axis + 1 :])
    return Part(part.shape, lambda: part.read().reshape(split).swapaxes(axis, axis + 1).reshape(part.shape))


def permute_heads(value: Value, heads: int, inverse: bool) -> Value:
    """Order the rows of a projection [heads * D, ...] as a rotary embedding of halves wants them, from pairs.

    Raises:
        ValueError: The rows are not an even number for each head.
    """
    if value.shape[0] % (2 * heads):
        raise ValueError(f"{value.shape[0]} rows are not an even number for each of {heads} heads")
    part, half = _whole(value), value.shape[0] // heads // 2
    split = (heads, *((2, half) if inverse else (half, 2)), *part.shape[1:])
    return Part(part.shape, lambda: part.read().reshape(split).swapaxes(1, 2).reshape(part.shape))


def _whole(value: Value) -> Part:
    """Return a value as one array."""
    if isinstance(value, Part):
        return value
    if isinstance(value, Flow):
        return Part(value.shape, lambda: np.concatenate(list(pieces(value))).reshape(value.shape))
    parts = [_whole(part) for part in value.parts]
    return Part(value.shape, lambda: np.stack([part.read() for part in parts]))
