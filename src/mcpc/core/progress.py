"""How long work tells that it goes on. `cli` supplies the display; the default shows nothing."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives stages of a command, in order."""

    def stage(self, name: str, detail: str = "") -> None:
        """Say that a stage begins."""
        ...

    def advance(self, done: int, total: int, what: str = "") -> None:
        """Say how far the present stage is; `done` of `total` units."""
        ...


class Silent:
    """Shows nothing."""

    def stage(self, name: str, detail: str = "") -> None:
        """Ignore it."""

    def advance(self, done: int, total: int, what: str = "") -> None:
        """Ignore it."""
