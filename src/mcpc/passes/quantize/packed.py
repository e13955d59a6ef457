"""Put matrices that a checkpoint stores in four bits into a fresh graph, in the canonical INT4 form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx_ir as ir

from mcpc.checkpoint import Checkpoint
from mcpc.errors import UnsupportedError
from mcpc.graph.weights import INT4, Span, unbound_initializers
from mcpc.passes.quantize.editor import Editor, graph_of
from mcpc.passes.quantize.linear import multiply
from mcpc.passes.quantize.weights import Site, sites_of


def place_packed(
    model: ir.Model, checkpoint: Checkpoint, source: Mapping[str, str], spans: Mapping[str, Span], base: Path
) -> dict[str, str]:
    """Replace every use of a four-bit matrix by `x @ DequantizeLinear(Q, scale)`, as `LinearInt4` does.

    Args:
        model: A traced graph, whose weights wait for their bytes.
        checkpoint: Says which tensors are in four bits.
        source: Parameter -> checkpoint tensor.
        spans: Where integers and scales lie in the package.
        base: Folder of the package.

    Returns:
        New initializer -> the checkpoint tensor that it was made from.

    Raises:
        UnsupportedError: A matrix is used by something else than a MatMul or Gemm.
    """
    editor = Editor(model)
    for value in unbound_initializers(model):
        if (key := source[str(value.name)]) not in checkpoint.packed:
            continue
        for site in sites_of("", value):
            if site.unfit or not site.is_linear or not site.transposed:
                raise UnsupportedError(
                    "a matrix in four bits is used by something else than a Linear layer", where=key,
                    got=site.unfit or site.node.op_type,
                )  # fmt: skip
            _replace(editor, site, checkpoint, key, spans, base)
        editor.drop_unused(value)
    return {name: made_from for name, (made_from, _) in editor.made.items()}


def _replace(
    editor: Editor, site: Site, checkpoint: Checkpoint, key: str, spans: Mapping[str, Span], base: Path
) -> None:
    matrix, name = checkpoint.packed[key], str(site.value.name)
    pair = []
    for label, tensor, dtype, shape in (
        ("", key, ir.DataType.INT4, (matrix.depth, matrix.columns)),
        (".scale", matrix.scales.name, ir.DataType.FLOAT, matrix.scales.shape),
    ):
        span = spans[tensor]
        stored = ir.ExternalTensor(
            span.file, span.offset, span.length, dtype, shape=ir.Shape(shape), name=editor.name(f"{name}.int4{label}"),
            base_dir=str(base),
        )  # fmt: skip
        pair.append(editor.initializer(graph_of(site.node), stored, tensor, INT4 + label))
    attributes = [ir.AttrInt64("axis", 0), ir.AttrInt64("block_size", matrix.group)]
    shape = (matrix.depth, matrix.columns)
    wide = editor.insert(site.node, "DequantizeLinear", pair, f"{name}.wide", ir.DataType.FLOAT, shape, attributes)
    multiply(editor, site.node, wide, matrix.columns, matrix.columns)
