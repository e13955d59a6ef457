"""Back from gathered INT8 rows to DequantizeLinear before the Gather, for TensorRT.

TensorRT takes an INT8 constant only in front of a DequantizeLinear, and keeps the table packed there; ONNX Runtime
would widen the whole table at every step in that form. So packages hold the first form, and a TensorRT lowering runs
this pass.
"""

from __future__ import annotations

import onnx_ir as ir

from mcpc.core.passes import Numerics, Pass, PassResult
from mcpc.graph.functions import DOMAIN, attach, vision_embed
from mcpc.passes.quantize.editor import Editor, graph_of
from mcpc.passes.quantize.embedding import drop_uncalled


class DequantizeTables(Pass[None]):
    """Move the scales of INT8 tables in front of the Gather.

    Before::

        scale = Unsqueeze<axes = [-1]> (Gather (W_scale, ids))                  int8[V,H], float[V]
        y = Mul (Cast<to = float> (Gather (W_int8, ids)), scale)

    After::

        y = Gather (DequantizeLinear<axis = 0> (W_int8, W_scale), ids)

    `mcpc::VisionEmbedInt8(ids, W_int8, W_scale, ...)` becomes `mcpc::VisionEmbed` over the DequantizeLinear. Each
    element is the same product of the same two floats.

    Declines when the pattern is not exactly the one that `quantize.embedding-int8` writes.

    Source: ONNX DequantizeLinear-13, per-axis.
    """

    id = "lower.dequantize-tables"
    version = 1
    numerics = Numerics.BITWISE
    after = ("quantize.embedding-int8", "quantize.linear-int4", "quantize.linear-int8")

    def rewrite(self, model: ir.Model) -> PassResult:
        """Replace every such Mul and call."""
        editor = Editor(model)
        modified = False
        for node in list(model.graph.all_nodes()):
            if (node.domain, node.op_type) == (DOMAIN, "VisionEmbedInt8"):
                ids, table, scale, features, positions = node.inputs
                inputs = [ids, _wide(editor, node, table, scale), features, positions]
                attributes = list(node.attributes.values())
                _replace(editor, node, "VisionEmbed", inputs, attributes, DOMAIN)
                modified = True
            elif (match := _match(node)) is not None:
                table, scale, ids = match
                inputs = [_wide(editor, node, table, scale), ids]
                dead = [producer for value in node.inputs if value is not None and (producer := value.producer())]
                _replace(editor, node, "Gather", inputs, [ir.AttrInt64("axis", 0)], "")
                for producer in dead:
                    _remove_chain(editor, producer)
                modified = True
        if modified:
            attach(model, vision_embed())
            drop_uncalled(model, "VisionEmbedInt8")
        return PassResult(modified)


def _match(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """Return (table, scales, ids) of a Mul that `quantize.embedding-int8` wrote."""
    if node.op_type != "Mul" or node.domain:
        return None
    rows = _argument(_argument(node, 0, "Mul"), 0, "Cast")
    scales = _argument(_argument(node, 1, "Mul"), 0, "Unsqueeze")
    table, ids = _argument(rows, 0, "Gather"), _argument(rows, 1, "Gather")
    scale, same = _argument(scales, 0, "Gather"), _argument(scales, 1, "Gather")
    if table is None or scale is None or ids is None or ids is not same:
        return None
    if table.dtype != ir.DataType.INT8 or not table.is_initializer() or not scale.is_initializer():
        return None
    return table, scale, ids


def _argument(value: ir.Value | ir.Node | None, index: int, op_type: str) -> ir.Value | None:
    """Return an input of the node (or of the node that computes the value) when it has that op type."""
    node = value.producer() if isinstance(value, ir.Value) else value
    return node.inputs[index] if node is not None and node.op_type == op_type and not node.domain else None


def _wide(editor: Editor, node: ir.Node, table: ir.Value | None, scale: ir.Value | None) -> ir.Value:
    name = f"{table.name if table is not None else node.name}.wide"
    shape = None if table is None or table.shape is None else [*table.shape]
    axis = [ir.AttrInt64("axis", 0)]
    dtype = ir.DataType.FLOAT if scale is None or scale.dtype is None else scale.dtype
    return editor.insert(node, "DequantizeLinear", [table, scale], name, dtype, shape, axis)


def _replace(
    editor: Editor, node: ir.Node, op: str, inputs: list[ir.Value | None], attributes: list[ir.Attr], domain: str
) -> None:
    old = node.outputs[0]
    dtype = old.dtype or ir.DataType.FLOAT
    editor.replace(node, editor.insert(node, op, inputs, f"{old.name}.rows", dtype, old.shape, attributes, domain))


def _remove_chain(editor: Editor, node: ir.Node) -> None:
    """Remove a node that nothing uses, and what comes before it that then nothing uses."""
    if any(output.uses() or output.is_graph_output() for output in node.outputs):
        return
    before = [value for value in node.inputs if value is not None]
    graph_of(node).remove(node, safe=True)
    for value in before:
        producer = value.producer()
        if producer is not None:
            _remove_chain(editor, producer)
        elif value.is_initializer():
            editor.drop_unused(value)
