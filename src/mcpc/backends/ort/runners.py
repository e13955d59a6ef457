"""Runners for the components of a package."""

from __future__ import annotations

from pathlib import Path

from mcpc.backends.ort.session import open_model
from mcpc.backends.ort.streamed import StreamedRunner
from mcpc.core.runner import Runner, RunnerFactory
from mcpc.errors import BadInputError
from mcpc.package.manifest import Manifest


def package_runners(
    root: Path,
    manifest: Manifest,
    *,
    accuracy_level: int | None = 1,
    threads: int = 0,
    twin: bool = True,
    streamed: bool = False,
) -> RunnerFactory:
    """Return a factory that opens each component of a package once, when it is first asked for.

    Args:
        root: The package's folder.
        manifest: Its manifest.
        accuracy_level: As `open_model`.
        threads: As `open_model`.
        twin: As `open_model`.
        streamed: Keep the weights of one piece of a graph in memory at a time; every run reads them again.
    """
    files = {component.name: component.file for component in manifest.components}
    opened: dict[str, Runner] = {}

    def open_component(component: str) -> Runner:
        if component not in files:
            raise BadInputError(
                "the package has no such component", where=str(root), expected=", ".join(files), got=component
            )
        if component not in opened:
            path = root / files[component]
            opened[component] = (
                StreamedRunner(path)
                if streamed
                else open_model(path, accuracy_level=accuracy_level, threads=threads, twin=twin)
            )
        return opened[component]

    return open_component
