"""Model-local functions of domain `mcpc`: the portable bodies of ops that a backend may replace by a plugin."""

from __future__ import annotations

import onnx_ir as ir

from mcpc.graph.io import parse_function

DOMAIN = "mcpc"
VERSION = 1
#: TensorRT looks a plugin up by this attribute first; without it the body is taken in silence.
PLUGIN_NAMESPACE = "plugin_namespace"


def vision_embed() -> ir.Function:
    """Return `VisionEmbed(ids [B,S] int64, table [V,H], features [N,H], pos_map [B,S] int32) -> [B,S,H]`.

    Row `features[pos_map]` where `pos_map >= 0`, else `table[ids]`. One table row is appended to the features, so
    that N = 0 gathers from a non-empty tensor. No attributes: TensorRT ignores attribute references.
    """
    return parse_function(
        """<opset_import: ["" : 21], domain: "mcpc">
        VisionEmbed (ids, table, features, pos_map) => (rows) {
            zero = Constant <value = int32 {0}> ()
            first = Constant <value = int64[1] {0}> ()
            last = Constant <value = int64[1] {-1}> ()
            token = Gather <axis = 0> (table, ids)
            pad = Gather <axis = 0> (table, first)
            padded = Concat <axis = 0> (features, pad)
            index = Max (pos_map, zero)
            image = Gather <axis = 0> (padded, index)
            is_image = GreaterOrEqual (pos_map, zero)
            is_image_row = Unsqueeze (is_image, last)
            rows = Where (is_image_row, image, token)
        }"""
    )


def attach(model: ir.Model, function: ir.Function) -> tuple[str, ...]:
    """Add a function to the model when a node calls it, mark the calls for plugins; return its qualified name."""
    calls = [
        node for node in model.graph.all_nodes() if (node.domain, node.op_type) == (function.domain, function.name)
    ]
    if not calls:
        return ()
    model.functions[function.identifier()] = function
    model.opset_imports[DOMAIN] = VERSION
    for node in calls:
        node.attributes[PLUGIN_NAMESPACE] = ir.AttrString(PLUGIN_NAMESPACE, DOMAIN)
    return (f"{function.domain}::{function.name}",)
