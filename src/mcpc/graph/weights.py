"""Bring a checkpoint's tensors into a package and bind graph initializers to their bytes.

A file whose tensors already have the dtype that the graphs want is copied as it is, at disk speed. Otherwise, and when
much of it is not used, it is rewritten with the used tensors only, a piece of a tensor in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from mcpc.checkpoint import Checkpoint
from mcpc.checkpoint.finite import FiniteCheck
from mcpc.checkpoint.packed import PackedInt4
from mcpc.checkpoint.statistics import Statistics
from mcpc.core.progress import Progress
from mcpc.core.runner import Array
from mcpc.core.tensors import FLOAT_DTYPES
from mcpc.errors import BadInputError, InternalError, Problem, UsageError
from mcpc.graph.hide import is_unbound
from mcpc.graph.io import all_initializers, dtype_name, dtype_of
from mcpc.package import PackageWriter
from mcpc.storage.copying import Watch
from mcpc.storage.references import write_reference
from mcpc.storage.safetensors import Entry, Plan, numpy_dtype, write_stream

FOLDER = "weights"
#: Tensors that are made of others.
MADE = f"{FOLDER}/made.safetensors"
#: Transform of a matrix that keeps its four bits.
INT4 = "int4.block"
#: A file is copied whole, at disk speed, unless more of it than this lies idle: unused tensors, or its header.
_IDLE_FRACTION = 0.09
_IDLE_BYTES = 1 << 16


@dataclass(frozen=True)
class Span:
    """Where the bytes of a tensor lie in the package, how they were made, and of what, where not of one tensor."""

    file: str
    offset: int
    length: int
    dtype: str
    transform: str
    origin: str = ""


def wanted_dtypes(
    models: Sequence[ir.Model], source: Mapping[str, str], checkpoint: Checkpoint, dtype: str
) -> dict[str, str]:
    """Return {checkpoint tensor: dtype it is stored in} for every tensor that a graph uses.

    Args:
        models: Traced graphs.
        source: Parameter name -> checkpoint tensor name.
        checkpoint: Where the tensors come from.
        dtype: Float dtype of the package, or `keep` for each tensor's own.
    """
    names = sorted({source[str(value.name)] for model in models for value in unbound_initializers(model)})
    stored = {name: checkpoint.dtype_of(name) for name in names}
    if dtype == "keep":
        return stored
    return {name: dtype if own in FLOAT_DTYPES else own for name, own in stored.items()}


def unbound_initializers(model: ir.Model) -> list[ir.Value]:
    """Return the initializers that still wait for their bytes."""
    return [value for value in all_initializers(model) if is_unbound(value)]


def refer_to_weights(checkpoint: Checkpoint, wanted: Mapping[str, str], writer: PackageWriter) -> dict[str, Span]:
    """Leave the tensors where they are; return where each lies, relative to the checkpoint's folder.

    Raises:
        UsageError: A tensor would have to be rewritten.
    """
    cast = [
        name
        for name, dtype in sorted(wanted.items())
        if checkpoint.is_computed(name) or checkpoint.tensors[name].dtype != dtype
    ]
    if cast:
        raise UsageError(
            "referenced weights stay as they are, and these need another dtype or layout",
            where="--weights reference", problems=[Problem("needs to be rewritten", name) for name in cast],
            hint="use --dtype keep, or --weights copy",
        )  # fmt: skip
    entries = {name: checkpoint.tensors[name] for name in wanted}
    write_reference(writer.root, checkpoint.root, sorted({entry.file.name for entry in entries.values()}))
    return {
        name: Span(entry.file.name, entry.offset, entry.length, entry.dtype, "none") for name, entry in entries.items()
    }


def place_weights(
    checkpoint: Checkpoint,
    wanted: Mapping[str, str],
    writer: PackageWriter,
    progress: Progress,
    statistics: Statistics,
) -> tuple[dict[str, Span], str]:
    """Copy or rewrite the tensor files into the package; every value is read once, checked, and counted.

    Returns:
        Where each wanted tensor lies, and the digest of the checkpoint's contents.

    Raises:
        BadInputError: A value is not finite, or does not fit the narrower dtype; every such tensor is listed.
    """
    check = FiniteCheck()

    def watch(entry: Entry, piece: Array) -> None:
        if not checkpoint.is_computed(entry.name):  # what a computed one is made of is read below
            check.see(entry, piece)
        statistics.see(entry.name, piece)

    made = [name for name in wanted if name in checkpoint.made]
    used_files = {checkpoint.tensors[name].file.name for name in wanted if name not in checkpoint.made}
    spans: dict[str, Span] = {}
    hashes: dict[str, str] = {}
    for number, name in enumerate(checkpoint.files):
        progress.advance(number, len(checkpoint.files), name)
        entries = [entry for entry in checkpoint.tensors.values() if entry.file.name == name]
        relative = f"{FOLDER}/{name}"
        if name not in used_files:
            continue
        computed = any(checkpoint.is_computed(entry.name) for entry in entries)
        if not computed and _is_verbatim(entries, wanted, checkpoint.root / name):
            used = [entry for entry in entries if entry.name in wanted]
            hashes[name] = writer.copy_tensors(checkpoint.root / name, relative, used, watch)
            spans |= {entry.name: Span(relative, entry.offset, entry.length, entry.dtype, "none") for entry in used}
        else:
            spans |= _rewrite(
                checkpoint,
                [entry for entry in entries if entry.name in wanted],
                wanted,
                writer.path(relative),
                relative,
                watch,
            )
    plain = {name for name in wanted if not checkpoint.is_computed(name)}
    checkpoint.read_for(check, checkpoint.stored(wanted) - plain)
    check.require_finite(checkpoint.root)
    if made:
        spans |= _make(checkpoint, made, wanted, writer.path(MADE), MADE, statistics)
    progress.advance(len(checkpoint.files), len(checkpoint.files))
    return spans, checkpoint.digest(hashes)


def _is_verbatim(entries: Sequence[Entry], wanted: Mapping[str, str], path: Path) -> bool:
    """Return whether a file serves as it is: no tensor needs another dtype, and little of it lies idle."""
    used = [entry for entry in entries if entry.name in wanted]
    ranges = {(entry.offset, entry.length) for entry in used}
    idle_bytes = path.stat().st_size - sum(length for _, length in ranges)
    return all(entry.dtype == wanted[entry.name] for entry in used) and (
        idle_bytes <= _IDLE_FRACTION * path.stat().st_size or idle_bytes <= _IDLE_BYTES
    )


def _make(
    checkpoint: Checkpoint,
    names: Sequence[str],
    wanted: Mapping[str, str],
    path: Path,
    relative: str,
    statistics: Statistics,
) -> dict[str, Span]:
    """Write the tensors that no file of the checkpoint holds."""
    problems: list[Problem] = []
    plans = [Plan(name, wanted[name], checkpoint.shape_of(name)) for name in names]
    arrays = [
        _cast(name, _counted(name, checkpoint.pieces(name), statistics), wanted[name], problems) for name in names
    ]
    with path.open("wb") as file:
        offsets = write_stream(file, plans, arrays)
    _refuse_lost(problems, relative)
    return {
        name: Span(
            relative, *offsets[name], wanted[name], _with_cast(checkpoint, name, wanted[name]),
            checkpoint.made[name].origin,
        )
        for name in names
    }  # fmt: skip


def _with_cast(checkpoint: Checkpoint, name: str, dtype: str) -> str:
    made = checkpoint.made[name]
    return made.transform if made.dtype == dtype else f"{made.transform}, cast"


def _refuse_lost(problems: Sequence[Problem], where: str) -> None:
    if problems:
        raise BadInputError(
            f"values do not fit the dtype: {problems[0]}", where=where, problems=problems,
            hint="use --dtype bfloat16 or float32",
        )  # fmt: skip


def _rewrite(
    checkpoint: Checkpoint,
    entries: list[Entry],
    wanted: Mapping[str, str],
    path: Path,
    relative: str,
    watch: Watch,
) -> dict[str, Span]:
    problems: list[Problem] = []
    plans: list[Plan] = []
    arrays: list[Array | Iterator[Array]] = []
    for entry in entries:
        if entry.name in checkpoint.packed:
            matrix = checkpoint.packed[entry.name]
            plans.append(Plan(entry.name, "int4", (matrix.depth, matrix.columns)))
            plans.append(Plan(matrix.scales.name, "float32", matrix.scales.shape))
            arrays += [matrix.packed(), _scales(matrix)]
        else:
            plans.append(Plan(entry.name, wanted[entry.name], entry.shape))
            pieces = _seen(entry, checkpoint.pieces(entry.name), watch)
            arrays.append(_cast(entry.name, pieces, wanted[entry.name], problems))
    with path.open("wb") as file:
        offsets = write_stream(file, plans, arrays)
    _refuse_lost(problems, relative)
    transforms = {entry.name: _transform(checkpoint, entry, wanted[entry.name]) for entry in entries}
    return {
        plan.name: Span(relative, *offsets[plan.name], plan.dtype, transforms.get(plan.name, f"{INT4}.scale"))
        for plan in plans
    }


def _seen(entry: Entry, pieces: Iterator[Array], watch: Watch) -> Iterator[Array]:
    for piece in pieces:
        watch(entry, piece)
        yield piece


def _counted(name: str, pieces: Iterator[Array], statistics: Statistics) -> Iterator[Array]:
    for piece in pieces:
        statistics.see(name, piece)
        yield piece


def _scales(matrix: PackedInt4) -> Iterator[Array]:
    yield matrix.scale_values()  # read when its turn has come


def _transform(checkpoint: Checkpoint, entry: Entry, dtype: str) -> str:
    if entry.name in checkpoint.scales:
        return "fp8-block-dequantize"
    if entry.name in checkpoint.packed:
        return INT4
    return "none" if entry.dtype == dtype else "cast"


def _cast(name: str, pieces: Iterator[Array], dtype: str, problems: list[Problem]) -> Iterator[Array]:
    """Yield the pieces in the wanted dtype; note a finite value that becomes infinite."""
    target = numpy_dtype(dtype)
    lost = 0
    for piece in pieces:
        with np.errstate(over="ignore"):
            cast = piece.astype(target)
        if target.itemsize < piece.dtype.itemsize or target == np.float16:
            lost += int(np.count_nonzero(np.isfinite(piece) & ~np.isfinite(cast)))
        yield cast
    if lost:
        problems.append(Problem(f"{lost} values are outside the {dtype} range", name))


def bind(model: ir.Model, source: Mapping[str, str], spans: Mapping[str, Span], base: Path) -> None:
    """Point every unbound initializer at its bytes, and inline what the tracer computed.

    Graphs compute in float32. A weight that is stored in another float dtype is cast where it enters the graph, so
    that the package holds the checkpoint's own bytes and every runtime computes the same thing; a runtime folds the
    cast when it loads, a backend that computes in the narrow dtype drops it.
    """
    for value in unbound_initializers(model):
        name, dtype, shape = _described(value)
        span = spans[source[name]]
        stored = dtype_of(span.dtype)
        tensor = ir.ExternalTensor(
            span.file, span.offset, span.length, stored, shape=shape, name=name, base_dir=str(base)
        )
        if stored == dtype:
            value.const_value = tensor
        else:
            _insert_cast(model.graph, value, tensor)
    for value in all_initializers(model):
        constant = value.const_value
        if constant is not None and not isinstance(constant, ir.ExternalTensor):
            value.const_value = ir.Tensor(np.array(constant.numpy()), dtype=constant.dtype, name=value.name)


def _described(value: ir.Value) -> tuple[str, ir.DataType, ir.Shape]:
    """Return the name, dtype and shape of an initializer, which every trace gives."""
    if value.name is None or value.dtype is None or value.shape is None:
        raise InternalError("an initializer has no name, dtype or shape", where=str(value.name))
    return value.name, value.dtype, value.shape


def _insert_cast(graph: ir.Graph, value: ir.Value, tensor: ir.ExternalTensor) -> None:
    """Replace an initializer by a stored tensor and a Cast to the dtype in which the graph computes."""
    name, wide, shape = _described(value)
    users = list(value.uses())
    value.const_value = tensor
    value.dtype = tensor.dtype
    cast = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(wide))], name=f"{name}.cast")
    output = cast.outputs[0]
    output.name, output.shape, output.dtype = f"{name}.{dtype_name(wide)}", shape, wide
    for node, index in users:
        node.replace_input_with(index, output)
    graph.insert_before(graph[0], cast)
