"""`mcpc convert`: a Hugging Face checkpoint becomes a verified package."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mcpc.cli.console import execute
from mcpc.cli.options import Adapters, DryRun, Force, Json, Output, parse_adapter
from mcpc.cli.verification import render_verification
from mcpc.core.progress import Progress
from mcpc.core.report import Report


class Dtype(StrEnum):
    """Float dtype of the package's weights."""

    keep = "keep"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class Verify(StrEnum):
    """How much is compared with PyTorch."""

    auto = "auto"
    full = "full"
    layers = "layers"
    sample = "sample"
    none = "none"


class Weights(StrEnum):
    """Where the package's weights lie."""

    copy = "copy"
    reference = "reference"


def convert(
    checkpoint: Annotated[Path, typer.Argument(help="Folder with config.json and safetensors files.")],
    output: Output,
    dtype: Annotated[
        Dtype, typer.Option(help="Float dtype of the stored weights; keep copies the checkpoint's bytes.")
    ] = Dtype.keep,
    verify: Annotated[
        Verify, typer.Option(help="Compare with PyTorch: whole models, layers by streamed weights, one sample; or not.")
    ] = Verify.auto,
    weights: Annotated[
        Weights, typer.Option(help="Copy the tensors into the package, or refer to the checkpoint's files.")
    ] = Weights.copy,
    sample: Annotated[
        list[Path] | None, typer.Option("--sample", help="Image or WAV used as a real input; repeatable.")
    ] = None,
    strip_prefix: Annotated[
        str, typer.Option(help="Leading part of every tensor's name that the model does not know, such as module.")
    ] = "",
    template: Annotated[
        Path | None, typer.Option(help="Use this template file instead of a shipped one; see `mcpc templates derive`.")
    ] = None,
    adapter: Adapters = None,
    force: Force = False,
    dry_run: DryRun = False,
    json_output: Json = False,
) -> None:
    """Turn a Hugging Face checkpoint into a verified ONNX package."""

    def work(progress: Progress) -> Report:
        from mcpc.workflows.convert import convert as workflow

        return workflow(
            checkpoint,
            output,
            dtype=dtype.value,
            verify=verify.value,
            weights=weights.value,
            samples=sample or (),
            force=force,
            dry_run=dry_run,
            strip_prefix=strip_prefix,
            template_file=template,
            adapters=[parse_adapter(text) for text in adapter or ()],
            progress=progress,
        )

    execute("convert", work, lambda console, report: render(console, report, output), json_output)


def render(console: Console, report: Report, output: Path) -> None:
    """Print the components with their sizes, and how they were checked."""
    data = report.data
    if "plan" in data:
        render_plan(console, data["plan"])
        return
    console.print(f"[bold]{output}[/bold]  {data['template']}, {data['package_bytes']:,} bytes, {data['digest'][:19]}")
    for note in data["notes"]:
        console.print(f"note: {note}", markup=False)
    for item in data["rewrites"]:
        if item["nodes_after"] < item["nodes_before"]:
            counts = f"{item['nodes_before']} nodes become {item['nodes_after']}"
            console.print(f"{item['rewrite']} in {item['component']}: {counts}")
    for adapter in data["adapters"]:
        render_adapter(console, adapter)
    table = Table(box=None, pad_edge=False)
    headings = ("component", "weights", "bytes", "share", "mean", "std", "absmax")
    for heading, justify in zip(headings, ("left", "left", *("right",) * 5), strict=True):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for component in data["components"]:
        weights = ", ".join(f"{count:,} {dtype}" for dtype, count in component["weights"].items())
        statistics = component["statistics"] or {}
        figures = [f"{statistics[name]:.3g}" if name in statistics else "" for name in ("mean", "std", "absmax")]
        share = f"{component['share']:.1%}"
        table.add_row(component["name"], weights, f"{component['weight_bytes']:,}", share, *figures)
    console.print(table)
    if data["unused_tensors"]:
        console.print(
            f"{data['unused_tensors']} checkpoint tensors are not needed; the manifest lists them with the reason"
        )
    if data["verification"] is None:
        console.print("checked: none (--verify none); later commands want --allow-unverified")
    else:
        render_verification(console, data["verification"])


def render_adapter(console: Console, adapter: Mapping[str, Any]) -> None:
    """Print what an adapter was merged into, and how far it moved the weights."""
    parts = [f"adapter {adapter['name']} (weight {adapter['weight']:g}): {adapter['updated']} modules updated"]
    if adapter["replaced"]:
        parts.append(f"{adapter['replaced']} tensors replaced")
    if adapter["furthest"] is not None:
        mean, most = adapter["mean_drift"], adapter["max_drift"]
        parts.append(f"drift {mean:.3g} on average, {most:.3g} at most ({adapter['furthest']})")
    console.print(", ".join(parts), markup=False)


def render_plan(console: Console, plan: Mapping[str, Any]) -> None:
    """Print what would be exported."""
    console.print(f"template {plan['template']}, {plan['tensors']} tensors; nothing was written")
    for adapter in plan.get("adapters", ()):
        console.print(f"adapter {adapter['name']} (weight {adapter['weight']:g}): {adapter['digest']}", markup=False)
    for component in plan["components"]:
        console.print(f"[bold]{component['name']}[/bold] ({component['role']})")
        for kind in ("inputs", "outputs"):
            for name, dtype, shape in component[kind]:
                console.print(f"  {kind[:-1]:6} {name}: {dtype} {shape}", markup=False)
