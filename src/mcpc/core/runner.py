"""What can run a component: ONNX Runtime, PyTorch, or a twin of either. Backends and export supply them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

Array = NDArray[Any]
Feeds = Mapping[str, Array]


class Runner(Protocol):
    """Runs one component. Arrays are numpy, floats are float32."""

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Return the named outputs (all of the component's when None) for `feeds`."""
        ...


class RunnerFactory(Protocol):
    """Opens a runner for a component by name; opening twice may return the same runner."""

    def __call__(self, component: str) -> Runner:
        """Return a runner of that component."""
        ...


__all__ = ["Array", "Feeds", "Runner", "RunnerFactory"]
