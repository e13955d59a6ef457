"""Read safetensors headers without reading tensors, and write safetensors files one tensor at a time.

Source: https://github.com/huggingface/safetensors (format: 8 bytes little-endian header length, JSON header,
tensor bytes; `data_offsets` are relative to the end of the header).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mcpc.core.runner import Array
from mcpc.core.tensors import nbytes
from mcpc.errors import BadInputError
from mcpc.storage.pointers import stand_in

_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_CODES = {name: code for code, name in _NAMES.items()}
#: What is read of a tensor at a time; whole elements of every dtype.
PIECE_BYTES = 16 << 20
_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: `offset` is from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    length: int

    def read(self) -> Array:
        """Return the tensor as a numpy array (bfloat16 and float8 by ml_dtypes); its pages are mapped, not loaded."""
        if self.length == 0:
            return np.zeros(self.shape, numpy_dtype(self.dtype))
        raw = np.memmap(self.file, np.uint8, "r", self.offset, (self.length,))
        return raw.view(numpy_dtype(self.dtype)).reshape(self.shape)

    def pieces(self) -> Iterator[Array]:
        """Yield the tensor flat, in pieces of its own memory: mapped pages of a large tensor would count as memory."""
        dtype = numpy_dtype(self.dtype)
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.offset)
            for start in range(0, self.length, PIECE_BYTES):
                yield read_bytes(file, min(PIECE_BYTES, self.length - start)).view(dtype)

    def rows(self, start: int, stop: int) -> Entry:
        """Return the entry of some rows, slices of the first axis."""
        stop = min(stop, self.shape[0])
        row_bytes = self.length // self.shape[0]
        shape, offset = (stop - start, *self.shape[1:]), self.offset + start * row_bytes
        return replace(self, shape=shape, offset=offset, length=(stop - start) * row_bytes)


def read_bytes(file: RawIOBase, length: int) -> NDArray[np.uint8]:
    """Return the next bytes of a file.

    Raises:
        OSError: It ends before.
    """
    result = np.empty(length, np.uint8)
    view, done = result.data, 0
    while done < length:
        count = file.readinto(view[done:])
        if not count:
            raise OSError(None, "the file became shorter while it was read")
        done += count
    return result


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return the numpy dtype of a dtype name."""
    extra = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
             "float8_e5m2": ml_dtypes.float8_e5m2, "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
             "int4": ml_dtypes.int4}  # fmt: skip
    dtype: np.dtype[np.generic] = np.dtype(extra.get(name, name))
    return dtype


def read_header(path: Path) -> dict[str, Entry]:
    """Return the entries of a safetensors file in file order; no tensor is read.

    Two tensors may have the very same bytes (a tie); any other overlap is refused.

    Raises:
        BadInputError: The file is truncated, stands for another one, or its header is malformed.
    """
    if (problem := stand_in(path)) is not None:
        hint = "git lfs pull, or download the checkpoint again"
        raise BadInputError(problem.message, str(path), problem.expected, problem.got, hint)
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise _truncated(path, "at least 8 bytes", size)
        (length,) = struct.unpack("<Q", start)
        if length > _MAX_HEADER_BYTES:
            raise BadInputError(
                "not a safetensors file", where=str(path), expected="the length of a header", got=repr(start)
            )
        if length > size - 8:
            raise _truncated(path, f"more than {8 + length} bytes", size)
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise BadInputError("malformed safetensors header", where=str(path), got=str(error)) from None
    if not isinstance(header, dict):
        raise BadInputError("malformed safetensors header", where=str(path), expected="a JSON object")
    header.pop("__metadata__", None)
    return _entries(path, 8 + length, size, header)


def _truncated(path: Path, expected: str, size: int) -> BadInputError:
    return BadInputError("truncated tensor file", where=str(path), expected=expected, got=f"{size} bytes")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate keys")
    return result


def _entries(path: Path, base: int, size: int, header: dict[str, object]) -> dict[str, Entry]:
    entries = []
    for name, value in header.items():
        where = f"{path}: {name}"
        if not isinstance(value, dict):
            raise BadInputError("malformed safetensors entry", where=where, expected="a JSON object", got=repr(value))
        try:
            shape = tuple(int(dim) for dim in value["shape"])
            begin, end = (int(offset) for offset in value["data_offsets"])
            dtype = _NAMES[value["dtype"]]
        except (KeyError, TypeError, ValueError) as error:
            raise BadInputError("malformed safetensors entry", where=where, got=repr(error)) from None
        if min(shape, default=0) < 0 or begin < 0 or end - begin != nbytes(dtype, shape):
            raise BadInputError(
                "tensor bytes do not match its shape",
                where=where,
                expected=f"{nbytes(dtype, shape)} bytes for {dtype}{list(shape)}",
                got=f"{end - begin}",
            )
        entries.append(Entry(name, dtype, shape, path, base + begin, end - begin))
    entries.sort(key=lambda entry: (entry.offset, entry.length))
    _check_ranges(path, base, size, entries)
    return {entry.name: entry for entry in entries}


def _check_ranges(path: Path, base: int, size: int, entries: Sequence[Entry]) -> None:
    """Refuse ranges that overlap without being the same, and a file shorter or longer than its header says."""
    position, previous = base, None
    for entry in entries:
        if entry.length == 0:
            continue
        twin = previous is not None and (entry.offset, entry.length) == (previous.offset, previous.length)
        if entry.offset < position and not twin:
            raise BadInputError(
                f"tensor bytes overlap those of {previous.name if previous else '-'}", where=f"{path}: {entry.name}",
                expected=f"an offset of at least {position}, or the very same bytes", got=f"{entry.offset}",
            )  # fmt: skip
        position, previous = entry.offset + entry.length, entry
    if position > size:
        raise _truncated(path, f"{position} bytes", size)
    if position < size:
        raise BadInputError(
            "the tensor file goes on after its last tensor",
            where=str(path),
            expected=f"{position} bytes",
            got=f"{size} bytes",
            hint="two files were joined, or the header belongs to another file",
        )


@dataclass(frozen=True)
class Plan:
    """A tensor to be written: its bytes are asked for later."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def write_stream(
    file: BinaryIO, plans: Sequence[Plan], arrays: Iterable[Array | Iterator[Array]]
) -> dict[str, tuple[int, int]]:
    """Write a safetensors file, one array in memory at a time, or one piece of it when it comes as an iterator.

    4-bit tensors are written as packed `U8` of their byte count, low nibble first; the caller passes packed uint8.

    Returns:
        For each name (offset from the start of the file, length in bytes).
    """
    header: dict[str, object] = {}
    position = 0
    spans: dict[str, tuple[int, int]] = {}
    for plan in plans:
        size = nbytes(plan.dtype, plan.shape)
        packed = plan.dtype in ("int4", "uint4")
        header[plan.name] = {
            "dtype": "U8" if packed else _CODES[plan.dtype],
            "shape": [size] if packed else list(plan.shape),
            "data_offsets": [position, position + size],
        }
        spans[plan.name] = (position, size)
        position += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)))
    file.write(text)
    for plan, array in zip(plans, arrays, strict=True):
        written = 0
        for piece in (array,) if isinstance(array, np.ndarray) else array:
            data = np.ascontiguousarray(piece)
            if data.size:
                file.write(data.reshape(-1).view(np.uint8).data)
            written += data.nbytes
        if written != spans[plan.name][1]:
            raise ValueError(f"{plan.name}: {written} bytes given, {spans[plan.name][1]} planned")
    base = 8 + len(text)
    return {name: (base + offset, size) for name, (offset, size) in spans.items()}
