"""`mcpc quantize`: a float package becomes a smaller one, checked against its parent."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir

from mcpc.config.recipe import Recipe
from mcpc.core.progress import Progress
from mcpc.core.report import Report
from mcpc.errors import BadInputError, UsageError, VerificationError
from mcpc.graph import describe, io
from mcpc.graph.widen import WidenedTensor, widen
from mcpc.inference.cache import bytes_per_token
from mcpc.package import Manifest, Package, PackageWriter, manifest, package_writer
from mcpc.passes.quantize.plan import Decision
from mcpc.passes.quantize.store import write_weights
from mcpc.storage.directories import check_output
from mcpc.workflows.assemble import schema_hash
from mcpc.workflows.environment import peak_rss_bytes, tool_versions
from mcpc.workflows.quantize_steps import (
    Made,
    Options,
    load_recipe,
    plan_figures,
    plan_for,
    refuse_quantized,
    rewrite,
    step_records,
)

Verify = Literal["full", "none"]
#: Files that the writer makes anew; everything else of the parent is copied.
_REMADE = frozenset({"manifest.json", "verification.json"})


def quantize(
    source: Path,
    output: Path,
    recipe: str,
    *,
    options: Options | None = None,
    verify: Verify = "full",
    samples: Sequence[Path] = (),
    allow_unverified: bool = False,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress,
) -> Report:
    """Quantize the weights of a package, or of a bare ONNX file.

    Args:
        source: Package folder or `.onnx` file; never changed.
        output: Folder to write; appears only when it is whole and checked.
        recipe: Name of a shipped recipe, or path of a recipe file.
        options: What the command line changes in the recipe.
        verify: `none` skips the comparison with the parent and marks the output unverified.
        samples: Images or WAV files used as real inputs instead of the shipped ones; packages only.
        allow_unverified: Accept a parent that is marked unverified; the output is compared with it all the same.
        force: Replace an existing output.
        dry_run: Report the plan and stop.
        progress: Shows the stages.

    Raises:
        BadInputError: The source is damaged, quantized already, or the recipe is malformed.
        UsageError: The parent is unverified, the output exists, or an option fits no step.
        VerificationError: The output differs from the parent by more than the gate allows.
    """
    check_output(output, force)
    chosen = load_recipe(recipe, options or Options())
    if source.is_file():
        from mcpc.workflows.quantize_onnx import quantize_file

        if samples:
            raise UsageError(
                "a bare ONNX file is checked on seeded inputs", where=str(source), hint="leave --sample out"
            )
        return quantize_file(source, output, chosen, verify=verify, force=force, dry_run=dry_run, progress=progress)
    progress.stage("reading", str(source))
    parent = Package.open(source, allow_unverified=allow_unverified, check_bytes=True)
    if output.resolve() == source.resolve():
        raise UsageError("the output is the package itself", where=str(output))
    models = {component.name: io.load(source / component.file) for component in parent.manifest.components}
    refuse_quantized(models, str(source))
    widened = {name for name, model in models.items() if widen(model)}
    plan = plan_for(models, chosen, _source_names(parent.manifest))
    if dry_run:
        return Report("quantize", data={"kind": "package", "recipe": chosen.meta.name, "plan": plan_figures(plan)})
    if not any(decision.form for decision in plan):
        raise BadInputError(
            "the recipe takes no weight of this package",
            where=str(source),
            hint="--dry-run lists every weight with the reason",
        )
    return _write(parent, models, plan, chosen, widened, output, verify, samples, force, progress)


def _write(
    parent: Package,
    models: Mapping[str, ir.Model],
    plan: tuple[Decision, ...],
    recipe: Recipe,
    widened: set[str],
    output: Path,
    verify: Verify,
    samples: Sequence[Path],
    force: bool,
    progress: Progress,
) -> Report:
    started = time.perf_counter()
    stages: dict[str, float] = {}
    with package_writer(output, force) as writer:
        progress.stage("rewriting", f"{len(models)} graphs")
        narrow = {name: _narrow_initializers(model) for name, model in models.items() if name in widened}
        made = rewrite(models, recipe, plan, progress)
        progress.stage("quantizing", f"{sum(1 for decision in plan if decision.form)} weights")
        write_weights(models, {name: f"weights/{name}.safetensors" for name in models}, writer.root, progress)
        _copy_rest(parent, writer)
        for component in parent.manifest.components:
            io.save(models[component.name], writer.path(component.file))
            io.check(writer.root / component.file)
        child = _manifest(parent, models, made, narrow, recipe, "none" if verify == "none" else "executed")
        writer.write_manifest(child)
        stages["quantize_s"] = time.perf_counter() - started
        peak_before_verify = peak_rss_bytes()
        result, figures = _verify(writer, child, parent, verify, samples, progress, stages)
        writer.write_json("verification.json", result)
        digest = writer.seal()
        report = Report(
            "quantize",
            child.verification.checked,
            {
                "kind": "package",
                "recipe": recipe.meta.name,
                "digest": digest,
                "parent": {"digest": parent.digest, "checked": parent.manifest.verification.checked},
                "components": [_component_figures(parent.manifest, component) for component in child.components],
                "package_bytes": {"parent": _folder_bytes(parent.root), "output": _folder_bytes(writer.root)},
                "plan": plan_figures(plan),
                "verification": figures,
                "stages": stages,
                "peak_rss_bytes": {"before_verify": peak_before_verify, "in_all": peak_rss_bytes()},
                "environment": tool_versions(),
            },
        )
        writer.write_json("report.json", report.to_dict())
    return report


def _verify(
    writer: PackageWriter,
    child: Manifest,
    parent: Package,
    verify: Verify,
    samples: Sequence[Path],
    progress: Progress,
    stages: dict[str, float],
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return what `verification.json` holds, and the exact figures for the report."""
    if verify == "none":
        return {"checked": "none"}, None
    from mcpc.workflows.checking import check_against_parent, require_passed

    started = time.perf_counter()
    verification = check_against_parent(writer.root, child, parent, progress, samples)
    try:
        require_passed(verification, str(parent.root))
    except VerificationError as error:
        failed = [item.name for item in verification.components if item.failures]
        keep = " ".join(f"{_gentler(child.component(name))} '{name}/*'" for name in failed)
        error.hint = f"nothing was written; keep the sensitive weights: {keep}" if keep else "nothing was written"
        raise
    stages["verify_s"] = time.perf_counter() - started
    return {"checked": "executed", **verification.bounds()}, verification.figures()


