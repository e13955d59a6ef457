"""Model-local functions of domain `mcpc` that read quantized tables."""

from __future__ import annotations

import onnx_ir as ir

from mcpc.graph.io import parse_function


def vision_embed_int8() -> ir.Function:
    """Return `VisionEmbedInt8(ids, table, scales, features, pos_map) -> [B,S,H]`.

    `ids` [B,S] int64, `table` [V,H] int8, `scales` [V], `features` [N,H], `pos_map` [B,S] int32. Row
    `features[pos_map]` where `pos_map >= 0`, else `table[ids] * scales[ids]`. Rows are gathered before they are
    widened. The row appended to the features is never chosen: it makes N = 0 safe to gather from.
    """
    return parse_function(
        """<opset_import: ["" : 21], domain: "mcpc">
        VisionEmbedInt8 (ids, table, scales, features, pos_map) => (rows) {
            zero = Constant <value = int32 {0}> ()
            first = Constant <value = int64[1] {0}> ()
            last = Constant <value = int64[1] {-1}> ()
            token_int8 = Gather <axis = 0> (table, ids)
            token_unscaled = CastLike (token_int8, scales)
            token_scale = Gather <axis = 0> (scales, ids)
            token_row_scale = Unsqueeze (token_scale, last)
            token = Mul (token_unscaled, token_row_scale)
            pad_int8 = Gather <axis = 0> (table, first)
            pad = CastLike (pad_int8, features)
            padded = Concat <axis = 0> (features, pad)
            index = Max (pos_map, zero)
            image = Gather <axis = 0> (padded, index)
            is_image = GreaterOrEqual (pos_map, zero)
            is_image_row = Unsqueeze (is_image, last)
            rows = Where (is_image_row, image, token)
        }"""
    )
