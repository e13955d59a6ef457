"""Progress on a terminal: one finished line per stage, and a live line for the present one."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text


class Live:
    """One finished line per stage, and a live line for the present one."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Progress | None = None
        self._task: TaskID | None = None
        self._label = ""
        self._started_s = 0.0

    def stage(self, name: str, detail: str = "") -> None:
        """Finish the stage before and begin this one."""
        self.close()
        self._label = f"{name} {detail}".strip()
        self._started_s = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._begin(Progress(*columns, console=self._console, transient=True), None)

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
            self._begin(Progress(*columns, console=self._console, transient=True), total)
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

    def _begin(self, bars: Progress, total: int | None) -> None:
        self._bars = bars
        self._task = bars.add_task(self._label, total=total)
        bars.start()