def _gentler(component: manifest.Component) -> str:
    """Return the option that keeps weights of a component at the next higher precision."""
    return "--keep-int8" if "int4" in component.precision.weights else "--keep-wide"


def _source_names(parent: Manifest) -> dict[tuple[str, str], str]:
    return {
        (component.name, name): item.source_name
        for component in parent.components
        for name, item in component.initializers.items()
    }


def _narrow_initializers(model: ir.Model) -> set[str]:
    """Return the initializers that were 16 bits wide in the parent."""
    return {str(value.name) for value in io.all_initializers(model) if isinstance(value.const_value, WidenedTensor)}


def _copy_rest(parent: Package, writer: PackageWriter) -> None:
    """Copy everything of the parent that is neither graph nor weights: config, processor, contracts."""
    graphs = {component.file for component in parent.manifest.components}
    weights = {file for component in parent.manifest.components for file in component.weights}
    for relative in sorted(parent.file_bytes()):
        if relative not in graphs | weights | _REMADE:
            writer.copy(parent.root / relative, relative)


def _manifest(
    parent: Package,
    models: Mapping[str, ir.Model],
    made: Mapping[str, Made],
    narrow: Mapping[str, set[str]],
    recipe: Recipe,
    checked: Literal["executed", "none"],
) -> Manifest:
    """Return the parent's manifest with everything that changed read from the graphs."""
    old = parent.manifest
    components = tuple(
        component.model_copy(
            update={
                "functions": describe.functions(models[component.name]),
                "inputs": describe.tensors(models[component.name].graph.inputs),
                "outputs": describe.tensors(models[component.name].graph.outputs),
                "precision": describe.precision(models[component.name]),
                "weights": describe.weight_files(models[component.name]),
                "initializers": _initializers(
                    component, models[component.name], made[component.name], narrow.get(component.name, set())
                ),
            }
        )
        for component in old.components
    )
    step = manifest.Step(
        command="quantize",
        passes=step_records(recipe),
        options={"recipe": f"{recipe.meta.name}@{recipe.meta.version}", "parent_checked": old.verification.checked},
    )
    return old.model_copy(
        update={
            "opset": describe.opsets(models.values()),
            "components": components,
            "kv_cache": _kv_cache(old, models),
            "lineage": manifest.Lineage(parent=parent.digest, steps=(*old.lineage.steps, step)),
            "schema_hash": schema_hash(components, old.modalities, old.edges),
            "verification": manifest.VerificationRef(checked=checked),
        }
    )


def _initializers(
    component: manifest.Component, model: ir.Model, made: Made, narrow: set[str]
) -> dict[str, manifest.Initializer]:
    """Return the source and transform of each initializer: kept, widened, or made by a pass."""
    result = {}
    for value in io.all_initializers(model):
        name = str(value.name)
        origin, transform = made.get(name, (name, ""))
        source = component.initializers.get(origin)
        if source is not None:
            kept = "cast" if name in narrow else source.transform
            result[name] = manifest.Initializer(source_name=source.source_name, transform=transform or kept)
    return dict(sorted(result.items()))


def _kv_cache(old: Manifest, models: Mapping[str, ir.Model]) -> manifest.KvCache | None:
    """Return the cache description with the dtype that the rewritten decoder has."""
    cache = old.kv_cache
    if cache is None:
        return None
    decoder = models[old.by_role("decoder").name]
    tensors = describe.tensors(decoder.graph.inputs)
    past = next(tensor for tensor in tensors if tensor.name.startswith("past."))
    return cache.model_copy(update={"dtype": past.dtype, "bytes_per_token": bytes_per_token(tensors)})


def _component_figures(parent: Manifest, component: manifest.Component) -> dict[str, Any]:
    before = parent.component(component.name).precision
    return {
        "name": component.name,
        "weights": component.precision.weights,
        "weight_bytes": {"parent": before.bytes, "output": component.precision.bytes},
    }


def _folder_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
