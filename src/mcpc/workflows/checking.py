"""Verification as the commands use it: a package against its checkpoint, or against its parent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mcpc.checkpoint import Checkpoint
from mcpc.core.progress import Progress
from mcpc.errors import BadInputError, Problem, VerificationError
from mcpc.graph import io
from mcpc.graph.modules import producer_of
from mcpc.package import Manifest, Package
from mcpc.templates.plan import ExportPlan
from mcpc.verify.cases import Cases, Sample
from mcpc.verify.compare import compare, failures
from mcpc.verify.gates import gate_of
from mcpc.verify.parting import Parting, first_parting
from mcpc.verify.verification import Mode, Verification, verify
from mcpc.workflows.environment import give_back_large_blocks
from mcpc.workflows.samples import load_samples
from mcpc.workflows.sides import CheckpointSide, PackageSide, Side


def check_against_checkpoint(
    root: Path,
    manifest: Manifest,
    checkpoint: Checkpoint,
    plan: ExportPlan,
    samples: Sequence[Path],
    mode: Mode,
    progress: Progress,
) -> Verification:
    """Compare a package folder with PyTorch running its checkpoint in float32.

    Args:
        root: Package or staging folder.
        manifest: Its manifest.
        checkpoint: What it was made from.
        plan: The export plan.
        samples: The user's real inputs; the shipped ones when empty.
        mode: How much is compared; all but `full` stream the weights on both sides.
        progress: Shows the cases.
    """
    progress.stage("verifying", "against PyTorch")
    streamed = mode != "full"
    if streamed:
        give_back_large_blocks()
    reference = CheckpointSide(checkpoint, plan, manifest, manifest.model.source.digest or "", streamed)
    candidate = PackageSide(root, manifest, streamed=streamed)
    return compare_sides(candidate, reference, {}, load_samples(root, manifest, samples), progress, mode)


def check_against_parent(
    root: Path, manifest: Manifest, parent: Package, progress: Progress, samples: Sequence[Path] = ()
) -> Verification:
    """Compare a derived package folder with the package it was derived from.

    Args:
        root: Staging folder of the child.
        manifest: Of the child.
        parent: The package it was made from.
        progress: Shows the cases.
        samples: The user's real inputs; the shipped ones when empty.
    """
    progress.stage("verifying", "against the parent package")
    reference = PackageSide(parent.root, parent.manifest, parent.digest)
    check_same_interface(manifest, parent.manifest)
    candidate = PackageSide(root, manifest)
    return compare_sides(
        candidate,
        reference,
        {c.name: c for c in parent.manifest.components},
        load_samples(root, manifest, samples),
        progress,
    )


def compare_sides(
    candidate: PackageSide,
    reference: Side,
    reference_components: dict[str, object],
    samples: tuple[Sample, ...],
    progress: Progress,
    mode: Mode = "full",
) -> Verification:
    """Run both sides on the same inputs and judge every output; when one fails, find where they part."""
    manifest = candidate.manifest
    gates = {}
    for component in manifest.components:
        other = reference_components.get(component.name)
        gates[component.name] = gate_of(component, other) if isinstance(other, type(component)) else gate_of(component)
    result = verify(
        manifest,
        candidate.runners,
        reference.runners,
        reference.exact,
        gates,
        (candidate.chain, reference.chain),
        samples,
        reference.label,
        mode,
        progress,
    )
    if not result.passed:
        progress.stage("locating", "the first node where they part")
        result.parting = locate(candidate, reference, result, samples)
    return result


def locate(
    candidate: PackageSide, reference: Side, result: Verification, samples: tuple[Sample, ...]
) -> Parting | None:
    """Return the first node of the first failed component at which the two sides differ."""
    failed = next((item for item in result.components if item.failures), None)
    if failed is None:
        return None
    places = candidate.places(failed.name)
    for case in Cases(candidate.manifest, reference.runners).all(samples):
        if case.component != failed.name:
            continue
        expected = reference.module_values(case.component, case.feeds, [place.module for place in places])
        actual = candidate.values(
            case.component, case.feeds, [place.value for place in places if place.module in expected]
        )
        found = first_parting(case.component, case.label, places, actual, expected, failed.gate)
        if found is not None:
            return found
        outputs = candidate.runners(case.component).run(case.feeds)
        for name, value in reference.runners(case.component).run(case.feeds).items():
            difference = compare(case.masked(name, outputs[name]), case.masked(name, value))
            if failures(difference, failed.gate):
                node = producer_of(io.load(candidate.root / candidate.component(case.component).file), name)
                return Parting(case.component, name, node, case.label, difference)
    return None


def check_same_interface(manifest: Manifest, other: Manifest) -> None:
    """Refuse to compare two packages whose components, inputs or outputs differ.

    Raises:
        BadInputError: Lists every difference.
    """
    problems = []
    if manifest.kind != other.kind:
        problems.append(Problem("another kind of model", "kind", other.kind, manifest.kind))
    mine, theirs = ({c.name: c for c in m.components} for m in (manifest, other))
    problems += [Problem("the component is on one side only", name) for name in sorted(set(mine) ^ set(theirs))]
    for name in sorted(set(mine) & set(theirs)):
        for kind in ("inputs", "outputs"):
            got = [(tensor.name, tensor.shape) for tensor in getattr(mine[name], kind)]
            want = [(tensor.name, tensor.shape) for tensor in getattr(theirs[name], kind)]
            if got != want:
                problems.append(Problem(f"other {kind}", name, str(want), str(got)))
    if problems:
        raise BadInputError(
            f"the two are not the same model: {problems[0]}",
            problems=problems,
            hint="compare a package with its own checkpoint or parent",
        )


def require_passed(result: Verification, where: str) -> None:
    """Raise when a comparison failed; names the first component and node.

    Raises:
        VerificationError: With every failure.
    """
    if result.passed:
        return
    lines = result.failures()
    parting = result.parting
    place = f"{parting.component}: node {parting.node} ({parting.module})" if parting else where
    raise VerificationError(
        f"the numbers differ: {lines[0]}", where=place, problems=[Problem(line) for line in lines],
        details={"parting": parting.to_dict() if parting else None, **result.figures()},
        hint="nothing was written" if parting else "",
    )  # fmt: skip
