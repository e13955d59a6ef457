"""The table of all passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcpc.passes.quantize.base import QuantizePass
from mcpc.passes.quantize.embedding import EmbeddingInt8
from mcpc.passes.quantize.linear import LinearInt4, LinearInt8

#: Id to pass; a recipe step of that id carries the options of the pass.
PASSES: Mapping[str, type[QuantizePass[Any]]] = {
    EmbeddingInt8.id: EmbeddingInt8,
    LinearInt4.id: LinearInt4,
    LinearInt8.id: LinearInt8,
}
