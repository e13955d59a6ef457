"""Progress on stderr: a live line for a terminal, JSON lines when asked for, nothing otherwise."""

from __future__ import annotations

import json
import sys
import time
from contextvars import ContextVar
from typing import Literal, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

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


class Live:
    """One finished line per stage, and a live line for the present one."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._label = ""
        self._started_s = 0.0

    def stage(self, name: str, detail: str = "") -> None:
        """Finish the stage before and begin this one."""
        self.close()
        self._label = f"{name} {detail}".strip()
        self._started_s = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._begin(Bars(*columns, console=self._console, transient=True), None)

    def advance(self, done: int, total: int, what: str = "") -> None:
        """Show `done` of `total`."""
        if self._bars is None or self._task is None or self._bars.tasks[0].total is None:
            columns = (
                TextColumn("  {task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            if self._bars is not None:
                self._bars.stop()
            self._begin(Bars(*columns, console=self._console, transient=True), total)
        if self._bars is not None and self._task is not None:
            description = f"{self._label} {what}".strip()
            self._bars.update(self._task, completed=done, total=total, description=description)

    def close(self) -> None:
        """Stop the live line and leave one line that says how long the stage took."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = self._task = None
            seconds = f"{time.monotonic() - self._started_s:.1f} s"
            self._console.print(Text.assemble(("✓ ", "green"), self._label, (f"  {seconds}", "dim")), soft_wrap=True)

    def _begin(self, bars: Bars, total: int | None) -> None:
        self._bars = bars
        self._task = bars.add_task(self._label, total=total)
        bars.start()


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
    return Live(console) if console.is_terminal and not console.is_dumb_terminal else Quiet()
