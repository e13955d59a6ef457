"""`mcpc convert`: a Hugging Face checkpoint becomes a verified package."""

from __future__ import annotations

import fnmatch
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mcpc.checkpoint import Checkpoint
from mcpc.checkpoint.adapters import Adapter
from mcpc.checkpoint.lora import Drift
from mcpc.checkpoint.statistics import Statistics
from mcpc.core.progress import Progress
from mcpc.core.report import Report
from mcpc.errors import BadInputError, Problem, UsageError
from mcpc.graph import io
from mcpc.graph.functions import attach, vision_embed
from mcpc.graph.weights import bind, place_weights, refer_to_weights, wanted_dtypes
from mcpc.package import PackageWriter, package_writer
from mcpc.package.manifest import Manifest
from mcpc.passes.quantize.packed import place_packed
from mcpc.storage.directories import check_output
from mcpc.templates.match import load_templates, select
from mcpc.templates.outside import TEMPLATE_FILE, Outside, load_template, require_fit
from mcpc.templates.plan import ExportPlan, make_plan
from mcpc.workflows import assemble
from mcpc.workflows.environment import give_back_large_blocks, peak_rss_bytes, tool_versions
from mcpc.workflows.preflight import Preflight, fixed_rows
from mcpc.workflows.rewrites import rewrite

if TYPE_CHECKING:
    from mcpc.export.convert import Exporter
    from mcpc.verify.verification import Mode

#: Largest float32 size of a model that is verified as a whole.
_WHOLE_BYTES = 1 << 30

Dtype = Literal["keep", "float32", "float16", "bfloat16"]
Verify = Literal["auto", "full", "layers", "sample", "none"]
Weights = Literal["copy", "reference"]


def convert(
    checkpoint_root: Path,
    output: Path,
    *,
    dtype: Dtype = "keep",
    verify: Verify = "auto",
    weights: Weights = "copy",
    samples: Sequence[Path] = (),
    force: bool = False,
    dry_run: bool = False,
    strip_prefix: str = "",
    template_file: Path | None = None,
    adapters: Sequence[tuple[Path, float]] = (),
    progress: Progress,
) -> Report:
    """Convert a checkpoint into a package at `output`.

    Args:
        checkpoint_root: Folder with config.json and safetensors files; never changed.
        output: Package folder; appears only when it is whole and checked.
        dtype: Float dtype of the package, or `keep` for the checkpoint's own.
        verify: How much is compared with PyTorch; `auto` streams weights of more than `_WHOLE_BYTES`, `none` skips the
            comparison and marks the package unverified.
        weights: `reference` leaves the tensors in the checkpoint, for a package that is only a step on the way.
        samples: Images or WAV files used as real inputs instead of the shipped ones.
        force: Replace an existing output.
        dry_run: Resolve the plan, report it and stop.
        strip_prefix: Leading part of the tensors' names that the model does not know.
        template_file: A template of the user, instead of the shipped one that fits; it travels in the package.
        adapters: Folders of LoRA adapters that are merged into the weights in this order, each with its weight.
        progress: Shows the stages.
    """
    check_output(output, force)
    progress.stage("reading", str(checkpoint_root))
    checkpoint = Checkpoint.open(checkpoint_root, strip_prefix)
    if output.resolve() == checkpoint.root.resolve():
        raise UsageError("the output is the checkpoint itself", where=str(output))
    outside = None if template_file is None else load_template(template_file)
    template = select(checkpoint, load_templates()) if outside is None else require_fit(outside, checkpoint)
    loras = [Adapter.open(root, weight) for root, weight in adapters]
    from mcpc.export.convert import COMPUTE_DTYPE, Exporter  # torch takes seconds: only when the checkpoint is worth it

    started = time.perf_counter()
    exporter = Exporter(checkpoint, loras, dtype)
    checkpoint = exporter.checkpoint
    mode = _mode(checkpoint, exporter) if verify == "auto" else verify
    if mode != "full":
        give_back_large_blocks()
    plan = make_plan(template, exporter.config, COMPUTE_DTYPE)
    exporter.check_calls(plan)
    notes = [*checkpoint.notes, *exporter.notes, *_preflight(checkpoint, exporter, plan).check()]
    if dry_run or (weights == "reference" and verify != "none"):  # a copy is checked while it is made
        checkpoint.check_finite(set(exporter.source.values()))
    if dry_run:
        return Report("convert", data={"plan": {**_plan_data(plan, checkpoint), **_adapter_options(loras)}})
    stages: dict[str, float] = {"prepare_s": time.perf_counter() - started}
    with package_writer(output, force) as writer:
        statistics = Statistics()
        options = {"dtype": dtype, "weights": weights, **_adapter_options(loras)}
        manifest, rewrites = _export(
            checkpoint, exporter, plan, options, verify, writer, progress, stages, outside, statistics
        )
        stages["convert_peak_rss_bytes"] = peak_rss_bytes()
        result: dict[str, Any] = {"checked": "none"}
        figures: dict[str, Any] | None = None
        if mode != "none":
            from mcpc.workflows.checking import check_against_checkpoint, require_passed

            begun = time.perf_counter()
            verification = check_against_checkpoint(writer.root, manifest, checkpoint, plan, samples, mode, progress)
            require_passed(verification, str(checkpoint_root))
            stages["verify_s"] = time.perf_counter() - begun
            result = {"checked": "executed", **verification.bounds()}
            figures = verification.figures()
        writer.write_json("verification.json", result)
        digest = writer.seal()
        notes += _merged_in_vain(manifest, exporter)
        image = manifest.modalities.get("image")
        notes += _preflight(checkpoint, exporter, plan).row_notes(image.rows_per_item if image else None)
        merged = [_adapter_facts(lora, drift) for lora, drift in zip(loras, exporter.drifts, strict=True)]
        components = _component_facts(manifest, exporter.source, statistics)
        report = _report(manifest, digest, writer, figures, stages, notes, merged, components, rewrites)
        writer.write_json("report.json", report.to_dict())
    return report


