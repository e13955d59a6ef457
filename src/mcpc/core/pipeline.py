"""Passes in a fixed order over one component. The order rules are checked before the first pass runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mcpc.core.passes import Pass, PassResult
from mcpc.errors import BadInputError, Problem

if TYPE_CHECKING:
    import onnx_ir as ir


class Instrument(Protocol):
    """Watches a pipeline: times, dumps, checks. It never changes the model."""

    def before(self, pass_: Pass[Any], model: ir.Model) -> None:
        """See the model before a pass."""
        ...

    def after(self, pass_: Pass[Any], model: ir.Model, result: PassResult) -> None:
        """See the model after a pass."""
        ...


class Pipeline:
    """Runs passes in order."""

    def __init__(self, passes: Sequence[Pass[Any]]) -> None:
        """Check the order of the passes.

        Raises:
            BadInputError: A pass comes twice, or before one that it must follow; every such rule is listed.
        """
        places = {pass_.id: index for index, pass_ in enumerate(passes)}
        problems = [Problem("comes twice", pass_.id) for index, pass_ in enumerate(passes) if places[pass_.id] != index]
        problems += [
            Problem("in the wrong order", pass_.id, expected=f"after {earlier}", got="before it")
            for index, pass_ in enumerate(passes)
            for earlier in pass_.after
            if places.get(earlier, -1) > index
        ]
        if problems:
            raise BadInputError(
                f"the passes cannot run in this order: {problems[0]}", problems=problems, hint="reorder the steps"
            )
        self.passes = tuple(passes)

    def run(self, model: ir.Model, instruments: Sequence[Instrument] = ()) -> tuple[PassResult, ...]:
        """Run every pass on the model, in place, and return what each did."""
        results = []
        for pass_ in self.passes:
            for instrument in instruments:
                instrument.before(pass_, model)
            result = pass_(model)
            results.append(result)
            for instrument in instruments:
                instrument.after(pass_, model, result)
        return tuple(results)
