"""Read a finished plan back without a GPU and compare it with the graph that was given to the builder.

Two sources: the plan's own bytes, which hold the compiled graphs as text (chips, constants with dtype and bytes), and
the builder's report of the finished engine (layers, I/O tensors with dtype and profile shapes).

Source: neither text is documented; read from TensorRT-RTX 1.7.1. A layout that is not recognised is an error, never a
pass.
"""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from mcpc.backends.trt.profiles import Profile
from mcpc.core.tensors import TensorSpec, nbytes
from mcpc.errors import Problem, VerificationError
from mcpc.graph import io

#: How far the weight bytes of a plan may be from the packed bytes of the graph.
WEIGHT_TOLERANCE = 0.05
#: Scalars and shape constants are not counted, and others are added by the builder, so a small engine needs some room.
WEIGHT_FLOOR_BYTES = 4096
#: Constants below this size are shapes, axes and scalars: the builder folds, merges or writes them into kernels.
_COUNTED_BYTES = 64
#: A widened constant below this size costs nothing worth a failure.
_WIDENED_BYTES = 1024
_PACKED = ("int4", "int8")

_PLAN_DTYPES = {
    "float": "float32",
    "half": "float16",
    "bf16": "bfloat16",
    "int4": "int4",
    "int8": "int8",
    "int32": "int32",
    "int64": "int64",
    "bool": "bool",
    "uint8": "uint8",
    "fp8": "float8_e4m3fn",
}
_REPORT_DTYPES = {
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Int4": "int4",
    "Int8": "int8",
    "Int32": "int32",
    "Int64": "int64",
    "Bool": "bool",
    "UInt8": "uint8",
    "FP8": "float8_e4m3fn",
}

_CONSTANT = re.compile(
    rb"tensor=\{ alignment=\d+ const_payload_size=(\d+) dims=\{[^}\n]*\}"
    rb"[^\n]*? region=(\S+) [^\n]*?type=(\w+) \}"
)
_CHIPS = re.compile(rb"accelerators=\{([^}\n]*)\}")
_IO = re.compile(
    r"^ Name: (?P<name>.+?), IOMode: (?P<mode>Input|Output), DataType: (?P<dtype>\w+),"
    r" Dimensions: \[(?P<dims>[-\d,]*)\],"
    r".*?ProfileInfo: \[(?P<profiles>.*)\]$",
    re.MULTILINE,
)
_SHAPES = re.compile(r"MinShape: \[([-\d,]*)\], OptShape: \[([-\d,]*)\], MaxShape: \[([-\d,]*)\]")
_LAYER = re.compile(r"^Name: .*?, LayerType: \w+, .*$", re.MULTILINE)
_TENSOR = re.compile(r"\{ Name: (?P<name>.+?), Dimensions: \[(?P<dims>[-\d,]*)\], .*?Datatype: (?P<dtype>\w+)")


@dataclass(frozen=True)
class Plan:
    """What the plan's bytes say.

    Attributes:
        chips: Compute capabilities, as the target spells them.
        constants: For each compiled graph, constant bytes by dtype.
    """

    chips: frozenset[str]
    constants: tuple[Mapping[str, int], ...]


def read_plan(path: Path) -> Plan:
    """Read a plan.

    Raises:
        VerificationError: It is not a plan, or its layout is not known.
    """
    regions: dict[bytes, Counter[str]] = {}
    chips: set[str] = set()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"vtrt" and data[:5] != b"ptrtd":
            raise VerificationError(
                "the builder's output is not a TensorRT plan", where=path.name, got=repr(bytes(data[:5]))
            )
        for match in _CONSTANT.finditer(data):
            if match[2].endswith(b"-consts") and not match[2].startswith(b"runtime-fusion"):
                dtype = _PLAN_DTYPES.get(match[3].decode(), match[3].decode())
                regions.setdefault(match[2], Counter())[dtype] += int(match[1])
        for match in _CHIPS.finditer(data):
            chips.update(match[1].decode().replace("*", "").upper().split())
    if not chips:
        raise VerificationError("the plan's layout is not known: it names no chip", where=path.name)
    return Plan(frozenset(chips), tuple(regions.values()))


@dataclass(frozen=True)
class EngineTensor:
    """One input or output of the finished engine; -1 is a dynamic dimension."""

    name: str
    mode: str
    dtype: str
    shape: tuple[int, ...]
    profiles: tuple[tuple[tuple[int, ...], ...], ...]


def read_io(report: str) -> list[EngineTensor]:
    """Return the I/O tensors of the builder's report of the finished engine."""
    tensors = []
    for match in _IO.finditer(report):
        shapes = tuple(tuple(_dims(text) for text in triple) for triple in _SHAPES.findall(match["profiles"]))
        dtype = _REPORT_DTYPES.get(match["dtype"], match["dtype"])
        tensors.append(EngineTensor(match["name"], match["mode"].lower(), dtype, _dims(match["dims"]), shapes))
    return tensors


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


