"""`mcpc verify X --against Y`: any two of checkpoint and package."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mcpc.checkpoint import Checkpoint
from mcpc.checkpoint.adapters import Adapter
from mcpc.config.template import Template
from mcpc.core.progress import Progress
from mcpc.core.report import Report
from mcpc.errors import BadInputError, UsageError
from mcpc.package import Package
from mcpc.package.writer import MANIFEST
from mcpc.templates.match import load_templates, select
from mcpc.templates.outside import TEMPLATE_FILE, load_template, require_fit
from mcpc.templates.plan import make_plan
from mcpc.workflows.checking import check_same_interface, compare_sides, require_passed
from mcpc.workflows.samples import load_samples
from mcpc.workflows.sides import CheckpointSide, PackageSide, Side


def verify(
    candidate: Path,
    against: Path,
    *,
    samples: Sequence[Path] = (),
    adapters: Sequence[tuple[Path, float]] = (),
    progress: Progress,
) -> Report:
    """Compare two models.

    Args:
        candidate: Package, or checkpoint (which is converted to a temporary package first).
        against: Package or checkpoint that is taken as right.
        samples: Real inputs; the shipped ones when empty.
        adapters: Folders and weights of the LoRA adapters that are merged into the checkpoint; those of the package.
        progress: Shows the cases.

    Raises:
        UsageError: The adapters are not those that the package was made with.
        VerificationError: They differ; names the first component and node where they part.
        BadInputError: One of them is damaged, or they are not the same model.
    """
    loras = [Adapter.open(root, weight) for root, weight in adapters]
    with _as_package(candidate, adapters, progress) as package:
        reference = _reference(against, package, loras, progress)
        side = PackageSide(package.root, package.manifest, package.digest)
        progress.stage("verifying", f"against {against}")
        others = {c.name: c for c in reference.manifest.components} if isinstance(reference, PackageSide) else {}
        result = compare_sides(
            side, reference, dict(others), load_samples(package.root, package.manifest, samples), progress
        )
        require_passed(result, str(candidate))
    return Report("verify", "executed", {"verification": result.figures()})


@contextlib.contextmanager
def _as_package(path: Path, adapters: Sequence[tuple[Path, float]], progress: Progress) -> Iterator[Package]:
    """Open a package, or convert a checkpoint into one that lives as long as the block."""
    if (path / MANIFEST).is_file():
        yield Package.open(path, check_bytes=True)
        return
    Checkpoint.open(path)
    from mcpc.workflows.convert import convert

    with tempfile.TemporaryDirectory(prefix="mcpc-verify-") as folder:
        convert(path, Path(folder) / "package", verify="none", adapters=adapters, progress=progress)
        yield Package.open(Path(folder) / "package")


def _reference(path: Path, candidate: Package, adapters: Sequence[Adapter], progress: Progress) -> Side:
    manifest = candidate.manifest
    options = manifest.lineage.steps[0].options
    if (path / MANIFEST).is_file():
        package = Package.open(path, check_bytes=True)
        if adapters:
            raise UsageError(
                "a package has its adapters in its weights", where="--adapter", got=str(path),
                hint="compare with the checkpoint, or leave --adapter out",
            )  # fmt: skip
        check_same_interface(manifest, package.manifest)
        return PackageSide(package.root, package.manifest, package.digest)
    checkpoint = Checkpoint.open(path, str(options.get("strip_prefix", "")))
    template = _template(candidate, checkpoint)
    if template.id != manifest.model.template:
        raise BadInputError(
            "the two are not the same model", where=str(path), expected=manifest.model.template, got=template.id
        )
    _require_same(options.get("adapters", []), adapters, str(candidate.root))
    progress.stage("loading", f"{path} in PyTorch")
    from mcpc.export.convert import COMPUTE_DTYPE, Exporter

    exporter = Exporter(checkpoint, adapters, str(options.get("dtype", "keep")))
    plan = make_plan(template, exporter.config, COMPUTE_DTYPE)
    return CheckpointSide(exporter.checkpoint, plan, manifest, checkpoint.digest())


def _require_same(recorded: Sequence[Mapping[str, Any]], adapters: Sequence[Adapter], where: str) -> None:
    """Refuse adapters that are not those of the package, by digest and weight, in order."""
    wanted = [(str(item["name"]), str(item["digest"]), float(item["weight"])) for item in recorded]
    given = [(item.name, item.digest, item.weight) for item in adapters]
    if [item[1:] for item in wanted] == [item[1:] for item in given]:
        return
    options = " ".join(f"--adapter {name}{'' if weight == 1.0 else f'={weight:g}'}" for name, _, weight in wanted)
    raise UsageError(
        "the adapters are not those that the package was made with", where=where,
        expected=", ".join(f"{name} {digest[:19]} (weight {weight:g})" for name, digest, weight in wanted) or "none",
        got=", ".join(f"{name} {digest[:19]} (weight {weight:g})" for name, digest, weight in given) or "none",
        hint=f"mcpc verify ... {options}" if wanted else "leave --adapter out",
    )  # fmt: skip


def _template(package: Package, checkpoint: Checkpoint) -> Template:
    """Return the template that fits a checkpoint; a package that was made with another brings it along."""
    if package.manifest.model.template_digest is None:
        return select(checkpoint, load_templates())
    return require_fit(load_template(package.root / TEMPLATE_FILE), checkpoint)