def _export(
    checkpoint: Checkpoint,
    exporter: Exporter,
    plan: ExportPlan,
    options: Mapping[str, Any],
    verify: Verify,
    writer: PackageWriter,
    progress: Progress,
    stages: dict[str, float],
    outside: Outside | None,
    statistics: Statistics,
) -> tuple[Manifest, Sequence[Mapping[str, Any]]]:
    """Trace, rewrite, place weights, bind and save every component; return the manifest, and what rewrites did."""
    begun = time.perf_counter()
    traced = []
    for number, component in enumerate(plan.components):
        progress.stage("tracing", component.name)
        progress.advance(number, len(plan.components), component.name)
        traced.append(exporter.trace(component, plan))
    # A fold makes new weights, and referenced ones stay as they are.
    names = [name for name in plan.template.rewrites if options["weights"] == "copy" or name != "fold-batch-norm"]
    rewritten = rewrite({item.component.name: item.model for item in traced}, names, checkpoint, exporter.source)
    checkpoint = exporter.take(rewritten.made)
    stages["trace_s"] = time.perf_counter() - begun
    preflight = _preflight(checkpoint, exporter, plan)
    for item in traced:
        if item.component.modality == "image":
            preflight.check_rows(fixed_rows(item.relations.get("feature_rows")))
    begun = time.perf_counter()
    progress.stage("weights", f"{len(checkpoint.files)} files")
    wanted = wanted_dtypes([item.model for item in traced], exporter.source, checkpoint, str(options["dtype"]))
    unused = _unused(checkpoint, wanted, plan, exporter.ignored)
    if options["weights"] == "reference":
        spans = refer_to_weights(checkpoint, wanted, writer)
        digest = None if verify == "none" else checkpoint.digest()
    else:
        spans, digest = place_weights(checkpoint, wanted, writer, progress, statistics)
    stages["weights_s"] = time.perf_counter() - begun
    begun = time.perf_counter()
    bound = []
    source = dict(exporter.source)
    for item in traced:
        source |= place_packed(item.model, checkpoint, exporter.source, spans, writer.root)
        bind(item.model, exporter.source, spans, writer.root)
        attach(item.model, vision_embed())
        io.strip_metadata(item.model, item.component.name)
        io.save(item.model, writer.path(f"{item.component.name}.onnx"))
        io.check(writer.root / f"{item.component.name}.onnx")
        bound.append(assemble.BoundComponent(item.component, item.model, item.relations))
    stages["bind_s"] = time.perf_counter() - begun
    assemble.write_processor(checkpoint, writer)
    if outside is not None:
        writer.copy(outside.path, TEMPLATE_FILE)
    contracts = assemble.write_contracts(exporter.config, plan, writer)
    facts = assemble.Facts(
        checkpoint, exporter.config, plan, bound, source, spans, digest, exporter.embedding_rows, unused,
        options, "none" if verify == "none" else "executed", preflight.vocabulary,
        None if outside is None else outside.digest,
    )  # fmt: skip
    manifest = assemble.build_manifest(facts, contracts)
    writer.write_manifest(manifest)
    return manifest, rewritten.facts


def _preflight(checkpoint: Checkpoint, exporter: Exporter, plan: ExportPlan) -> Preflight:
    return Preflight(checkpoint, exporter.config, plan, exporter.embedding_rows, exporter.head_rows)


