"""The fixed gates: what a component must meet, decided by the precision of its weights before anything is compared."""

from __future__ import annotations

from mcpc.package.manifest import Component
from mcpc.verify.compare import Gate

FLOAT_MAX_ABS = 1e-4
INT8_COSINE = 0.999
INT4_COSINE = 0.99
#: Accuracy that a package may lose where there is a labelled set, in percentage points.
MAX_ACCURACY_LOSS_POINTS = 0.5

_FOUR_BITS = frozenset({"int4", "uint4"})
_EIGHT_BITS = frozenset({"int8", "uint8"})


def gate_of(*components: Component) -> Gate:
    """Return the gate for comparing components; the lowest precision among them decides."""
    dtypes = {name for component in components for name in component.precision.weights}
    if dtypes & _FOUR_BITS:
        return Gate(cosine=INT4_COSINE)
    if dtypes & _EIGHT_BITS:
        return Gate(cosine=INT8_COSINE)
    return Gate(max_abs=FLOAT_MAX_ABS)
