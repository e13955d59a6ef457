"""Three forms of a linear layer over the same weights: load time, memory and step time in ONNX Runtime.

    python benchmarks/linear_form.py [--output docs/figures/linear_form.json]

`transpose`: the checkpoint's matrix [N,K], Transpose, MatMul. `gemm`: the same matrix, Reshape to two dimensions, Gemm
with transB. `turned`: a matrix [K,N] that convert would have to write anew, MatMul. Each stack of layers has the widths
of a 1B decoder, with weights in float32, and in float16 with a Cast before what reads them. Every row is measured in a
fresh process: seconds to open a session, its resident memory then and at its peak, and medians of a step of one token
and of a prompt of 128. Ratios are to `transpose` of the same dtype.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from mcpc.graph import io
from mcpc.graph.io import dtype_of
from mcpc.storage.safetensors import Plan, write_stream
from mcpc.workflows.environment import peak_rss_bytes

LAYERS, HIDDEN, INNER = 12, 2048, 5504
FORMS = ("transpose", "gemm", "turned")
FOLDER_OPTION = "session.model_external_initializers_file_folder_path"


def shapes() -> Iterator[tuple[str, int, int]]:
    """Yield (name, N, K) of every layer."""
    for layer in range(LAYERS):
        yield f"{layer}.up", INNER, HIDDEN
        yield f"{layer}.down", HIDDEN, INNER


def write_model(folder: Path, form: str, dtype: str) -> None:
    """Write `model.onnx` and its weights: residual blocks of two linear layers."""
    random = np.random.default_rng(0)
    stored = [(name, (k, n) if form == "turned" else (n, k)) for name, n, k in shapes()]
    plans = [Plan(name, dtype, shape) for name, shape in stored]
    arrays = ((0.02 * random.standard_normal(shape, np.float32)).astype(dtype) for _, shape in stored)
    with (folder / "weights.safetensors").open("wb") as file:
        spans = write_stream(file, plans, arrays)
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(("batch", "sequence", HIDDEN)))
    nodes: list[ir.Node] = []
    weights: list[ir.Value] = []

    def add(op: str, inputs: list[ir.Value], **attributes: Any) -> ir.Value:
        nodes.append(ir.node(op, inputs, attributes))
        nodes[-1].outputs[0].name = f"{op}.{len(nodes)}"
        return nodes[-1].outputs[0]

    def constant(name: str, values: list[int]) -> ir.Value:
        tensor = ir.tensor(np.array(values, np.int64), name=name)
        shape = ir.Shape((len(values),))
        weights.append(ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor))
        return weights[-1]

    def linear(value: ir.Value, plan: Plan, columns: int, batch: ir.Value) -> ir.Value:
        offset, length = spans[plan.name]
        tensor = ir.ExternalTensor(
            "weights.safetensors", offset, length, dtype_of(dtype), shape=ir.Shape(plan.shape), name=plan.name,
            base_dir=folder,
        )  # fmt: skip
        matrix = ir.Value(name=plan.name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        weights.append(matrix)
        wide = matrix if dtype == "float32" else add("Cast", [matrix], to=int(ir.DataType.FLOAT))
        if form == "turned":
            return add("MatMul", [value, wide])
        if form == "transpose":
            return add("MatMul", [value, add("Transpose", [wide], perm=[1, 0])])
        depth = plan.shape[1]
        rows = add("Reshape", [value, constant(f"{plan.name}.rows", [-1, depth])])
        product = add("Gemm", [rows, wide], transB=1)
        return add("Reshape", [product, add("Concat", [batch, constant(f"{plan.name}.width", [columns])], axis=0)])

    batch = add("Shape", [x], start=0, end=2)
    value = x
    for number in range(LAYERS):
        inner = add("Relu", [linear(value, plans[2 * number], INNER, batch)])
        value = add("Add", [value, linear(inner, plans[2 * number + 1], HIDDEN, batch)])
    value.name, value.type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([x], [value], nodes=nodes, initializers=weights, opset_imports={"": 23}, name=form)
    io.save(ir.Model(graph, ir_version=10), folder / "model.onnx")


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def median_ms(session: ort.InferenceSession, tokens: int, runs: int) -> float:
    """Return the median milliseconds of a run."""
    feeds = {"x": np.random.default_rng(1).standard_normal((1, tokens, HIDDEN), np.float32)}
    taken = []
    for _ in range(runs + 3):
        begun = time.perf_counter()
        session.run(None, feeds)
        taken.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(taken[3:])


def measure(folder: Path) -> dict[str, float]:
    """Open the model of a folder and run it; for a fresh process."""
    before = resident_bytes()
    begun = time.perf_counter()
    session = ort.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    load_s = time.perf_counter() - begun
    loaded = resident_bytes() - before
    return {
        "load_s": round(load_s, 2),
        "loaded_mb": round(loaded / 1e6),
        "step_ms": round(median_ms(session, 1, 30), 1),
        "prompt_ms": round(median_ms(session, 128, 5), 1),
        "peak_mb": round(peak_rss_bytes() / 1e6),
    }


def main() -> None:
    """Measure every form, print the rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    rows: dict[str, dict[str, Any]] = {}
    for dtype in ("float32", "float16"):
        for form in FORMS:
            with tempfile.TemporaryDirectory() as folder:
                write_model(Path(folder), form, dtype)
                command = [sys.executable, __file__, "--measure", folder]
                figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            first = rows.get(f"{dtype} {FORMS[0]}", figures)
            ratios = {name: round(value / first[name], 2) for name, value in figures.items()}
            rows[f"{dtype} {form}"] = {**figures, "ratios": ratios}
            print(f"{dtype} {form}: {json.dumps(rows[f'{dtype} {form}'])}")
    if options.output:
        options.output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
