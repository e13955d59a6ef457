"""`mcpc run`: ask the model of a package, on ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcpc.cli.console import execute, stream
from mcpc.cli.options import AllowUnverified, Json
from mcpc.core.progress import Progress
from mcpc.core.report import Report


def run(
    package: Annotated[Path, typer.Argument(help="Package folder.")],
    image: Annotated[list[Path] | None, typer.Option("--image", help="Image file; may be given several times.")] = None,
    prompt: Annotated[str | None, typer.Option(help="What to ask a vision-language model.")] = None,
    audio: Annotated[Path | None, typer.Option(help="WAV file to transcribe.")] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", help="Text to score against the images; may be given several times.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; the package's own limit if not given.")
    ] = None,
    truncate: Annotated[
        bool,
        typer.Option("--truncate", help="Cut a prompt that is too long: text and whole images, each by its share."),
    ] = False,
    allow_unverified: AllowUnverified = False,
    json_output: Json = False,
) -> None:
    """Answer a prompt about images, transcribe audio, or score images against texts."""

    def work(progress: Progress) -> Report:
        from mcpc.workflows.run import Request
        from mcpc.workflows.run import run as answer

        request = Request(tuple(image or ()), prompt, audio, tuple(text or ()), max_new_tokens, truncate)
        on_text = _ignore if json_output else lambda piece: stream(progress, piece)
        return answer(package, request, allow_unverified=allow_unverified, on_text=on_text, progress=progress)

    execute("run", work, render, json_output)


def _ignore(_: str) -> None:
    """Drop a piece of text: it comes in the JSON document."""


def render(console: Console, report: Report) -> None:
    """End the streamed text, or print the table of scores: the best text of each image is marked."""
    data = report.data
    if data["kind"] != "dual-encoder":
        console.print()
        cut = data.get("cut", {})
        if any(cut.values()):
            console.print(f"note: {cut['images']} images and {cut['characters']} characters of the prompt were cut off")
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("image", "text"):
        table.add_column(heading, overflow="fold")
    for heading in ("probability", "logit"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for name, logits, probabilities in zip(data["images"], data["logits"], data["probabilities"], strict=True):
        best = max(range(len(logits)), key=logits.__getitem__)
        for index, words in enumerate(data["texts"]):
            numbers = f"{probabilities[index]:.4f}", f"{logits[index]:.3f}"
            table.add_row(Text(name), Text(words), *numbers, "best" if index == best else "")
    console.print(table)
