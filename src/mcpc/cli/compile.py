"""`mcpc compile`: the whole chain from one recipe file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcpc.cli.console import execute
from mcpc.cli.options import DryRun, Force, Json
from mcpc.cli.render import human_bytes
from mcpc.core.progress import Progress
from mcpc.core.report import Report


def compile(  # noqa: A001 (the command's name)
    recipe: Annotated[Path, typer.Argument(help="Compile recipe, a .yaml file.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder to write; the recipe's own when left out.")
    ] = None,
    force: Force = False,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> None:
    """Convert, quantize, build engines and answer requests, as one recipe says."""

    def work(progress: Progress) -> Report:
        from mcpc.workflows.compile import compile_recipe

        return compile_recipe(recipe, output=output, force=force, dry_run=dry_run, progress=progress)

    execute("compile", work, render, json_output)


def render(console: Console, report: Report) -> None:
    """Print the plan, or what was made, how it was checked, and what the packages answer."""
    data = report.data
    if "plan" in data:
        for stage in data["plan"]:
            facts = "  ".join(f"{key}={value}" for key, value in stage.items() if key != "stage")
            console.print(Text.assemble((stage["stage"], "bold"), f"  {facts}"))
        return
    console.print(_made(data))
    for item in data["answers"]:
        console.print()
        console.print(Text(" ".join(str(value) for key, value in item["request"].items() if key != "texts"), "bold"))
        for package, said in item["answers"].items():
            console.print(Text(f"  {package}: {said['text']}"))
    console.print()
    console.print(Text(f"{data['output']}: checked {report.checked}, {sum(data['times_s'].values()):.1f} s"))


def _made(data: dict[str, Any]) -> Table:
    """Return the table of sizes; planned memory is the largest over an engine's profiles."""
    table = Table(box=None, pad_edge=False)
    table.add_column("made", no_wrap=True)
    for heading in ("size", "weights", "activations", "scratch"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("checked")
    table.add_row("checkpoint", human_bytes(data["checkpoint"]["bytes"]))
    for package in data["packages"]:
        table.add_row(Text(package["name"]), human_bytes(package["total_bytes"]), "", "", "", package["checked"])
    for folder in data["engines"]:
        for engine in folder["engines"]:
            memory = engine["memory"]
            planned = [max(item[key] for item in memory["profiles"]) for key in ("activation_bytes", "scratch_bytes")]
            figures = (engine["file_bytes"], memory["weights_bytes"], *planned)
            table.add_row(Text(f"{folder['name']}/{engine['file']}"), *map(human_bytes, figures), engine["checked"])
    return table
