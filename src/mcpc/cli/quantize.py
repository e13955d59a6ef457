"""`mcpc quantize`: INT4 or INT8 weights, checked against the float parent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcpc.cli.console import execute
from mcpc.cli.options import AllowUnverified, DryRun, Force, Json, Output
from mcpc.cli.render import human_bytes
from mcpc.core.progress import Progress
from mcpc.core.report import Report

Patterns = list[str] | None


def quantize(
    source: Annotated[Path, typer.Argument(metavar="PACKAGE|FILE.onnx", help="Float package, or one ONNX file.")],
    output: Output,
    recipe: Annotated[str, typer.Option(help="int4, int8, or a recipe file (.yaml).")],
    block: Annotated[int | None, typer.Option(help="Weights that share an INT4 scale: 32, 64 or 128.")] = None,
    keep_int8: Annotated[
        Patterns, typer.Option(help="Weights that INT4 leaves to INT8, e.g. 'decoder/lm_head*'; may be repeated.")
    ] = None,
    keep_wide: Annotated[Patterns, typer.Option(help="Weights that stay float; may be repeated.")] = None,
    verify: Annotated[
        Literal["full", "none"], typer.Option(help="none: skip the comparison and mark the output unverified.")
    ] = "full",
    sample: Annotated[
        list[Path] | None, typer.Option(help="Image or WAV file to compare on, instead of the shipped ones.")
    ] = None,
    allow_unverified: AllowUnverified = False,
    force: Force = False,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> None:
    """Store weights as INT4 or INT8, and check the result against the float parent."""

    def work(progress: Progress) -> Report:
        from mcpc.workflows.quantize import quantize as run
        from mcpc.workflows.quantize_steps import Options

        return run(
            source,
            output,
            recipe,
            options=Options(block, tuple(keep_int8 or ()), tuple(keep_wide or ())),
            verify=verify,
            samples=tuple(sample or ()),
            allow_unverified=allow_unverified,
            force=force,
            dry_run=dry_run,
            progress=progress,
        )

    execute("quantize", work, render, json_output)


def render(console: Console, report: Report) -> None:
    """Print what happened to which weights, and why the others stayed."""
    data = report.data
    plan = data["plan"]
    if not report.checked:
        console.print(_weights(plan["weights"]))
    console.print(_totals(plan))
    for line in _reasons(plan["weights"]):
        console.print(Text(line, style="dim"))
    before, after = plan["weight_bytes_before"], plan["weight_bytes_after"]
    console.print(f"weights  {human_bytes(before)} -> {human_bytes(after)}")
    if not report.checked:
        console.print("nothing was written (--dry-run)")
        return
    if "digest" in data:
        console.print(f"package  {data['digest']}")
    console.print(Text(f"checked: {report.checked}", style="green" if report.checked == "executed" else "yellow"))
    for line in _cosines(data["verification"]):
        console.print(Text(line, style="dim"))


def _weights(weights: list[Mapping[str, Any]]) -> Table:
    """Return the table of every matrix; vectors are counted below it."""
    table = Table(box=None, pad_edge=False)
    for heading in ("weight", "shape", "form", "why"):
        table.add_column(heading, overflow="fold")
    for item in weights:
        if len(item["shape"]) > 1:
            shape = "x".join(str(size) for size in item["shape"])
            table.add_row(Text(item["weight"]), shape, item["form"], Text(item["reason"]))
    return table


def _totals(plan: Mapping[str, Any]) -> str:
    return ", ".join(f"{count} {form}" for form, count in plan["weights_by_form"].items())


def _reasons(weights: list[Mapping[str, Any]]) -> list[str]:
    """Return one line for each reason, with the number of weights and an example."""
    counts = Counter(item["reason"] for item in weights if item["reason"])
    examples = {item["reason"]: item["weight"] for item in reversed(weights)}
    forms = {item["reason"]: item["form"] for item in reversed(weights)}
    return [f"  {count} x {forms[reason]}: {reason} ({examples[reason]})" for reason, count in counts.most_common()]


def _cosines(verification: Mapping[str, Any] | None) -> list[str]:
    """Return the worst cosine of each component, or of the file."""
    if not verification:
        return []
    lines = []
    for group in verification.get("components") or [{"name": "file", **verification}]:
        if group.get("outputs"):
            worst = min(item["cosine"] for item in group["outputs"].values())
            bounds = ", ".join(f"{name} {bound:g}" for name, bound in group["gate"].items())
            lines.append(f"  {group['name']}: cosine at least {worst:.6f} (gate: {bounds})")
    return lines
