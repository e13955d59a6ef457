"""`mcpc templates derive`: draft a template for an architecture that none fits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from mcpc.cli.console import execute
from mcpc.cli.options import Json
from mcpc.core.progress import Progress
from mcpc.core.report import Report


def derive(
    checkpoint: Annotated[Path, typer.Argument(help="Folder with config.json and safetensors files.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write; the draft goes to stdout when left out.")
    ] = None,
    strip_prefix: Annotated[
        str, typer.Option(help="Leading part of every tensor's name that the model does not know, such as module.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace the output file if it exists.")] = False,
    json_output: Json = False,
) -> None:
    """Draft a template for an architecture that no shipped one fits, to finish and pass to convert --template."""

    def work(progress: Progress) -> Report:
        from mcpc.workflows.derive import derive_template

        return derive_template(checkpoint, output, force=force, strip_prefix=strip_prefix, progress=progress)

    execute("templates derive", work, lambda console, report: render(console, report, checkpoint), json_output)


def render(console: Console, report: Report, checkpoint: Path) -> None:
    """Print the draft on stdout, or where it was written; what to look at goes to stderr beside a draft."""
    data = report.data
    remarks = console
    if data["output"] is None:
        console.print(Text(data["text"].rstrip("\n")), soft_wrap=True)
        remarks = Console(stderr=True, highlight=False)
    else:
        console.print(Text(f"{data['output']}: a draft of kind {data['kind']}"))
    if data["shipped"]:
        remarks.print(
            Text(f"note: the shipped template {data['shipped']} fits this checkpoint; convert needs no other")
        )
    counts = f"{data['check']} guesses to check, {data['finish']} things to finish"
    remarks.print(Text(f"{counts}; then: mcpc convert {checkpoint} -o DIR --template {data['output'] or 'FILE'}"))
