"""`mcpc build-engine`: TensorRT engines of a package or an ONNX file."""

from __future__ import annotations

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


def build_engine(
    source: Annotated[Path, typer.Argument(metavar="PACKAGE|FILE.onnx", help="Package folder, or one ONNX file.")],
    output: Output,
    target: Annotated[str, typer.Option(help="Chip and runtime; see `mcpc targets list`.")],
    precision: Annotated[
        Literal["keep", "float32", "float16", "bfloat16"] | None,
        typer.Option(help="Float dtype of the engines; a bfloat16 or float16 source keeps its own if not given."),
    ] = None,
    component: Annotated[
        list[str] | None, typer.Option("--component", help="Build only this one; may be given several times.")
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            "--profile",
            help="component.dim:NAME=min,opt,max or component.input=shape,shape,shape with shapes such as 1x3x32x32;"
            " `/` separates several profiles of one engine.",
        ),
    ] = None,
    verify: Annotated[
        Literal["lowered", "none"], typer.Option(help="`none` skips the checks and marks the engines unchecked.")
    ] = "lowered",
    timeout: Annotated[float, typer.Option(min=1, help="Longest build of one component, in seconds.")] = 3600.0,
    force: Force = False,
    allow_unverified: AllowUnverified = False,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> None:
    """Build one engine per component, without a GPU, and check each against the package."""

    def work(progress: Progress) -> Report:
        from mcpc.workflows.build_engine import build_engine as build

        return build(
            source,
            output,
            target,
            precision=precision,
            components=component or (),
            profiles=profile or (),
            verify=verify,
            timeout_s=timeout,
            allow_unverified=allow_unverified,
            force=force,
            dry_run=dry_run,
            progress=progress,
        )

    execute("build-engine", work, render, json_output)


def render(console: Console, report: Report) -> None:
    """Print the engines with their sizes and planned memory, or the resolved plan of a dry run."""
    if "plan" in report.data:
        _render_plan(console, report.data["plan"])
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("engine", "precision"):
        table.add_column(heading, overflow="fold")
    for heading in ("size", "weights", "activation", "scratch", "build"):
        table.add_column(heading, justify="right")
    for engine in report.data["engines"]:
        for index, profile in enumerate(engine["memory"]["profiles"]):
            first = index == 0
            table.add_row(
                Text(f"{engine['component']}.engine" if first else f"  profile {index}"),
                engine["precision"] if first else "",
                human_bytes(engine["engine_bytes"]) if first else "",
                human_bytes(engine["memory"]["weights_bytes"]) if first else "",
                human_bytes(profile["activation_bytes"]),
                human_bytes(profile["scratch_bytes"]),
                f"{engine['build_s']:.1f} s" if first else "",
            )
    console.print(table)
    for engine in report.data["engines"]:
        for line in engine["lowering"]["kept_float32"]:
            console.print(Text(f"{engine['component']}: kept float32: {line}"), soft_wrap=True)
    chips = ", ".join(report.data["target"]["compute_capabilities"])
    console.print(Text(f"checked: {report.checked}, for {chips}, in {report.data['output']}"), soft_wrap=True)


def _render_plan(console: Console, plan: list[dict[str, Any]]) -> None:
    for item in plan:
        lowering = item["lowering"]
        counts = f"{lowering['casts']} casts, {lowering['float32_nodes']} float32 nodes"
        console.print(Text(f"{item['component']}: {item['precision']}, {counts}"))
        for index, profile in enumerate(item["profiles"]):
            for name, shapes in profile.items():
                spelled = ", ".join(f"{word} {'x'.join(map(str, shape))}" for word, shape in shapes.items())
                console.print(Text(f"  profile {index}  {name}: {spelled}"), soft_wrap=True)
