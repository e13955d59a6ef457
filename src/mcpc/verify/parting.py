"""Where two models part: the first module whose output differs, in the order in which the graph computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mcpc.core.runner import Array
from mcpc.errors import VerificationError
from mcpc.graph.modules import ModuleOutput
from mcpc.verify.compare import Difference, Gate, compare, failures

#: A module of a float package parts when its largest difference exceeds this share of its largest magnitude: a
#: hundred times the rounding of float32 kernels, a hundredth of a one per cent change of the weights.
FLOAT_MAX_REL = 1e-4


@dataclass(frozen=True)
class Parting:
    """The first place where outputs differ."""

    component: str
    module: str
    node: str
    case: str
    difference: Difference | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "component": self.component, "module": self.module, "node": self.node, "case": self.case,
            "difference": asdict(self.difference) if self.difference else None,
        }  # fmt: skip


def first_parting(
    component: str,
    case: str,
    places: Sequence[ModuleOutput],
    actual: Mapping[str, Array],
    expected: Mapping[str, Array],
    gate: Gate,
) -> Parting | None:
    """Return the first module whose outputs part, or None when every comparable one agrees.

    Args:
        component: Its name.
        case: Label of the inputs.
        places: Module ends in execution order.
        actual: Value name -> array, of the candidate.
        expected: Module path -> array, of the reference.
        gate: The component's gate; a float gate is read relative to each module's magnitude.
    """
    for place in places:
        a, b = actual.get(place.value), expected.get(place.module)
        if a is None or b is None or a.shape != b.shape or b.size < 2:
            continue
        try:
            difference = compare(a, b)
        except VerificationError as error:
            if "constant" in error.message:
                continue
            return Parting(component, place.module, place.node, case, None)
        parted = difference.max_rel > FLOAT_MAX_REL if gate.max_abs is not None else bool(failures(difference, gate))
        if parted:
            return Parting(component, place.module, place.node, case, difference)
    return None
