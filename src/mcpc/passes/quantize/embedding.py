"""Embedding tables: INT8 rows are gathered first and widened after, so a step reads the rows it needs and no more."""

from __future__ import annotations

import onnx_ir as ir

from mcpc.config.recipe import EmbeddingInt8Options
from mcpc.core.passes import PassResult
from mcpc.core.runner import Array
from mcpc.errors import InternalError
from mcpc.graph.functions import DOMAIN, attach
from mcpc.graph.quantized_functions import vision_embed_int8
from mcpc.passes.quantize import int8
from mcpc.passes.quantize.base import Pieces, QuantizePass, register_pair
from mcpc.passes.quantize.editor import Editor, graph_of
from mcpc.passes.quantize.linear import multiply
from mcpc.passes.quantize.plan import Choice, Form, Int8Rows, matches
from mcpc.passes.quantize.streams import Source
from mcpc.passes.quantize.weights import Site, Weight


class EmbeddingInt8(QuantizePass[EmbeddingInt8Options]):
    """Store gathered tables as INT8 with a scale for each row; a head tied to the table reads the same bytes.

    Before::

        y = Gather (W, ids)                                        W: float[V,H]

    After::

        scale = Unsqueeze<axes = [-1]> (Gather (W_scale, ids))                  int8[V,H], float[V]
        y = Mul (Mul (Cast<to = float> (Gather (W_int8, ids)), scale), W_columns)

    The columns are powers of two that make the columns of a table alike before one scale is taken for each row.
    `mcpc::VisionEmbed(ids, W, ...)` becomes `mcpc::VisionEmbedInt8(ids, W_int8, W_scale, ...)`, without columns. A tied
    head becomes `MatMul (Mul (x, W_columns), Transpose (DequantizeLinear<axis = 0> (W_int8, W_scale)))`, which ONNX
    Runtime fuses for INT8.
    A DequantizeLinear before the Gather would widen the whole table at every step.

    Declines when the table is small or excluded, or when it is tied to a head of the other orientation.

    Source: ONNX DequantizeLinear-13, per-axis; row scales as in the row-wise quantized embeddings of FBGEMM.
    """

    id = "quantize.embedding-int8"
    version = 1

    def choose(self, weight: Weight) -> Choice:
        """Take tables that are gathered by rows."""
        tied = [site for site in weight.sites if site.is_linear]
        if len(tied) == len(weight.sites):
            return Choice()
        if weight.elements < self.config.minimum_elements:
            return Choice(reason=f"a small table: {weight.elements} elements, below {self.config.minimum_elements}")
        pattern = matches(weight, self.config.exclude)
        if pattern:
            return Choice(reason=f"excluded by {pattern!r}")
        if not all(site.transposed for site in tied):
            return Choice(reason="gathered by rows and multiplied as [K,N]: no scale fits both")
        calls = [site for site in weight.sites if site.node.op_type == "VisionEmbed"]
        return Choice(Int8Rows(tied=bool(tied), equalized=not calls))

    def replace(self, editor: Editor, site: Site, weight: Weight, form: Form) -> None:
        """Put the INT8 rows in the place of one Gather, VisionEmbed, MatMul or Gemm."""
        if not isinstance(form, Int8Rows):
            raise InternalError("the plan gives this pass another form", where=weight.name, got=str(form))
        source = Source(weight.tensor)
        columns = int8.column_scales(source) if form.equalized else None
        table, scale = register_pair(
            editor,
            site,
            form,
            source.key,
            Pieces(ir.DataType.INT8, weight.shape, lambda: int8.rows(source, columns)),
            Pieces(ir.DataType.FLOAT, weight.shape[:1], lambda: int8.row_scales(source, columns)),
        )
        factors = None if columns is None else _column_initializer(editor, site, columns, form)
        if site.is_linear:
            _head(editor, site, table, scale, factors, weight.shape)
        elif site.node.op_type == "Gather":
            _gather(editor, site.node, table, scale, factors)
        else:
            _vision_embed(editor, site.node, table, scale)

    def rewrite(self, model: ir.Model) -> PassResult:
        """Replace the tables, and exchange the functions that are called."""
        result = super().rewrite(model)
        if result.modified:
            attach(model, vision_embed_int8())
            drop_uncalled(model, "VisionEmbed")
        return result


def drop_uncalled(model: ir.Model, name: str) -> None:
    """Remove the `mcpc` function of a name when no node calls it any more."""
    called = {node.op_identifier() for node in model.graph.all_nodes()}
    for identifier in [key for key in model.functions if key[:2] == (DOMAIN, name) and key not in called]:
        del model.functions[identifier]


def _column_initializer(editor: Editor, site: Site, columns: Array, form: Form) -> ir.Value:
    name = str(site.value.name)
    tensor = ir.Tensor(columns, name=editor.name(f"{name}.int8.columns"))
    return editor.initializer(graph_of(site.node), tensor, name, form.transform + ".columns")


def _gather(editor: Editor, node: ir.Node, table: ir.Value, scale: ir.Value, columns: ir.Value | None) -> None:
    ids, old = node.inputs[1], node.outputs[0]
    name, dtype, shape = str(old.name), ir.DataType.FLOAT, old.shape
    lead = None if shape is None else [*shape][:-1]
    axis, last = [ir.AttrInt64("axis", 0)], editor.integers(graph_of(node), [-1])
    rows = editor.insert(node, "Gather", [table, ids], f"{name}.int8", ir.DataType.INT8, shape, axis)
    wide = editor.insert(node, "Cast", [rows], f"{name}.unscaled", dtype, shape, [ir.AttrInt64("to", int(dtype))])
    scales = editor.insert(node, "Gather", [scale, ids], f"{name}.scale", dtype, lead, axis)
    column = None if lead is None else [*lead, 1]
    scales = editor.insert(node, "Unsqueeze", [scales, last], f"{name}.row_scale", dtype, column)
    result = editor.insert(node, "Mul", [wide, scales], f"{name}.rows", dtype, shape)
    if columns is not None:
        result = editor.insert(node, "Mul", [result, columns], f"{name}.equalized", dtype, shape)
    editor.replace(node, result)


def _vision_embed(editor: Editor, node: ir.Node, table: ir.Value, scale: ir.Value) -> None:
    ids, _, features, positions = node.inputs
    inputs = [ids, table, scale, features, positions]
    old = node.outputs[0]
    attributes = list(node.attributes.values())
    result = editor.insert(
        node, "VisionEmbedInt8", inputs, f"{old.name}.rows", ir.DataType.FLOAT, old.shape, attributes, DOMAIN
    )
    editor.replace(node, result)


def _head(
    editor: Editor, site: Site, table: ir.Value, scale: ir.Value, columns: ir.Value | None, shape: tuple[int, ...]
) -> None:
    node, name, dtype = site.node, site.value.name, ir.DataType.FLOAT
    x = node.inputs[0]
    if columns is not None and x is not None:
        node.replace_input_with(0, editor.insert(node, "Mul", [x, columns], f"{name}.input", dtype, x.shape))
    axis, perm = [ir.AttrInt64("axis", 0)], [ir.AttrInt64s("perm", [1, 0])]
    wide = editor.insert(node, "DequantizeLinear", [table, scale], f"{name}.wide", dtype, shape, axis)
    turned = editor.insert(node, "Transpose", [wide], f"{name}.turned", dtype, shape[::-1], perm)
    multiply(editor, node, turned, shape[0], shape[0])
