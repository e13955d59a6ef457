"""Options that several commands share, so that they read and behave the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the human view.")]
Output = Annotated[Path, typer.Option("-o", "--output", help="Folder to write; it appears only when it is whole.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the output folder if it exists.")]
AllowUnverified = Annotated[bool, typer.Option("--allow-unverified", help="Accept an input that is marked unverified.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan and stop.")]
