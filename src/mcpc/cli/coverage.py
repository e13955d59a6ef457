"""`mcpc templates coverage`: which of the multimodal types of transformers the installed templates serve."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcpc.cli.console import execute
from mcpc.cli.options import Json
from mcpc.core.progress import Progress
from mcpc.core.report import Report


def coverage(json_output: Json = False) -> None:
    """List the multimodal model types of transformers: served by which template, or refused for which reason."""

    def work(_: Progress) -> Report:
        from mcpc.workflows.coverage import list_coverage

        return list_coverage()

    execute("templates coverage", work, render, json_output)


def render(console: Console, report: Report) -> None:
    """Print a line for each type, then the totals and what they rest on."""
    data = report.data
    table = Table(box=None, pad_edge=False, show_edge=False)
    for heading in ("model type", "status", "template", "error", "what it needs"):
        table.add_column(heading, no_wrap=heading != "what it needs")
    for row in data["rows"]:
        error = "" if row["largest_error"] is None else f"{row['largest_error']:.0e}"
        table.add_row(
            *(Text(cell) for cell in (row["model_type"], row["status"], row["template"], error, row["reason"]))
        )
    console.print(table)
    for name, title in (("types", "model types"), ("architectures", "architectures")):
        counts = data[name]
        rest = ", ".join(
            f"{counts[status]} {status}" for status in ("refused", "failed", "unmeasured") if counts[status]
        )
        console.print(Text(f"{counts['verified']} of {counts['listed']} {title} verified, {rest}"))
    measured = data["measured_with"]
    console.print(Text(
        f"measured with mcpc {measured['mcpc']}, transformers {measured['transformers']}, torch {measured['torch']}: "
        f"largest difference from PyTorch {data['largest_error']:.0e}"
    ))  # fmt: skip
    installed = data["installed_transformers"]
    if installed not in (None, measured["transformers"]):
        console.print(Text(f"note: transformers {installed} is installed, which may list other types"))
