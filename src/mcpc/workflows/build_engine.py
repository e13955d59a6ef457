"""`mcpc build-engine`: one TensorRT engine per component, with no GPU, checked as far as that allows."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir

from mcpc.backends.trt import sidecar
from mcpc.backends.trt.build import Built, build, require_builder
from mcpc.backends.trt.check import check_graph
from mcpc.backends.trt.lowering import Lowered, lower, main_dtype, open_flat
from mcpc.backends.trt.padding import pad_columns
from mcpc.backends.trt.profiles import Profile, ProfileOption, make_profiles, parse_profile
from mcpc.backends.trt.readback import check_plan, expected_weights, read_plan
from mcpc.backends.trt.stream import write_lowered
from mcpc.config.target import Precision, Runtime, Target, load_runtime, load_target
from mcpc.core.progress import Progress, Silent
from mcpc.core.report import Report
from mcpc.core.tensors import TensorSpec
from mcpc.errors import Problem, UnsupportedError, UsageError, VerificationError
from mcpc.graph.io import dtype_name
from mcpc.package.writer import pretty_json
from mcpc.storage.digests import sha256_of_file
from mcpc.storage.directories import check_output, staged_directory
from mcpc.verify.cases import Case
from mcpc.workflows.engine_checks import beyond_float16, check_executed
from mcpc.workflows.engine_inputs import Source, bare_cases, default_sizes, open_source, package_cases

Verify = Literal["lowered", "none"]
DEFAULT_TIMEOUT_S = 3600.0
#: Each round keeps float32 what overflowed in the one before; a chain of residual blocks settles in two.
_RANGE_ROUNDS = 4
_WORK = ".work"


@dataclass(frozen=True)
class Prepared:
    """One component, lowered and checked against the target, not yet written."""

    name: str
    original: Path
    lowered: Lowered
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[Profile, ...]


def build_engine(
    source: Path,
    output: Path,
    target: str,
    *,
    precision: Precision | None = None,
    components: Sequence[str] = (),
    profiles: Sequence[str] = (),
    verify: Verify = "lowered",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    allow_unverified: bool = False,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Build engines of a package, or of one ONNX file.

    Args:
        source: The package's folder or the ONNX file.
        output: Folder to write; it appears only when every engine is built and checked.
        target: Name of a target.
        precision: Dtype of the engines; the runtime's choice for the source's dtype when None.
        components: Which to build; all when empty.
        profiles: Texts of `--profile`.
        verify: `none` skips the checks, and the engines are marked unchecked.
        timeout_s: Limit of one build.
        allow_unverified: Accept an unverified package.
        force: Replace the output.
        dry_run: Check everything against the target, resolve the profiles, and stop.
        progress: Is told the stages.

    Raises:
        UsageError: The options contradict one another or the graphs.
        BadInputError: The source is damaged.
        UnsupportedError: The target does not take a graph; every problem of every component is listed.
        BackendError: The builder is missing or failed.
        VerificationError: A check failed; nothing is written.
    """
    chips = load_target(target)
    runtime = load_runtime(chips.runtime)
    options = [parse_profile(text) for text in profiles]
    if not dry_run:
        check_output(output, force)
        require_builder()
    told = progress or Silent()
    told.stage("check", f"against {target}")
    opened = open_source(source, components, allow_unverified)
    prepared = _prepare(opened, runtime, precision, options)
    if dry_run:
        return Report(
            "build-engine", data={"target": sidecar.target_facts(chips), "plan": [_plan(item) for item in prepared]}
        )
    cases = _cases(opened, prepared) if verify == "lowered" or _measures_range(prepared) else {}
    built = []
    with staged_directory(output, force) as staging:
        for item in prepared:
            built.append(
                _Engine(item, opened, chips, runtime, cases.get(item.name, []), verify, timeout_s, told).build(staging)
            )
        index = {
            "sidecar_version": sidecar.SIDECAR_VERSION,
            "target": sidecar.target_facts(chips),
            "source": opened.facts,
            "checked": verify,
            "engines": [
                {
                    "component": record.component,
                    "file": f"{record.component}.engine",
                    "sha256": record.engine_sha256,
                    "bytes": record.engine_bytes,
                }
                for record, _ in built
            ],
        }
        (staging / "engines.json").write_text(pretty_json(index), encoding="utf-8")
    engines = [record.to_dict() | run for record, run in built]
    return Report(
        "build-engine", verify, {"output": str(output), "target": sidecar.target_facts(chips), "engines": engines}
    )


