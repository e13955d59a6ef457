"""`mcpc templates|recipes|targets list|show`: what ships with mcpc; `templates derive|coverage` beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcpc.cli.console import execute
from mcpc.cli.coverage import coverage
from mcpc.cli.derive import derive
from mcpc.cli.options import Json
from mcpc.core.progress import Progress
from mcpc.core.report import Report

if TYPE_CHECKING:
    from mcpc.workflows.lists import Kind

Name = Annotated[str, typer.Argument(help="A name that `list` shows.")]


def group(kind: Kind, help_text: str) -> typer.Typer:
    """Return the command group of one kind of file."""
    app = typer.Typer(name=kind, help=help_text, no_args_is_help=True, rich_markup_mode=None)

    @app.command("list")
    def list_command(json_output: Json = False) -> None:
        """List names, versions and what each one is."""

        def work(_: Progress) -> Report:
            from mcpc.workflows.lists import list_files

            return list_files(kind)

        execute(f"{kind} list", work, lambda console, report: _render_list(console, report, kind), json_output)

    @app.command("show")
    def show_command(name: Name, json_output: Json = False) -> None:
        """Print one file."""

        def work(_: Progress) -> Report:
            from mcpc.workflows.lists import show_file

            return show_file(kind, name)

        execute(f"{kind} show", work, _render_file, json_output)

    return app


def _render_list(console: Console, report: Report, kind: str) -> None:
    table = Table(box=None, pad_edge=False, show_edge=False)
    for heading in ("name", "version", "what"):
        table.add_column(heading, no_wrap=heading != "what")
    for item in report.data[kind]:
        table.add_row(Text(item["name"]), Text(item["version"]), Text(item["summary"]))
    console.print(table)


def _render_file(console: Console, report: Report) -> None:
    console.print(Text(report.data["text"].rstrip("\n")), soft_wrap=True)


templates = group("templates", "Model families that convert knows.")
templates.command("coverage")(coverage)
templates.command("derive", no_args_is_help=True)(derive)
recipes = group("recipes", "Quantization recipes.")
targets = group("targets", "Chips and runtimes that build-engine knows.")
