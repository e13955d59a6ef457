"""The table of all passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcpc.core.passes import Pass
from mcpc.passes.quantize.base import QuantizePass
from mcpc.passes.quantize.embedding import EmbeddingInt8
from mcpc.passes.quantize.linear import LinearInt4, LinearInt8
from mcpc.passes.quantize.tables import DequantizeTables
from mcpc.passes.rewrite.batch_norm import FoldBatchNorm
from mcpc.passes.rewrite.layout import JoinReshapes, JoinSqueezes, JoinTransposes

#: Passes that a recipe may name; the step of that id carries the options.
RECIPE_PASSES: Mapping[str, type[QuantizePass[Any]]] = {
    EmbeddingInt8.id: EmbeddingInt8,
    LinearInt4.id: LinearInt4,
    LinearInt8.id: LinearInt8,
}
#: Passes that a template may name, without their family.
REWRITES: Mapping[str, type[Pass[None]]] = {
    pass_.id.removeprefix("rewrite."): pass_ for pass_ in (FoldBatchNorm, JoinTransposes, JoinReshapes, JoinSqueezes)
}
#: All passes over graphs with their weights; those that neither a recipe nor a template names belong to the lowering
#: of a backend. A fold of a normalization comes before weights are bound.
PASSES: Mapping[str, type[Pass[Any]]] = {
    **RECIPE_PASSES,
    DequantizeTables.id: DequantizeTables,
    **{pass_.id: pass_ for pass_ in (JoinTransposes, JoinReshapes, JoinSqueezes)},
}