def _prepare(
    source: Source, runtime: Runtime, precision: Precision | None, options: Sequence[ProfileOption]
) -> list[Prepared]:
    """Lower every component and check it; every problem of every component is reported at once."""
    if unknown := sorted({option.component for option in options} - {"", *source.files}):
        raise UsageError(
            "a --profile names no component that is built", expected=", ".join(source.files), got=", ".join(unknown)
        )
    sizes = default_sizes(source.manifest, runtime)
    prepared, problems, hints = [], [], []
    for name, path in source.files.items():
        lowered = _lower(path, precision or _default_precision(source, path, runtime), runtime)
        problems += check_graph(lowered.model, runtime, name)
        inputs, outputs = _specs(lowered.model.graph.inputs), _specs(lowered.model.graph.outputs)
        try:
            profiles = make_profiles(
                name, inputs, [option for option in options if option.component in ("", name)], sizes
            )
        except UnsupportedError as error:
            problems += error.problems
            hints.append(error.hint)
            continue
        prepared.append(Prepared(name, path, lowered, inputs, outputs, tuple(profiles)))
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UnsupportedError(
            f"the target does not take this: {problems[0]}{more}",
            where=str(source.path),
            problems=problems,
            hint="; ".join(hints),
        )
    return prepared


def _default_precision(source: Source, path: Path, runtime: Runtime) -> Precision:
    return runtime.default_precision.get(source.dtype or dtype_name(main_dtype(open_flat(path))), "keep")


def _lower(path: Path, precision: Precision, runtime: Runtime, wide: frozenset[str] = frozenset()) -> Lowered:
    """Return a component's graph as the builder gets it, its weights not yet written."""
    model = open_flat(path)
    padded = pad_columns(model, runtime.weights.columns_multiple)
    return replace(lower(model, precision, wide), padded=padded)


def _specs(values: Sequence[ir.Value]) -> tuple[TensorSpec, ...]:
    """Return graph inputs or outputs; a dynamic dimension without a name is named after its place."""
    specs = []
    for value in values:
        shape = [
            dim if isinstance(dim, int) else (str(dim.value).replace(" ", "") if dim.value else f"{value.name}.{axis}")
            for axis, dim in enumerate(value.shape or ())
        ]
        specs.append(TensorSpec(str(value.name), dtype_name(value.dtype or ir.DataType.UNDEFINED), tuple(shape)))
    return tuple(specs)


def _plan(item: Prepared) -> dict[str, Any]:
    return {
        "component": item.name,
        "precision": item.lowered.precision,
        "lowering": sidecar.lowering_facts(item.lowered),
        "inputs": sidecar.tensor_facts(item.inputs),
        "outputs": sidecar.tensor_facts(item.outputs),
        "profiles": sidecar.profile_facts(item.profiles),
    }


def _measures_range(prepared: Sequence[Prepared]) -> bool:
    return any(item.lowered.precision == "float16" for item in prepared)


def _cases(source: Source, prepared: Sequence[Prepared]) -> dict[str, list[Case]]:
    if source.manifest is not None and source.manifest.kind != "onnx":
        return package_cases(source, source.manifest)
    return {item.name: bare_cases(item.name, item.lowered.model, item.inputs, item.profiles) for item in prepared}


