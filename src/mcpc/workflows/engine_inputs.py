"""What build-engine reads: a package, or a bare ONNX file; and the inputs on which its lowered graphs are executed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from mcpc.backends.ort import package_runners
from mcpc.backends.trt.profiles import Profile, names_of
from mcpc.config.target import Runtime, SizeRange
from mcpc.core.runner import Array
from mcpc.core.tensors import TensorSpec
from mcpc.errors import BadInputError, UsageError
from mcpc.package import Package
from mcpc.package.manifest import Manifest
from mcpc.storage.digests import sha256_of_file
from mcpc.verify.cases import Case, Cases
from mcpc.workflows.samples import load_samples

_SEED = 20260101
#: Cases of one component that are executed: two sizes, and a decoder's prefill and decode of each.
_CASES, _DECODER_CASES = 2, 4
_FREE_SIZES = (2, 3)


@dataclass(frozen=True)
class Source:
    """Where components come from.

    Attributes:
        path: The package's folder, or the ONNX file.
        files: Component name -> ONNX file.
        facts: Digest and kind, for the sidecars.
        dtype: Float dtype of the source weights; "" when only the graph tells.
        manifest: The package's, or None for a bare file.
    """

    path: Path
    files: Mapping[str, Path]
    facts: dict[str, str]
    dtype: str
    manifest: Manifest | None


def open_source(path: Path, components: Sequence[str], allow_unverified: bool) -> Source:
    """Open a package, every byte checked, or an ONNX file.

    Raises:
        BadInputError: It is damaged, or neither.
        UsageError: It is unverified, or has no component of a name that was asked for.
    """
    if path.is_file() and path.suffix == ".onnx":
        source = Source(
            path, {path.stem: path}, {"onnx_file": path.name, "onnx_sha256": sha256_of_file(path)}, "", None
        )
    elif path.is_dir():
        package = Package.open(path, allow_unverified=allow_unverified, check_bytes=True)
        files = {component.name: package.component_path(component.name) for component in package.manifest.components}
        dtype = package.manifest.model.source.dtype if package.manifest.model else ""
        source = Source(path, files, {"package_digest": package.digest}, dtype, package.manifest)
    else:
        raise BadInputError(
            "no such package or ONNX file", where=str(path), expected="a package folder or a file that ends in .onnx"
        )
    if unknown := [name for name in components if name not in source.files]:
        raise UsageError("no such component", where=str(path), expected=", ".join(source.files), got=", ".join(unknown))
    chosen = {name: file for name, file in source.files.items() if not components or name in components}
    return Source(source.path, chosen, source.facts, source.dtype, source.manifest)


def default_sizes(manifest: Manifest | None, runtime: Runtime) -> dict[str, SizeRange]:
    """Return the default sizes of a package's named dimensions; none for a bare file, whose names mean nothing.

    Text is limited by what the model was trained for, and feature rows come in whole items.
    """
    if manifest is None:
        return {}
    sizes = dict(runtime.dimensions)
    limit = manifest.binding.max_tokens if manifest.binding else None
    for name in ("sequence", "past"):
        if limit is not None and name in sizes:
            old = sizes[name]
            sizes[name] = SizeRange(min=min(old.min, limit), opt=min(old.opt, limit), max=min(old.max, limit))
    rows = next((item.rows_per_item for item in manifest.modalities.values() if item.rows_per_item), 1)
    if "feature_rows" in sizes:
        old = sizes["feature_rows"]
        sizes["feature_rows"] = SizeRange(min=old.min * rows, opt=old.opt * rows, max=old.max * rows)
    return sizes


def package_cases(source: Source, manifest: Manifest) -> dict[str, list[Case]]:
    """Return seeded cases of each chosen component, at sizes that differ."""
    cases: dict[str, list[Case]] = {name: [] for name in source.files}
    wanted = {name: _DECODER_CASES if manifest.component(name).role == "decoder" else _CASES for name in source.files}
    for case in Cases(manifest, package_runners(source.path, manifest)).all(load_samples(source.path, manifest, ())):
        if case.component in cases and len(cases[case.component]) < wanted[case.component]:
            cases[case.component].append(case)
        if all(len(found) == wanted[name] for name, found in cases.items()):
            break
    return cases


def bare_cases(
    component: str, model: ir.Model, inputs: Sequence[TensorSpec], profiles: Sequence[Profile]
) -> list[Case]:
    """Return seeded cases for a graph of which only the inputs are known, at two sizes inside its first profile.

    Integers are indices below the rows of the tables they reach; masks are ones, positions count up.
    """
    random = np.random.default_rng(_SEED)
    limits = {value.name: _rows_reached(value) for value in model.graph.inputs}
    cases = []
    for number, size in enumerate(_FREE_SIZES):
        sizes = {name: _within(name, size + index, inputs, profiles) for index, name in enumerate(_names(inputs))}
        feeds = {spec.name: _values(spec, spec.concrete(sizes), limits[spec.name], random) for spec in inputs}
        label = "seeded " + (" ".join(f"{name}={count}" for name, count in sizes.items()) or f"draw {number}")
        cases.append(Case(component, label, feeds))
    return cases


def _names(inputs: Sequence[TensorSpec]) -> Iterator[str]:
    return iter(dict.fromkeys(name for spec in inputs for dim in spec.shape for name in names_of(dim)))


def _within(name: str, size: int, inputs: Sequence[TensorSpec], profiles: Sequence[Profile]) -> int:
    """Return a size of a dimension that its first profile allows."""
    for spec in inputs:
        for axis, dim in enumerate(spec.shape):
            if dim == name and profiles and spec.name in profiles[0]:
                low, _, high = (shape[axis] for shape in profiles[0][spec.name])
                return max(low, min(size, high))
    return size


def _rows_reached(value: ir.Value) -> int:
    """Return the fewest rows of the tables that a value indexes, through ops that keep its numbers; 2 without any."""
    rows, stack, seen = [], [value], set[ir.Value]()
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        for use in current.uses():
            table = use.node.inputs[0]
            if (
                use.node.op_type == "Gather"
                and use.idx == 1
                and table is not None
                and table.shape is not None
                and isinstance(table.shape[0], int)
            ):
                rows.append(table.shape[0])
            elif use.node.op_type in ("Cast", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Where"):
                stack += use.node.outputs
    return min(rows, default=2)


def _values(spec: TensorSpec, shape: tuple[int, ...], limit: int, random: np.random.Generator) -> Array:
    if spec.dtype in ("float32", "float16", "bfloat16", "float64"):
        return random.standard_normal(shape).astype(np.float64 if spec.dtype == "float64" else np.float32)
    if "mask" in spec.name or spec.dtype == "bool":
        return np.ones(shape, spec.dtype)
    if "position" in spec.name and shape:
        return np.broadcast_to(np.arange(shape[-1]), shape).astype(spec.dtype)
    return random.integers(0, limit, shape).astype(spec.dtype)
