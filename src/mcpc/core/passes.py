"""The contract of a graph pass: preconditions, rewrite and postconditions, called by the base class.

A pass keeps no state between calls. It reports `modified` honestly, and everything it declined to do is a
`Skip` with a reason and a place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

if TYPE_CHECKING:
    import onnx_ir as ir

ConfigT = TypeVar("ConfigT")


class Numerics(Enum):
    """How a pass may change numbers; decides which tests and gates it must meet."""

    BITWISE = "bitwise"
    REASSOCIATED = "reassociated"
    LOSSY = "lossy"


@dataclass(frozen=True)
class Skip:
    """Something a pass left alone: the place (node or tensor) and the reason."""

    where: str
    reason: str


@dataclass(frozen=True)
class PassResult:
    """What a pass did to one component."""

    modified: bool
    skips: tuple[Skip, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


class Pass(ABC, Generic[ConfigT]):
    """A rewrite of one component's graph, in place.

    Class attributes:
        id: Stable name, `family.name`.
        version: Raised whenever the output may differ for the same input.
        numerics: How numbers may change.
        after: Ids of passes that must have run before, when both are in a pipeline.
    """

    id: ClassVar[str]
    version: ClassVar[int]
    numerics: ClassVar[Numerics]
    after: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    def __call__(self, model: ir.Model) -> PassResult:
        """Check the preconditions, rewrite, check the postconditions."""
        self.requires(model)
        result = self.rewrite(model)
        self.ensures(model, result)
        return result

    def requires(self, model: ir.Model) -> None:
        """Raise when the model is not what the pass needs."""

    @abstractmethod
    def rewrite(self, model: ir.Model) -> PassResult:
        """Rewrite the model in place."""

    def ensures(self, model: ir.Model, result: PassResult) -> None:
        """Raise `InternalError` when the result breaks what the pass promises."""
