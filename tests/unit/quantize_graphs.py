"""Small graphs for the tests of quantization, and what ONNX Runtime makes of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from mcpc.config.loader import parse_yaml
from mcpc.config.recipe import Recipe
from mcpc.core.progress import Silent
from mcpc.core.runner import Array
from mcpc.graph import io
from mcpc.passes.quantize.plan import Decision
from mcpc.passes.quantize.store import write_weights
from mcpc.workflows.quantize_steps import plan_for, rewrite


def model_of(body: str, **weights: Array) -> ir.Model:
    """Return the model of an ONNX text; the inputs named in `weights` become initializers."""
    model = ir.from_onnx_text('<ir_version: 10, opset_import: ["" : 21, "mcpc" : 1]>\n' + body)
    for value in list(model.graph.inputs):
        if value.name in weights:
            model.graph.inputs.remove(value)
            value.const_value = ir.Tensor(weights[value.name], name=value.name)
            model.graph.register_initializer(value)
    return model


def gaussian(*shape: int, seed: int = 0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.05).astype(np.float32)


def recipe_of(*steps: str) -> Recipe:
    lines = "".join(f"  - {{version: 1, pass: {step}}}\n" for step in steps)
    head = '__meta__: {kind: recipe, schema_version: "1.0", name: test, version: 1.0.0}\nsteps:\n'
    return parse_yaml(head + lines, Recipe, "test.yaml")


INT4 = recipe_of(
    "quantize.embedding-int8, options: {minimum_elements: 64}", "quantize.linear-int4", "quantize.linear-int8"
)
INT8 = recipe_of("quantize.embedding-int8, options: {minimum_elements: 64}", "quantize.linear-int8")


def quantized(model: ir.Model, recipe: Recipe, folder: Path) -> tuple[Path, tuple[Decision, ...]]:
    """Quantize the model in place; return the saved and checked file, and the plan."""
    plan = plan_for({"": model}, recipe, {})
    rewrite({"": model}, recipe, plan, Silent())
    write_weights({"": model}, {"": "weights/model.safetensors"}, folder, Silent())
    path = folder / "model.onnx"
    io.save(model, path)
    io.check(path)
    return path, plan


def fused_ops(path: Path) -> Counter[str]:
    """Return the ops of ONNX Runtime's optimized graph."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    optimized = path.with_suffix(".optimized.onnx")
    options.optimized_model_filepath = str(optimized)
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in ir.load(optimized).graph.all_nodes())
