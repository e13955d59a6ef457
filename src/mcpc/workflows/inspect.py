"""`mcpc inspect`: say what a checkpoint, package, ONNX file or engine folder holds. Nothing is changed or run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcpc.checkpoint.index import read_json
from mcpc.core.report import Report
from mcpc.errors import BadInputError
from mcpc.package import Package
from mcpc.package.manifest import Component
from mcpc.package.writer import MANIFEST, REPORT, VERIFICATION
from mcpc.workflows.inspect_checkpoint import checkpoint_summary
from mcpc.workflows.inspect_engines import ENGINES, SIDECAR_SUFFIX, engines_summary
from mcpc.workflows.inspect_graph import graph_summary

Summary = Callable[[Path], dict[str, Any]]

EXPECTED = (
    "a package (manifest.json), an engine folder (engines.json), a checkpoint (config.json and *.safetensors), "
    "or an .onnx file"
)


def inspect(path: Path) -> Report:
    """Return what `path` holds; `data["kind"]` is `checkpoint`, `package`, `onnx` or `engines`.

    Raises:
        BadInputError: There is nothing at `path`, it is none of the four, or it is damaged.
    """
    kind, summarize = _kind(path)
    return Report("inspect", data={"kind": kind, "path": str(path), **summarize(path)})


def _kind(path: Path) -> tuple[str, Summary]:
    if path.is_file():
        if path.suffix == ".engine":
            return "engines", engines_summary
        if path.suffix == ".onnx":
            return "onnx", graph_summary
        raise BadInputError("cannot tell what this file is", where=str(path), expected=EXPECTED)
    if not path.is_dir():
        raise BadInputError("no such file or folder", where=str(path), hint=f"inspect reads {EXPECTED}")
    if (path / MANIFEST).is_file():
        return "package", package_summary
    if (path / ENGINES).is_file() or any(path.glob(f"*{SIDECAR_SUFFIX}")):
        return "engines", engines_summary
    if (path / "config.json").is_file() or any(path.glob("*.safetensors")):
        return "checkpoint", checkpoint_summary
    graphs = sorted(file.name for file in path.glob("*.onnx"))
    held = sorted(file.name for file in path.iterdir())
    raise BadInputError(
        "the folder holds nothing that mcpc knows", where=str(path), expected=EXPECTED,
        got=(", ".join(held[:8]) + (", ..." if len(held) > 8 else "")) or "an empty folder",
        hint=f"mcpc inspect {path / graphs[0]}" if graphs else "",
    )  # fmt: skip


def package_summary(root: Path) -> dict[str, Any]:
    """Return the facts of a package: its manifest without the initializer table, sizes and verification."""
    package = Package.open(root)
    manifest = package.manifest
    sizes = package.file_bytes()
    fields = manifest.model_dump(mode="json", exclude_none=True, exclude={"components", "kind"})
    figures = _figures(root / REPORT)
    return {
        "chain": manifest.kind,
        "digest": package.digest,
        "total_bytes": sum(sizes.values()),
        "files": sizes,
        **fields,
        "components": [
            {**_component(component, sizes), **figures.get(component.name, {})} for component in manifest.components
        ],
        "verification": {"checked": manifest.verification.checked, **_verification(package)},
    }


def _component(component: Component, sizes: dict[str, int]) -> dict[str, Any]:
    fields = component.model_dump(mode="json", exclude_none=True, exclude={"initializers"})
    transforms: dict[str, int] = {}
    for initializer in component.initializers.values():
        transforms[initializer.transform] = transforms.get(initializer.transform, 0) + 1
    return {
        **fields,
        "graph_bytes": sizes.get(component.file, 0),
        "initializers": len(component.initializers),
        "transforms": dict(sorted(transforms.items())),
    }


def _figures(path: Path) -> dict[str, dict[str, Any]]:
    """Return what the report of a conversion says of each component's weights; {} for another report, or none."""
    if not path.is_file():
        return {}
    components = read_json(path, "").get("components")
    if not isinstance(components, list):
        return {}
    names = ("parameters", "share", "statistics")
    return {
        str(item["name"]): {name: item[name] for name in names if item.get(name) is not None}
        for item in components
        if isinstance(item, dict) and "name" in item
    }


def _verification(package: Package) -> dict[str, Any]:
    return package.verification if (package.root / VERIFICATION).is_file() else {}