@dataclass(frozen=True)
class Expected:
    """Weight bytes that the graph given to the builder holds.

    Attributes:
        fewest: Bytes by dtype when every weight is stored once.
        most: Bytes by dtype when each node that uses a weight has its own copy, in the layout that suits it.
    """

    fewest: Mapping[str, int]
    most: Mapping[str, int]


def expected_weights(model: ir.Model) -> Expected:
    """Add up the initializers of a lowered graph."""
    fewest: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for value in io.all_initializers(model):
        tensor = value.const_value
        if tensor is None or tensor.nbytes < _COUNTED_BYTES:
            continue
        dtype = io.dtype_name(tensor.dtype)
        size = nbytes(dtype, [int(dim) for dim in tensor.shape.numpy()])
        fewest[dtype] += size
        most[dtype] += size * max(1, len({use.node for use in value.uses()}), len(_readers(value)))
    return Expected(fewest, most)


def _readers(value: ir.Value) -> set[ir.Node]:
    """Return the nodes that read a weight, behind the DequantizeLinear or Transpose that only brings it into form."""
    readers: set[ir.Node] = set()
    for use in value.uses():
        if use.node.op_type in ("DequantizeLinear", "Transpose", "Cast"):
            readers |= {inner.node for output in use.node.outputs for inner in output.uses()}
        else:
            readers.add(use.node)
    return readers


def check_plan(
    plan: Plan,
    report: str,
    model: ir.Model,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    profiles: Sequence[Profile],
    chips: Iterable[str],
) -> list[Problem]:
    """Return every way in which a plan is not what was asked for; empty when it is."""
    problems = []
    if plan.chips != frozenset(chips):
        problems.append(
            Problem("the plan is for other chips", expected=", ".join(sorted(chips)), got=", ".join(sorted(plan.chips)))
        )
    problems += _io_problems(read_io(report), inputs, outputs, profiles)
    problems += _weight_problems(plan, expected_weights(model), max(1, len(profiles)))
    problems += [Problem("the plan widens a packed weight at every run", name) for name in _widened(report)]
    return problems


def _io_problems(
    found: Sequence[EngineTensor],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    profiles: Sequence[Profile],
) -> Iterator[Problem]:
    expected = {(spec.name, mode): spec for mode, specs in (("input", inputs), ("output", outputs)) for spec in specs}
    got = {(tensor.name, tensor.mode): tensor for tensor in found}
    for name, mode in sorted(expected.keys() - got.keys()):
        yield Problem(f"the plan lacks an {mode}", name)
    for name, mode in sorted(got.keys() - expected.keys()):
        yield Problem(f"the plan has an {mode} that the graph lacks", name)
    for key in sorted(expected.keys() & got.keys()):
        spec, tensor = expected[key], got[key]
        if spec.dtype != tensor.dtype:
            yield Problem("the plan has another dtype", spec.name, spec.dtype, tensor.dtype)
        if tensor.mode == "input" and any(isinstance(dim, str) for dim in spec.shape):
            wanted = tuple(profile[spec.name] for profile in profiles)
            if wanted != tensor.profiles:
                yield Problem("the plan has other profile shapes", spec.name, str(wanted), str(tensor.profiles))


def _weight_problems(plan: Plan, expected: Expected, profiles: int) -> Iterator[Problem]:
    """Each profile has its own compiled graphs, so the constants are counted per profile."""
    found: Counter[str] = Counter()
    for constants in plan.constants:
        found.update(constants)
    for dtype in (*_PACKED, None):
        few, most, got = (_bytes_of(counts, dtype) for counts in (expected.fewest, expected.most, found))
        got //= profiles
        floor = WEIGHT_FLOOR_BYTES if dtype is None else 0
        if not few * (1 - WEIGHT_TOLERANCE) - floor <= got <= most * (1 + WEIGHT_TOLERANCE) + floor:
            wanted = f"{few} bytes" if few == most else f"{few} to {most} bytes"
            yield Problem(
                f"weight bytes of the plan{f' in {dtype}' if dtype else ''}, per profile",
                expected=f"{wanted} within 5 %",
                got=str(got),
            )


def _bytes_of(counts: Mapping[str, int], dtype: str | None) -> int:
    return sum(counts.values()) if dtype is None else counts.get(dtype, 0)


def _widened(report: str) -> Iterator[str]:
    """Yield the layers that compute from a packed weight alone: with no activation to read, all they do is widen it."""
    for match in _LAYER.finditer(report):
        head, _, constants = match[0].partition("Constants: [")
        if not head.rstrip(", ").endswith("Inputs: []"):
            continue
        for name, dims, dtype in _TENSOR.findall(constants.partition("Outputs: [")[0]):
            packed = _REPORT_DTYPES.get(dtype)
            if packed in _PACKED and nbytes(packed, _dims(dims)) >= _WIDENED_BYTES:
                yield f"{head.split(',')[0].removeprefix('Name: ')}, {packed}[{dims}] {name}"
