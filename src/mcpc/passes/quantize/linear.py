"""Linear weights: `x @ W` becomes `x @ DequantizeLinear(Q, scale)`, with Q stored [K,N].

ONNX Runtime makes one MatMulNBits of exactly this form. Traps that the rewrite avoids, seen in its optimized graphs:

- a weight behind a Transpose (INT4) or Gemm(transB) is widened at every run;
- a rank-2 `MatMul + Add + Relu` becomes FusedGemm and the weight is widened at every run, and a MatMul right before a
  Relu or Clip is not fused at all: such an input gets a leading dimension, which the output loses again;
- two nodes that share one initializer are not fused, so each use has its own initializer, over the same bytes.
"""

from __future__ import annotations

import onnx_ir as ir

from mcpc.config.recipe import LinearInt4Options, LinearInt8Options
from mcpc.errors import InternalError
from mcpc.passes.quantize import int4, int8
from mcpc.passes.quantize.base import Pieces, QuantizePass, register_pair
from mcpc.passes.quantize.editor import Editor, graph_of
from mcpc.passes.quantize.plan import Choice, Form, Int4Block, Int8Channel, matches
from mcpc.passes.quantize.streams import Source
from mcpc.passes.quantize.weights import Site, Weight

#: Block sizes that ONNX Runtime's MatMulNBits and TensorRT both take.
BLOCKS = (128, 64, 32)


class LinearInt4(QuantizePass[LinearInt4Options]):
    """Store Linear weights as packed INT4 in blocks along K.

    Before::

        y = Gemm<transB = 1> (x, W, b)               W: float[N,K]

    After::

        w = DequantizeLinear<axis = 0, block_size = 32> (W_int4, W_scale)     int4[K,N], float[K/32,N]
        y = Add (MatMul (x, w), b)

    Declines when the weight is small or excluded, or when no block of 32 or more divides K; a smaller block than the
    one asked for is taken when only that divides. An odd N gets a zero column, cut off again by a Slice: TensorRT
    widens an odd INT4 weight at every run.

    Source: shared block scales as in GPTQ and AWQ files, rounding to nearest; the form is ONNX DequantizeLinear-21.
    """

    id = "quantize.linear-int4"
    version = 1
    after = ("quantize.embedding-int8",)

    def choose(self, weight: Weight) -> Choice:
        """Take Linear weights whose K a block divides."""
        refusal = _refusal(weight, self.config.minimum_elements, self.config.exclude)
        if refusal is not None:
            return refusal
        rows, columns = weight.shape
        depths = {columns if site.transposed else rows for site in weight.sites}
        widths = {rows if site.transposed else columns for site in weight.sites}
        block = next(
            (size for size in BLOCKS if size <= self.config.block and all(depth % size == 0 for depth in depths)), 0
        )
        wanted = f"K = {min(depths)} is no multiple of {self.config.block}"
        if not block:
            return Choice(reason=f"{wanted}, nor of a smaller block: no INT4")
        return Choice(
            Int4Block(block, padded=any(width % 2 for width in widths)),
            "" if block == self.config.block else f"{wanted}: block {block}",
        )

    def replace(self, editor: Editor, site: Site, weight: Weight, form: Form) -> None:
        """Put the INT4 form in the place of one MatMul or Gemm."""
        if not isinstance(form, Int4Block):
            raise InternalError("the plan gives this pass another form", where=weight.name, got=str(form))
        source, block = Source(weight.tensor), form.block
        quantized = int4.Int4Weight(source, block, site.transposed)
        columns = weight.shape[0] if site.transposed else weight.shape[1]
        pair = register_pair(
            editor,
            site,
            form,
            (source.key, site.transposed),
            Pieces(ir.DataType.INT4, quantized.shape, quantized.packed),
            Pieces(ir.DataType.FLOAT, quantized.scale_shape, quantized.scales),
        )
        attributes = [ir.AttrInt64("axis", 0), ir.AttrInt64("block_size", block)]
        name = f"{site.value.name}.wide"
        wide = editor.insert(site.node, "DequantizeLinear", pair, name, ir.DataType.FLOAT, quantized.shape, attributes)
        multiply(editor, site.node, wide, quantized.shape[1], columns)


