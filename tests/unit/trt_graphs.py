"""Small graphs for the tests of the TensorRT backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from mcpc.graph import io

FLOAT, HALF, BF16 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16


def value(name: str, dtype: ir.DataType, shape: Sequence[int | str] | None) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=None if shape is None else ir.Shape(shape))


def constant(name: str, array: NDArray[np.generic], dtype: ir.DataType | None = None) -> ir.Value:
    tensor = ir.Tensor(array, dtype=dtype, name=name)
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)


def step(
    op: str,
    inputs: Sequence[ir.Value | None],
    name: str,
    dtype: ir.DataType = FLOAT,
    shape: Sequence[int | str] | None = None,
    attributes: Mapping[str, int | float | str | Sequence[int]] | None = None,
    domain: str = "",
) -> ir.Value:
    """Return the output of a new node; the node is called `<name>_node`."""
    output = value(name, dtype, shape)
    ir.node(op, inputs, attributes or {}, domain=domain, outputs=[output], name=f"{name}_node")
    return output


def model(inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], opset: int = 21, **domains: int) -> ir.Model:
    """Return a model of everything that the outputs are computed from."""
    nodes: list[ir.Node] = []
    constants: dict[str, ir.Value] = {}

    def visit(item: ir.Value | None) -> None:
        if item is None:
            return
        if item.const_value is not None:
            constants[str(item.name)] = item
        producer = item.producer()
        if producer is not None and producer not in nodes:
            for before in producer.inputs:
                visit(before)
            nodes.append(producer)

    for output in outputs:
        visit(output)
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=nodes,
        initializers=list(constants.values()),
        opset_imports={"": opset, **domains},
        name="g",
    )
    return ir.Model(graph, ir_version=10)


def saved(made: ir.Model, path: Path) -> Path:
    io.save(made, path)
    return path


def linear(path: Path, columns: int = 64, scale: float = 0.05, outputs: int = 1) -> Path:
    """Write relu(x @ w) with x [batch, sequence, 64]; weights of the given scale."""
    random = np.random.default_rng(0)
    x = value("x", FLOAT, ["batch", "sequence", 64])
    weight = constant("w", (scale * random.standard_normal((64, columns))).astype(np.float32))
    product = step("MatMul", [x, weight], "product", shape=["batch", "sequence", columns])
    y = step("Relu", [product], "y", shape=["batch", "sequence", columns])
    return saved(model([x], [y, product][:outputs]), path)


def packed_linear(
    rows: int = 64, columns: int = 64, block: int = 32, zero_point: int | None = None
) -> tuple[ir.Model, str]:
    """Return x @ dequantize(w), an INT4 weight [rows, columns] in blocks; and the name of its DequantizeLinear."""
    import ml_dtypes

    random = np.random.default_rng(0)
    blocks = -(-rows // block)
    quantized = constant("w_int4", random.integers(-7, 8, (rows, columns)).astype(ml_dtypes.int4))
    inputs: list[ir.Value | None] = [quantized, constant("w_scale", np.full((blocks, columns), 0.01, np.float32))]
    if zero_point is not None:
        inputs.append(constant("w_zero", np.full((blocks, columns), zero_point).astype(ml_dtypes.int4)))
    wide = step("DequantizeLinear", inputs, "wide", shape=[rows, columns], attributes={"axis": 0, "block_size": block})
    x = value("x", FLOAT, ["batch", "sequence", rows])
    y = step("MatMul", [x, wide], "y", shape=["batch", "sequence", columns])
    return model([x], [y]), "wide_node"
