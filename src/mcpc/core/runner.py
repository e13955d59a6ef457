"""What can run a component: ONNX Runtime, PyTorch, or a twin of either. Backends and export supply them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

Array = NDArray[Any]
Feeds = Mapping[str, Array]


class Runner(Protocol):
    """Runs one component. Arrays are numpy, floats are float32."""

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Return the named outputs (all of the component's when None) for `feeds`."""
        ...


@runtime_checkable
class StreamingRunner(Protocol):
    """A runner that has its first outputs long before its last, and keeps none of them."""

    def stream(self, feeds: Feeds) -> Iterator[tuple[str, Array]]:
        """Yield every output of the component as soon as it is computed."""
        ...


def outputs_of(runner: Runner, feeds: Feeds) -> Iterator[tuple[str, Array]]:
    """Yield every output of one run; one at a time where the runner can."""
    if isinstance(runner, StreamingRunner):
        yield from runner.stream(feeds)
    else:
        yield from runner.run(feeds).items()


class RunnerFactory(Protocol):
    """Opens a runner for a component by name; opening twice may return the same runner."""

    def __call__(self, component: str) -> Runner:
        """Return a runner of that component."""
        ...


__all__ = ["Array", "Feeds", "Runner", "RunnerFactory", "StreamingRunner", "outputs_of"]