class LinearInt8(QuantizePass[LinearInt8Options]):
    """Store Linear weights as INT8 with a scale for each output channel.

    Before::

        y = MatMul (x, Transpose<perm = [1, 0]> (W))               W: float[N,K]

    After::

        w = DequantizeLinear<axis = 1> (W_int8, W_scale)           int8[K,N], float[N]
        y = MatMul (x, w)

    Declines when the weight is small or excluded.

    Source: ONNX DequantizeLinear-13, per-axis.
    """

    id = "quantize.linear-int8"
    version = 1
    after = ("quantize.embedding-int8", "quantize.linear-int4")

    def choose(self, weight: Weight) -> Choice:
        """Take Linear weights of any width."""
        refusal = _refusal(weight, self.config.minimum_elements, self.config.exclude)
        return Choice(Int8Channel()) if refusal is None else refusal

    def replace(self, editor: Editor, site: Site, weight: Weight, form: Form) -> None:
        """Put the INT8 form in the place of one MatMul or Gemm."""
        if not isinstance(form, Int8Channel):
            raise InternalError("the plan gives this pass another form", where=weight.name, got=str(form))
        source, transposed = Source(weight.tensor), site.transposed
        columns, depth = weight.shape if transposed else weight.shape[::-1]
        pair = register_pair(
            editor,
            site,
            form,
            (source.key, transposed),
            Pieces(ir.DataType.INT8, (depth, columns), lambda: int8.channels(source, transposed)),
            Pieces(ir.DataType.FLOAT, (columns,), lambda: int8.channel_scales(source, transposed)),
        )
        axis = [ir.AttrInt64("axis", 1)]
        name = f"{site.value.name}.wide"
        wide = editor.insert(site.node, "DequantizeLinear", pair, name, ir.DataType.FLOAT, (depth, columns), axis)
        multiply(editor, site.node, wide, columns, columns)


def _refusal(weight: Weight, minimum_elements: int, exclude: tuple[str, ...]) -> Choice | None:
    """Return why a pass over Linear weights leaves a weight alone; None when it takes it."""
    if not all(site.is_linear for site in weight.sites):
        return Choice()
    if weight.elements < minimum_elements:
        return Choice(reason=f"small: {weight.elements} elements, below {minimum_elements}")
    pattern = matches(weight, exclude)
    return Choice(reason=f"excluded by {pattern!r}") if pattern else None


def multiply(editor: Editor, node: ir.Node, weight: ir.Value, width: int, columns: int) -> None:
    """Replace a MatMul or Gemm by a MatMul with `weight` [K, width], a Slice to `columns`, and an Add of the bias."""
    x, old = node.inputs[0], node.outputs[0]
    if x is None:
        raise InternalError("a MatMul has no left operand", where=str(node.name))
    bias = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
    lifted = _is_trapped(old, biased=bias is not None, low_rank=x.shape is None or len(x.shape) < 3)
    if node.op_type == "MatMul" and not lifted and width == columns:
        node.replace_input_with(1, weight)
        return
    name, dtype, graph = str(old.name), ir.DataType.FLOAT, graph_of(node)
    lead = None if old.shape is None else [*old.shape][:-1]
    one = editor.integers(graph, [0]) if lifted else None
    if lifted:
        shape = None if x.shape is None else [1, *x.shape]
        x = editor.insert(node, "Unsqueeze", [x, one], f"{name}.lifted", dtype, shape)
    shape = None if lead is None else [*([1] if lifted else []), *lead, width]
    result = editor.insert(node, "MatMul", [x, weight], f"{name}.product", dtype, shape)
    if lifted:
        shape = None if lead is None else [*lead, width]
        result = editor.insert(node, "Squeeze", [result, one], f"{name}.flat", dtype, shape)
    if width != columns:
        ends = [editor.integers(graph, [value]) for value in (0, columns, -1)]
        shape = None if lead is None else [*lead, columns]
        result = editor.insert(node, "Slice", [result, *ends], f"{name}.cut", dtype, shape)
    if bias is not None:
        result = editor.insert(node, "Add", [result, bias], f"{name}.biased", dtype, old.shape)
    editor.replace(node, result)


def _is_trapped(product: ir.Value, biased: bool, low_rank: bool) -> bool:
    """Return whether ONNX Runtime would fuse a product with what follows instead of with its weight."""
    followers = {use.node.op_type for use in product.uses()}
    added = biased or "Add" in followers
    return (added and low_rank) or (not biased and bool(followers & {"Relu", "Clip"}))