def _adapter_options(adapters: Sequence[Adapter]) -> dict[str, Any]:
    """Return what the manifest's lineage says of the adapters."""
    items = [{"name": item.name, "digest": item.digest, "weight": item.weight} for item in adapters]
    return {"adapters": items} if items else {}


def _merged_in_vain(manifest: Manifest, exporter: Exporter) -> list[str]:
    """Return a note of each parameter that adapters change and no component has."""
    used = {exporter.source.get(name) for component in manifest.components for name in component.initializers}
    return [
        f"an adapter changes {name}, which no component uses"
        for name, made in sorted(exporter.checkpoint.merged.items())
        if made not in used
    ]


def _adapter_facts(adapter: Adapter, drift: Drift) -> dict[str, Any]:
    """Return what an adapter was applied to, and how far it moved the weights: |change| / |weight before|."""
    moved = drift.of
    return {
        "name": adapter.name,
        "weight": adapter.weight,
        "updated": len(adapter.updates),
        "replaced": len(adapter.replaced),
        "mean_drift": statistics.fmean(moved.values()) if moved else None,
        "max_drift": max(moved.values(), default=None),
        "furthest": max(sorted(moved), key=lambda name: moved[name]) if moved else None,
    }


def _component_facts(manifest: Manifest, source: Mapping[str, str], statistics: Statistics) -> list[dict[str, Any]]:
    """Return each component's size, its share of the bytes, and figures over its float weights, each counted once."""
    total = sum(component.precision.bytes for component in manifest.components)
    return [
        {
            "name": component.name,
            "weights": component.precision.weights,
            "weight_bytes": component.precision.bytes,
            "parameters": sum(component.precision.weights.values()),
            "share": round(component.precision.bytes / total, 4) if total else 0.0,
            "statistics": statistics.of(sorted({source[name] for name in component.initializers if name in source})),
        }
        for component in manifest.components
    ]


def _mode(checkpoint: Checkpoint, exporter: Exporter) -> Mode:
    """Return how much is compared by default: whole models as long as two of them fit into memory easily."""
    names = set(exporter.source.values())
    elements = sum(math.prod(checkpoint.shape_of(name)) for name in names)
    return "full" if 4 * elements <= _WHOLE_BYTES else "layers"


def _unused(
    checkpoint: Checkpoint, wanted: Mapping[str, str], plan: ExportPlan, ignored: Mapping[str, str]
) -> dict[str, str]:
    """Return why each unused tensor is not needed.

    Raises:
        BadInputError: A tensor is neither used nor listed as unused by the template.
    """
    result = dict(ignored)
    problems = []
    for name in sorted(set(checkpoint.tensors) - checkpoint.stored(wanted) - set(ignored)):
        why = next((item.why for item in plan.template.weights.unused if fnmatch.fnmatchcase(name, item.pattern)), None)
        if why is None:
            problems.append(Problem("no component uses this tensor, and the template does not list it as unused", name))
        else:
            result[name] = why
    if problems:
        raise BadInputError(
            f"{len(problems)} tensors would be lost: {problems[0]}",
            where=str(checkpoint.root),
            problems=problems,
            hint=f"list them under weights.unused of the template {plan.template.id}, or fix the template",
        )
    return result


def _plan_data(plan: ExportPlan, checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "template": plan.template.id,
        "tensors": len(checkpoint.tensors),
        "sizes": dict(plan.sizes),
        "components": [
            {"name": c.name, "role": c.role, "inputs": [[t.name, t.dtype, list(t.shape)] for t in c.inputs],
             "outputs": [[t.name, t.dtype, list(t.shape)] for t in c.outputs]}
            for c in plan.components
        ],
    }  # fmt: skip


def _report(
    manifest: Manifest,
    digest: str,
    writer: PackageWriter,
    figures: dict[str, Any] | None,
    stages: dict[str, float],
    notes: list[str],
    adapters: list[dict[str, Any]],
    components: list[dict[str, Any]],
    rewrites: Sequence[Mapping[str, Any]],
) -> Report:
    total = sum(path.stat().st_size for path in writer.root.rglob("*") if path.is_file())
    return Report(
        "convert",
        manifest.verification.checked,
        {
            "digest": digest,
            "template": manifest.model.template,
            "components": components,
            "rewrites": list(rewrites),
            "package_bytes": total,
            "unused_tensors": len(manifest.unused),
            "notes": notes,
            "adapters": adapters,
            "verification": figures,
            "stages": stages,
            "peak_rss_bytes": peak_rss_bytes(),
            "environment": tool_versions(),
        },
    )
