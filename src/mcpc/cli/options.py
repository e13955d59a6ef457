"""Options that several commands share, so that they read and behave the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mcpc.errors import UsageError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the human view.")]
Output = Annotated[Path, typer.Option("-o", "--output", help="Folder to write; it appears only when it is whole.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the output folder if it exists.")]
AllowUnverified = Annotated[bool, typer.Option("--allow-unverified", help="Accept an input that is marked unverified.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan and stop.")]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter", metavar="DIR[=WEIGHT]", help="Merge a LoRA adapter into the weights; repeatable, in order."
    ),
]


def parse_adapter(text: str) -> tuple[Path, float]:
    """Return the folder and the weight of `DIR[=WEIGHT]`; a folder may have a `=` in its name.

    Raises:
        UsageError: The weight is no number.
    """
    folder, equals, weight = text.rpartition("=")
    if not equals or Path(text).is_dir():
        return Path(text), 1.0
    try:
        return Path(folder), float(weight)
    except ValueError:
        raise UsageError("the weight of an adapter is a number", where=f"--adapter {text}", got=weight) from None
