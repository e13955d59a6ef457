"""Progress on stderr: a live line for a terminal, JSON lines when asked for, nothing otherwise."""

from __future__ import annotations

import json
import sys
import time
from contextvars import ContextVar
from typing import Literal, Protocol

from rich.console import Console

from mcpc.core.progress import Progress, Silent

LogFormat = Literal["text", "jsonl"]
#: Set once by the root command's `--log-format`.
log_format: ContextVar[LogFormat] = ContextVar("log_format", default="text")


class Display(Progress, Protocol):
    """A progress that owns a piece of the terminal."""

    def close(self) -> None:
        """Finish the present stage and leave the terminal clean; later events begin anew."""
        ...


class Quiet(Silent):
    """Shows nothing: stderr is not a terminal."""

    def close(self) -> None:
        """Nothing to clean."""


class JsonLines:
    """One JSON object per event, for `--log-format jsonl`."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def stage(self, name: str, detail: str = "") -> None:
        """Write a `stage` event."""
        self._write(event="stage", name=name, detail=detail)

    def advance(self, done: int, total: int, what: str = "") -> None:
        """Write an `advance` event."""
        self._write(event="advance", done=done, total=total, what=what)

    def close(self) -> None:
        """Nothing to clean."""

    def _write(self, **fields: str | int) -> None:
        elapsed_s = round(time.monotonic() - self._started_s, 3)
        print(json.dumps({"elapsed_s": elapsed_s, **fields}, ensure_ascii=False), file=sys.stderr, flush=True)


def make_display() -> Display:
    """Return the display for stderr as it is: a terminal, a file or a pipe."""
    if log_format.get() == "jsonl":
        return JsonLines()
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        return Quiet()
    from mcpc.cli.live import Live  # rich's progress bars: only where somebody sees them

    return Live(console)
