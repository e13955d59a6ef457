"""`mcpc verify`: two models on the same inputs, and the first node where they part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mcpc.cli.console import execute
from mcpc.cli.options import Adapters, Json, parse_adapter
from mcpc.cli.verification import render_verification
from mcpc.core.progress import Progress
from mcpc.core.report import Report


def verify(
    candidate: Annotated[Path, typer.Argument(help="Package or checkpoint folder.")],
    against: Annotated[Path, typer.Option("--against", help="Package or checkpoint folder that is taken as right.")],
    sample: Annotated[
        list[Path] | None, typer.Option("--sample", help="Image or WAV used as a real input; repeatable.")
    ] = None,
    adapter: Adapters = None,
    json_output: Json = False,
) -> None:
    """Compare two models, output by output, and name the first node where they part."""

    def work(progress: Progress) -> Report:
        from mcpc.workflows.verify import verify as workflow

        adapters = [parse_adapter(text) for text in adapter or ()]
        return workflow(candidate, against, samples=sample or (), adapters=adapters, progress=progress)

    execute("verify", work, render, json_output)


def render(console: Console, report: Report) -> None:
    """Print the figures."""
    render_verification(console, report.data["verification"])
