"""`mcpc compile`: the chain of a compile recipe, validated whole before its first stage runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcpc.checkpoint import Checkpoint
from mcpc.config.compile_recipe import FLOAT, Request
from mcpc.core.progress import Progress
from mcpc.core.report import Report
from mcpc.package import Package
from mcpc.package.writer import pretty_json
from mcpc.storage.directories import staged_directory
from mcpc.workflows.compile_plan import Chain, plan_of, validated
from mcpc.workflows.inspect_engines import engines_summary
from mcpc.workflows.quantize_steps import Options

#: The report of the chain, in the output folder.
REPORT_FILE = "compile.json"
#: What a stage can say of its numbers, the weakest first.
_CHECKED = ("none", "lowered", "executed")


class Prefixed:
    """A progress whose stages are named after the stage of the chain."""

    def __init__(self, progress: Progress, prefix: str) -> None:
        self._progress = progress
        self._prefix = prefix

    def stage(self, name: str, detail: str = "") -> None:
        """Say `prefix: name`."""
        self._progress.stage(f"{self._prefix}: {name}", detail)

    def advance(self, done: int, total: int, what: str = "") -> None:
        """Pass it on."""
        self._progress.advance(done, total, what)


class Stages:
    """Runs the stages of a chain in the staging folder `root`, and takes their times."""

    def __init__(self, chain: Chain, root: Path, progress: Progress) -> None:
        self._chain = chain
        self._root = root
        self._progress = progress
        self._allow_unverified = "none" in (
            chain.recipe.convert.verify,
            *(item.verify for item in chain.recipe.quantize),
        )
        self.times_s: dict[str, float] = {}

    def convert(self) -> None:
        """Make the float package."""
        from mcpc.workflows.convert import convert

        options = self._chain.recipe.convert
        with self._stage("convert") as progress:
            output = self._root / FLOAT
            convert(
                self._chain.checkpoint,
                output,
                dtype=options.dtype,
                verify=options.verify,
                template_file=self._chain.template_file,
                adapters=self._chain.adapters,
                progress=progress,
            )

    def quantize(self) -> None:
        """Make every quantized package."""
        from mcpc.workflows.quantize import quantize

        for item in self._chain.recipe.quantize:
            with self._stage(f"quantize {item.package}") as progress:
                quantize(
                    self._root / FLOAT,
                    self._root / item.package,
                    self._chain.quantize_recipe(item.recipe),
                    options=Options(block=item.block),
                    verify=item.verify,
                    allow_unverified=self._allow_unverified,
                    progress=progress,
                )

    def build(self) -> None:
        """Build the engines of every package and target."""
        engine = self._chain.recipe.engine
        if engine is None:
            return
        from mcpc.workflows.build_engine import build_engine

        for package, target, folder in self._chain.builds:
            with self._stage(f"build {package} {target}") as progress:
                build_engine(
                    self._root / package,
                    self._root / folder,
                    target,
                    precision=engine.precision,
                    profiles=engine.profiles,
                    verify=engine.verify,
                    allow_unverified=self._allow_unverified,
                    progress=progress,
                )

    def answers(self) -> list[dict[str, Any]]:
        """Return, for each request of the recipe, what every package answers on ONNX Runtime."""
        answers = []
        for request in self._chain.recipe.run:
            said = {package: self._answer(package, request) for package in self._chain.recipe.packages}
            asked = request.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
            answers.append({"request": asked, "answers": said})
        return answers

    def _answer(self, package: str, request: Request) -> dict[str, Any]:
        from mcpc.workflows.run import Request as Ask
        from mcpc.workflows.run import run

        images = (self._chain.path(request.image),) if request.image else ()
        audio = self._chain.path(request.audio) if request.audio else None
        ask = Ask(images, request.prompt, audio, request.texts)
        with self._stage(f"run {package}") as progress:
            report = run(
                self._root / package,
                ask,
                allow_unverified=self._allow_unverified,
                on_text=lambda _: None,
                progress=progress,
            )
        return _said(report.data)

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[Progress]:
        started = time.perf_counter()
        yield Prefixed(self._progress, name)
        self.times_s[name] = self.times_s.get(name, 0.0) + time.perf_counter() - started


def compile_recipe(
    path: Path, *, output: Path | None = None, force: bool = False, dry_run: bool = False, progress: Progress
) -> Report:
    """Run convert, quantize, build-engine and run as a recipe says.

    Args:
        path: The compile recipe.
        output: Folder to write instead of the recipe's; it appears only when the whole chain has succeeded.
        force: Replace an existing output.
        dry_run: Validate, report the plan and stop.
        progress: Shows the stages.

    Raises:
        McpcError: The recipe cannot run (every finding is listed, nothing was started), or a stage failed.
    """
    chain = validated(path, output, force)
    if dry_run:
        return Report("compile", data={"plan": plan_of(chain)})
    with staged_directory(chain.output, force) as root:
        stages = Stages(chain, root, progress)
        stages.convert()
        stages.quantize()
        stages.build()
        report = _report(chain, root, stages.answers(), stages.times_s)
        (root / REPORT_FILE).write_text(pretty_json(report.to_dict()), encoding="utf-8", newline="\n")
    return report


def _said(data: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a run's report that answers the request."""
    if data["kind"] != "dual-encoder":
        return {"text": data["text"], "tokens": data["tokens"]}
    probabilities = data["probabilities"][0]
    best = max(range(len(probabilities)), key=probabilities.__getitem__)
    return {"text": data["texts"][best], "probability": probabilities[best]}


def _report(chain: Chain, root: Path, answers: list[dict[str, Any]], times_s: dict[str, float]) -> Report:
    packages = []
    for name in chain.recipe.packages:
        package = Package.open(root / name)
        packages.append({"name": name, "checked": package.manifest.verification.checked, "digest": package.digest,
                         "total_bytes": sum(package.file_bytes().values())})  # fmt: skip
    engines = [{"name": folder, **engines_summary(root / folder)} for _, _, folder in chain.builds]
    levels = [str(item["checked"]) for item in packages] + [str(item["index"]["checked"]) for item in engines]
    checkpoint = Checkpoint.open(chain.checkpoint)
    data = {
        "name": chain.recipe.meta.name,
        "output": str(chain.output),
        "checkpoint": {
            "identity": checkpoint.identity,
            "bytes": sum(entry.length for entry in checkpoint.tensors.values()),
        },
        "packages": packages,
        "engines": engines,
        "answers": answers,
        "times_s": {name: round(value, 3) for name, value in times_s.items()},
    }
    return Report("compile", min(levels, key=_CHECKED.index), data)
