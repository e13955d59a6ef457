"""The table of all passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcpc.core.passes import Pass
from mcpc.passes.quantize.base import QuantizePass
from mcpc.passes.quantize.embedding import EmbeddingInt8
from mcpc.passes.quantize.linear import LinearInt4, LinearInt8
from mcpc.passes.quantize.tables import DequantizeTables

#: Passes that a recipe may name; the step of that id carries the options.
RECIPE_PASSES: Mapping[str, type[QuantizePass[Any]]] = {
    EmbeddingInt8.id: EmbeddingInt8,
    LinearInt4.id: LinearInt4,
    LinearInt8.id: LinearInt8,
}
#: All passes; those that no recipe names belong to the lowering of a backend.
PASSES: Mapping[str, type[Pass[Any]]] = {**RECIPE_PASSES, DequantizeTables.id: DequantizeTables}