class _Engine:
    """One component on its way to an engine."""

    def __init__(
        self,
        item: Prepared,
        source: Source,
        target: Target,
        runtime: Runtime,
        cases: Sequence[Case],
        verify: Verify,
        timeout_s: float,
        progress: Progress,
    ) -> None:
        self._item = item
        self._source = source
        self._target = target
        self._runtime = runtime
        self._cases = cases
        self._verify = verify
        self._timeout_s = timeout_s
        self._progress = progress

    def build(self, staging: Path) -> tuple[sidecar.EngineRecord, dict[str, Any]]:
        """Write the engine and its sidecar into the staging folder; return the record, and what a rerun may change."""
        name = self._item.name
        work = staging / _WORK
        work.mkdir()
        self._progress.stage("lower", f"{name} to {self._item.lowered.precision}")
        graph, lowered = self._write(work)
        checks: dict[str, Any] = {}
        if self._verify == "lowered":
            self._progress.stage("execute", f"{name} on ONNX Runtime")
            checks["executed"] = check_executed(name, self._item.original, graph, lowered.precision, self._cases)
        self._progress.stage("build", f"{name} for {self._target.name}")
        built = build(work, name, self._item.profiles, self._target.compute_capabilities, self._timeout_s)
        if self._verify == "lowered":
            checks["read_back"] = self._read_back(built, lowered.model)
        engine = staging / f"{name}.engine"
        built.engine.replace(engine)
        shutil.rmtree(work)
        record = self._record(engine, lowered, built, checks)
        (staging / f"{name}.engine.json").write_text(pretty_json(record.to_dict()), encoding="utf-8")
        return record, {"build_s": round(built.build_s, 3), "peak_rss_bytes": built.peak_rss_bytes}

    def _write(self, work: Path) -> tuple[Path, Lowered]:
        """Write the lowered graph; a float16 one is lowered again until no value leaves the range."""
        lowered = self._item.lowered
        graph = write_lowered(lowered.model, work)
        wide: frozenset[str] = frozenset()
        for _ in range(_RANGE_ROUNDS):
            source = main_dtype(open_flat(self._item.original))
            if lowered.precision != "float16" or dtype_name(source) == "float16":
                return graph, lowered  # a graph that is float16 already is taken as it is
            found = beyond_float16(graph, self._cases)
            if not found - wide:
                return graph, lowered
            wide |= frozenset(name.removesuffix(".to_float16") for name in found)
            lowered = _lower(self._item.original, "float16", self._runtime, wide)
            graph = write_lowered(lowered.model, work)
        raise UnsupportedError(
            "float16 cannot hold the values of this graph",
            where=self._item.name,
            got=", ".join(sorted(wide)[:8]),
            hint="--precision bfloat16",
        )

    def _read_back(self, built: Built, model: ir.Model) -> dict[str, Any]:
        """Compare the plan with the graph that was built.

        Raises:
            VerificationError: It is something else; every finding is listed.
        """
        plan = read_plan(built.engine)
        item = self._item
        problems = check_plan(
            plan, built.report, model, item.inputs, item.outputs, item.profiles, self._target.compute_capabilities
        )
        if problems:
            located = [Problem(p.message, f"{item.name}, {p.where}".rstrip(", "), p.expected, p.got) for p in problems]
            raise VerificationError(
                f"the engine is not what was asked for: {located[0]}", where=item.name, problems=located
            )
        expected = expected_weights(model)
        return {
            "chips": sorted(plan.chips),
            "constants": [dict(sorted(constants.items())) for constants in plan.constants],
            "expected": dict(sorted(expected.fewest.items())),
            "inputs": len(item.inputs),
            "outputs": len(item.outputs),
        }

    def _record(self, engine: Path, lowered: Lowered, built: Built, checks: dict[str, Any]) -> sidecar.EngineRecord:
        item = self._item
        return sidecar.EngineRecord(
            component=item.name,
            source={**self._source.facts, "file": item.original.name},
            target=sidecar.target_facts(self._target),
            builder=sidecar.builder_facts(built),
            engine_sha256=sha256_of_file(engine),
            engine_bytes=engine.stat().st_size,
            precision=lowered.precision,
            lowering=sidecar.lowering_facts(lowered),
            inputs=sidecar.tensor_facts(item.inputs),
            outputs=sidecar.tensor_facts(item.outputs),
            profiles=sidecar.profile_facts(item.profiles),
            memory=sidecar.memory_facts(built),
            warnings=list(built.warnings),
            checked=self._verify,
            checks=checks,
        )
