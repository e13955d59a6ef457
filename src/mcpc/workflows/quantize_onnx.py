"""`mcpc quantize FILE.onnx`: one graph, checked against the float file on seeded inputs."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveInitializersFromInputsPass

from mcpc.config.recipe import Recipe
from mcpc.core.progress import Progress
from mcpc.core.report import Report
from mcpc.core.runner import Array
from mcpc.errors import BadInputError, McpcError, Problem, VerificationError
from mcpc.graph import describe, io
from mcpc.graph.widen import widen
from mcpc.package.writer import pretty_json
from mcpc.passes.quantize.plan import Decision, Int4Block
from mcpc.passes.quantize.store import write_weights
from mcpc.passes.quantize.weights import survey
from mcpc.storage.directories import staged_directory
from mcpc.verify.compare import Difference, Gate, compare, failures
from mcpc.verify.gates import INT4_COSINE, INT8_COSINE
from mcpc.workflows.environment import peak_rss_bytes, tool_versions
from mcpc.workflows.quantize_steps import plan_figures, plan_for, refuse_quantized, rewrite, step_records

#: DequantizeLinear with `block_size` and INT4 came with opset 21, the one that packages have.
OPSET = 21
#: Sizes of the dynamic dimensions in the seeded cases, in the order in which the names appear.
_SIZES = ((1, 2, 3, 4), (3, 5, 7, 6))
_SEED = 20


def quantize_file(
    source: Path,
    output: Path,
    recipe: Recipe,
    *,
    verify: Literal["full", "none"],
    force: bool,
    dry_run: bool,
    progress: Progress,
) -> Report:
    """Quantize the weights of an ONNX file; `output` gets the graph, its weights and the reports.

    Raises:
        BadInputError: The file is damaged or quantized already.
        UnsupportedError: Its opset cannot be raised to 21.
        VerificationError: The outputs differ by more than the gate allows.
    """
    progress.stage("reading", str(source))
    model = io.load(source)
    refuse_quantized({"": model}, str(source))
    before = model.opset_imports.get("", 0)
    model = io.raise_opset(model, OPSET, source)
    RemoveInitializersFromInputsPass()(model)  # files of IR version 3 list every weight as an input
    widen(model)
    plan = plan_for({"": model}, recipe, {})
    opsets = {"input": before, "output": model.opset_imports.get("", 0)}
    data: dict[str, Any] = {"kind": "onnx", "recipe": recipe.meta.name, "opset": opsets, "plan": plan_figures(plan)}
    if dry_run:
        return Report("quantize", data=data)
    if not any(decision.form for decision in plan):
        raise BadInputError(
            "the recipe takes no weight of this file",
            where=str(source),
            hint="--dry-run lists every weight with the reason",
        )
    started = time.perf_counter()
    with staged_directory(output, force) as root:
        target = root / source.name
        progress.stage("quantizing", f"{sum(1 for decision in plan if decision.form)} weights")
        rewrite({"": model}, recipe, plan, progress)
        write_weights({"": model}, {"": f"weights/{source.stem}.safetensors"}, root, progress)
        io.save(model, target)
        io.check(target)
        stages = {"quantize_s": time.perf_counter() - started}
        checked: dict[str, Any] = {"checked": "none"}
        if verify == "full":
            progress.stage("verifying", "against the float file")
            checked = {"checked": "executed", **_check(source, target, plan, progress)}
            stages["verify_s"] = time.perf_counter() - started - stages["quantize_s"]
        data |= {
            "steps": list(step_records(recipe)),
            "bytes": {"input": _bytes(source), "output": _bytes(target)},
            "verification": checked,
            "stages": stages,
            "peak_rss_bytes": peak_rss_bytes(),
            "environment": tool_versions(),
        }
        report = Report("quantize", str(checked["checked"]), data)
        (root / "report.json").write_text(pretty_json(report.to_dict()), encoding="utf-8")
    return report


def _check(source: Path, target: Path, plan: tuple[Decision, ...], progress: Progress) -> dict[str, Any]:
    """Compare the two files on seeded inputs of two sizes; return the figures.

    Raises:
        VerificationError: An output misses the gate, or the file cannot be run on made-up inputs.
    """
    from mcpc.backends.ort import open_model

    int4 = any(isinstance(decision.form, Int4Block) for decision in plan)
    gate = Gate(cosine=INT4_COSINE if int4 else INT8_COSINE)
    model = io.load(source)
    float_file, quantized = open_model(source), open_model(target, accuracy_level=1)
    worst: dict[str, Difference] = {}
    problems = []
    for number in range(len(_SIZES)):
        progress.advance(number, len(_SIZES), f"case {number}")
        feeds = _feeds(model, number)
        try:
            expected = float_file.run(feeds)
        except McpcError as error:
            raise VerificationError(
                "the float file cannot be run on seeded inputs",
                where=str(source),
                got=error.got or error.message,
                hint="--verify none skips the comparison and marks the output unverified",
            ) from error
        actual = quantized.run(feeds)
        for name, value in expected.items():
            if value.dtype.kind != "f":
                continue  # indices and masks follow from the float outputs
            difference = compare(actual[name], value)
            worst[name] = difference.worst(worst[name]) if name in worst else difference
            problems += [Problem(reason, f"{name} (case {number})") for reason in failures(difference, gate)]
    if not worst:
        raise VerificationError(
            "the file has no float output to compare", where=str(source), hint="--verify none skips the comparison"
        )
    if problems:
        raise VerificationError(
            f"the numbers differ: {problems[0]}",
            where=str(source),
            problems=problems,
            hint="--keep-int8 PATTERN or --keep-wide PATTERN leaves sensitive weights out",
        )
    return {
        "gate": {"cosine": gate.cosine},
        "cases": len(_SIZES),
        "outputs": {name: asdict(item) for name, item in worst.items()},
    }


def _feeds(model: ir.Model, case: int) -> dict[str, Array]:
    """Return seeded inputs; integers stay below the rows of the smallest gathered table."""
    generator = np.random.default_rng(_SEED + case)
    rows = [weight.shape[0] for weight in survey({"": model}) if any(s.node.op_type == "Gather" for s in weight.sites)]
    sizes: dict[str, int] = {}
    feeds: dict[str, Array] = {}
    for value in _inputs(model):
        shape = []
        for axis, dim in enumerate(value.shape or ()):
            name = "" if isinstance(dim, int) else str(dim.value or f"{value.name}.{axis}")
            shape.append(
                dim if isinstance(dim, int) else sizes.setdefault(name, _SIZES[case][len(sizes) % len(_SIZES[case])])
            )
        dtype = (value.dtype or ir.DataType.FLOAT).numpy()
        if dtype.kind == "b":
            feeds[str(value.name)] = generator.integers(0, 2, shape).astype(bool)
        elif dtype.kind in "iu":
            feeds[str(value.name)] = generator.integers(0, min(rows, default=2), shape).astype(dtype)
        else:
            feeds[str(value.name)] = generator.standard_normal(shape).astype(np.float32)
    return feeds


def _inputs(model: ir.Model) -> list[ir.Value]:
    """Return the graph inputs that have no stored default."""
    return [value for value in model.graph.inputs if value.name not in model.graph.initializers]


def _bytes(path: Path) -> int:
    """Return the bytes of a graph and of the weight files that it points into."""
    files = describe.weight_files(io.load(path))
    return path.stat().st_size + sum((path.parent / file).stat().st_size for file in files)
