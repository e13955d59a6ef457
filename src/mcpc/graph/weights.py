"""Bring a checkpoint's tensors into a package and bind graph initializers to their bytes.

When every tensor already has the dtype that the graphs want, the checkpoint's files are copied as they are, at
disk speed. Otherwise each file is rewritten with the used tensors only, a piece of a tensor in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from mcpc.checkpoint import Checkpoint
from mcpc.core.progress import Progress
from mcpc.core.runner import Array
from mcpc.errors import BadInputError, InternalError, Problem
from mcpc.graph.hide import UNBOUND
from mcpc.graph.io import all_initializers, dtype_name, dtype_of
from mcpc.package import PackageWriter
from mcpc.storage.digests import sha256_of_file
from mcpc.storage.safetensors import Entry, Plan, numpy_dtype, write_stream

FOLDER = "weights"
_PIECE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Span:
    """Where the bytes of a tensor lie in the package, and how they were made."""

    file: str
    offset: int
    length: int
    dtype: str
    transform: str


def wanted_dtypes(models: Sequence[ir.Model], source: Mapping[str, str]) -> dict[str, str]:
    """Return {checkpoint tensor: dtype of its initializers} for every unbound initializer.

    Raises:
        InternalError: Two graphs want one tensor in two dtypes.
    """
    wanted: dict[str, str] = {}
    for model in models:
        for value in unbound_initializers(model):
            assert value.name is not None and value.dtype is not None
            dtype = dtype_name(value.dtype)
            if wanted.setdefault(source[value.name], dtype) != dtype:
                raise InternalError("one tensor is wanted in two dtypes", where=value.name, expected=wanted[source[value.name]], got=dtype)
    return wanted


def unbound_initializers(model: ir.Model) -> list[ir.Value]:
    """Return the initializers that still wait for their bytes."""
    return [v for v in all_initializers(model) if isinstance(v.const_value, ir.ExternalTensor) and v.const_value.location == UNBOUND]


def place_weights(checkpoint: Checkpoint, wanted: Mapping[str, str], writer: PackageWriter, progress: Progress) -> tuple[dict[str, Span], str]:
    """Copy or rewrite the tensor files into the package.

    Returns:
        Where each wanted tensor lies, and the digest of the checkpoint's contents.

    Raises:
        BadInputError: A value does not fit the narrower dtype; every such tensor is listed.
    """
    verbatim = all(checkpoint.tensors[name].dtype == dtype for name, dtype in wanted.items())
    used_files = {checkpoint.tensors[name].file.name for name in wanted}
    spans: dict[str, Span] = {}
    hashes: dict[str, str] = {}
    for number, name in enumerate(checkpoint.files):
        progress.advance(number, len(checkpoint.files), name)
        entries = [entry for entry in checkpoint.tensors.values() if entry.file.name == name]
        relative = f"{FOLDER}/{name}"
        if name not in used_files:
            continue
        if verbatim:
            writer.copy(checkpoint.root / name, relative)
            hashes[name] = sha256_of_file(writer.root / relative)
            writer.remember(relative, hashes[name])
            spans |= {entry.name: Span(relative, entry.offset, entry.length, entry.dtype, "none") for entry in entries if entry.name in wanted}
        else:
            spans |= _rewrite([entry for entry in entries if entry.name in wanted], wanted, writer.path(relative), relative)
    progress.advance(len(checkpoint.files), len(checkpoint.files))
    return spans, checkpoint.digest(hashes)


def _rewrite(entries: list[Entry], wanted: Mapping[str, str], path: Path, relative: str) -> dict[str, Span]:
    problems: list[Problem] = []
    plans = [Plan(entry.name, wanted[entry.name], entry.shape) for entry in entries]
    with path.open("wb") as file:
        offsets = write_stream(file, plans, (_cast(entry, wanted[entry.name], problems) for entry in entries))
    if problems:
        raise BadInputError(f"values do not fit the dtype: {problems[0]}", where=relative, problems=problems, hint="use --dtype bfloat16 or float32")
    return {
        entry.name: Span(relative, *offsets[entry.name], wanted[entry.name], "none" if entry.dtype == wanted[entry.name] else "cast")
        for entry in entries
    }


def _cast(entry: Entry, dtype: str, problems: list[Problem]) -> Iterator[Array]:
    """Yield the tensor in pieces of the wanted dtype; note a finite value that becomes infinite."""
    flat = entry.read().reshape(-1)
    target = numpy_dtype(dtype)
    lost = 0
    for start in range(0, max(flat.size, 1), _PIECE_ELEMENTS):
        piece = flat[start : start + _PIECE_ELEMENTS]
        with np.errstate(over="ignore"):
            cast = piece.astype(target)
        lost += int(np.count_nonzero(np.isfinite(piece) & ~np.isfinite(cast))) if target.itemsize < piece.dtype.itemsize or target == np.float16 else 0
        yield cast
    if lost:
        problems.append(Problem(f"{lost} values are outside the {dtype} range", entry.name))


def bind(model: ir.Model, source: Mapping[str, str], spans: Mapping[str, Span], base: Path) -> None:
    """Point every unbound initializer at its bytes, and inline what the tracer computed.

    Raises:
        InternalError: The bytes are not what the graph expects.
    """
    for value in unbound_initializers(model):
        assert value.name is not None and value.dtype is not None and value.shape is not None
        span = spans[source[value.name]]
        if dtype_of(span.dtype) != value.dtype:
            raise InternalError("the bytes have another dtype than the graph", where=value.name, expected=dtype_name(value.dtype), got=span.dtype)
        value.const_value = ir.ExternalTensor(span.file, span.offset, span.length, value.dtype, shape=value.shape, name=value.name, base_dir=str(base))
    for value in all_initializers(model):
        tensor = value.const_value
        if tensor is not None and not isinstance(tensor, ir.ExternalTensor):
            value.const_value = ir.Tensor(np.array(tensor.numpy()), dtype=tensor.dtype, shape=tensor.shape, name=value.name)
