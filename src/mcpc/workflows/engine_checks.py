"""Execute a lowered graph, exactly as the builder gets it, and compare it with the component it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mcpc.backends.ort import open_model
from mcpc.backends.trt.lowering import FLOAT16_MAX, open_flat
from mcpc.backends.trt.ranges import probe_ranges
from mcpc.core.runner import Array, Runner
from mcpc.errors import Problem, UnsupportedError, VerificationError
from mcpc.graph.io import save
from mcpc.verify.cases import Case
from mcpc.verify.compare import Difference, Gate, compare, cosine, failures

#: The gates of each engine precision, fixed before anything is compared.
GATES = {"float32": Gate(max_abs=1e-4), "float16": Gate(cosine=0.999), "bfloat16": Gate(cosine=0.999)}


#: Least cosine of 95 % of the rows of a 16-bit engine's outputs: a few large rows, such as those of an image, must not
#: hide wrong small ones. The other 5 % are left to rows that are ill-conditioned, such as silence in an encoder.
ROW_COSINE, ROW_QUANTILE = 0.99, 0.05


def check_executed(
    component: str, original: Path, lowered: Path, precision: str, cases: Sequence[Case]
) -> dict[str, Any]:
    """Run the original and the lowered graph on the same inputs and compare every output.

    float16 graphs run as float16; ONNX Runtime has no bfloat16 kernels, so those run as their float32 twin with
    bfloat16 weights.

    Returns:
        Figures for the sidecar.

    Raises:
        VerificationError: An output misses the gate of the precision; every finding is listed.
    """
    gate = GATES[precision]
    reference = open_model(original)
    runner, form = _lowered_runner(lowered, precision)
    worst: Difference | None = None
    worst_row = 1.0
    problems = []
    for case in cases:
        expected, actual = reference.run(case.feeds), runner.run(case.feeds)
        for name, value in expected.items():
            where = f"{component}, output {name}, {case.label}"
            try:
                difference = compare(case.masked(name, actual[name]), case.masked(name, value))
            except VerificationError as error:
                problems.append(Problem(error.message, where, error.expected, error.got))
                continue
            worst = difference if worst is None else worst.worst(difference)
            row = _row_cosine(case.masked(name, actual[name]), case.masked(name, value))
            worst_row = min(worst_row, row)
            reasons = failures(difference, gate)
            if precision != "float32" and not row >= ROW_COSINE:
                reasons.append(f"cosine {row:.6f} of the worst 5 % of rows is below {ROW_COSINE:g}")
            problems += [Problem(reason, where) for reason in reasons]
    if not cases or worst is None:
        problems.append(Problem("nothing was compared", component))
    if problems:
        raise VerificationError(
            f"the lowered graph differs from its component: {problems[0]}",
            where=component,
            problems=problems,
            hint="--precision bfloat16 or float32 keeps more range or digits",
        )
    bounds = {name: bound for name, bound in asdict(gate).items() if bound is not None}
    if precision != "float32":
        bounds["row_cosine"] = ROW_COSINE
    assert worst is not None  # noqa: S101 (its absence was a problem)
    return {
        "cases": [case.label for case in cases],
        "executed_as": form,
        "gate": bounds,
        "worst": {name: float(f"{figure:.6g}") for name, figure in {**asdict(worst), "row_cosine": worst_row}.items()},
    }


def _row_cosine(actual: Array, expected: Array) -> float:
    """Return the cosine of two rows [..., H] that 95 % of the rows reach; 1.0 without any."""
    if expected.size == 0:
        return 1.0
    width = expected.shape[-1] if expected.ndim else 1
    pairs = zip(actual.reshape(-1, width), expected.reshape(-1, width), strict=True)
    return float(np.quantile([cosine(*pair) for pair in pairs], ROW_QUANTILE, method="lower"))


def _lowered_runner(lowered: Path, precision: str) -> tuple[Runner, str]:
    """Return a runner of the lowered graph and the form in which it runs."""
    if precision == "float16":
        try:
            return open_model(lowered, twin=False), "float16"
        except UnsupportedError:
            return open_model(lowered), "float32 twin with float16 weights: ONNX Runtime lacks a float16 kernel"
    return open_model(lowered), "float32" if precision == "float32" else f"float32 twin with {precision} weights"


def beyond_float16(lowered: Path, cases: Sequence[Case]) -> frozenset[str]:
    """Return the values of a float16 graph that leave its range when nothing is rounded.

    ONNX Runtime computes float16 partly in float32, so an overflow would not show: ranges are measured on the float32
    twin. What comes of a mask is left out: it is meant to be out of range.
    """
    model = open_flat(lowered)
    measured = probe_ranges(model)
    path = lowered.with_name("ranges.onnx")
    save(model, path)
    runner = open_model(path, optimize=False)
    found: set[str] = set()
    for case in cases:
        sizes = runner.run(case.feeds)
        found.update(value for output, value in measured.items() if not float(sizes[output]) <= FLOAT16_MAX)
    path.unlink()
    return frozenset(found)
