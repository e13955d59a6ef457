"""`mcpc inspect`: a readable tree of a checkpoint, package, ONNX file or engine folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from mcpc.cli.console import execute
from mcpc.cli.options import Json
from mcpc.cli.render import branch, human_bytes, leaves, shortened, tensor_text
from mcpc.core.progress import Progress
from mcpc.core.report import Report

_LIMIT = 24


def inspect(
    path: Annotated[Path, typer.Argument(help="Checkpoint folder, package, .onnx file or engine folder.")],
    json_output: Json = False,
) -> None:
    """Show what a checkpoint, package, ONNX file or engine folder holds."""

    def work(_: Progress) -> Report:
        from mcpc.workflows.inspect import inspect as run

        return run(path)

    execute("inspect", work, render, json_output)


def render(console: Console, report: Report) -> None:
    """Print the tree of a report of `workflows.inspect`."""
    views = {"checkpoint": _checkpoint, "package": _package, "onnx": _onnx, "engines": _engines}
    data = report.data
    tree = Tree(Text.assemble((data["path"], "bold"), f"  {data['kind']}"), guide_style="dim")
    views[data["kind"]](tree, data)
    console.print(tree)


def _checkpoint(tree: Tree, data: Mapping[str, Any]) -> None:
    total = data["total"]
    branch(tree, "architecture", f"{data['architecture'] or 'none named'} ({data['model_type']})")
    branch(tree, "template", data["template"]["id"] or f"none: {data['template']['why']}")
    branch(tree, "size", f"{total['elements']:,} parameters, {total['tensors']} tensors, {human_bytes(total['bytes'])}")
    leaves(branch(tree, "dtypes"), map(_group, data["dtypes"]))
    leaves(branch(tree, "files"), shortened([_group(item) for item in data["files"]], _LIMIT))
    leaves(branch(tree, "modules"), shortened([_group(item) for item in data["modules"]], _LIMIT))
    branch(tree, "ties", ", ".join(data["ties"]) or "none declared")
    tokenizer = data["tokenizer"]
    if tokenizer:
        special = f"{tokenizer['special_tokens']} special: {' '.join(tokenizer['first_special_tokens'])}"
        branch(tree, "tokenizer", f"{tokenizer['model']}, {tokenizer['vocabulary']:,} entries, {special}")
    if data["processor"]:
        branch(tree, "processor", data["processor"]["type"])
    leaves(tree, (f"note: {note}" for note in data["notes"]))
    branch(tree, "identity", data["identity"])


def _group(item: Mapping[str, Any]) -> str:
    tensors = "1 tensor" if item["tensors"] == 1 else f"{item['tensors']} tensors"
    return f"{item['name']}  {tensors}, {item['elements']:,} elements, {human_bytes(item['bytes'])}"


def _package(tree: Tree, data: Mapping[str, Any]) -> None:
    model = data["model"]
    branch(tree, "model", f"{model['architecture']} ({data['chain']}), template {model['template']}")
    branch(tree, "digest", data["digest"])
    branch(tree, "size", f"{human_bytes(data['total_bytes'])} in {len(data['files'])} files")
    components = branch(tree, "components")
    for component in data["components"]:
        _component(components, component)
    leaves(branch(tree, "edges"), (f"{source} -> {target}" for source, target in data["edges"]))
    modalities = branch(tree, "modalities")
    for name, modality in data["modalities"].items():
        facts = {key: value for key, value in modality.items() if not isinstance(value, dict | list)}
        leaves(
            branch(modalities, name, ", ".join(modality["inputs"])), (f"{key}: {value}" for key, value in facts.items())
        )
    cache = data.get("kv_cache")
    if cache:
        branch(tree, "kv cache", f"{cache['layers']} layers x {cache['kv_heads']} heads x {cache['head_dim']}, "
                                 f"{cache['dtype']}, {human_bytes(cache['bytes_per_token'])} per token")  # fmt: skip
    _lineage(tree, data)


def _component(tree: Tree, component: Mapping[str, Any]) -> None:
    precision = component["precision"]
    weights = ", ".join(f"{count:,} {dtype}" for dtype, count in precision["weights"].items()) or "no weights"
    role = " ".join(filter(None, (component.get("modality"), component["role"])))
    node = branch(tree, component["name"], f"{role}: {weights}, {human_bytes(precision['bytes'])}")
    if statistics := component.get("statistics"):
        figures = ", ".join(f"{name} {value:g}" for name, value in statistics.items())
        branch(node, "values", f"{figures}; {component['share']:.1%} of the weights' bytes")
    leaves(branch(node, "inputs"), shortened([tensor_text(value) for value in component["inputs"]], 6))
    leaves(branch(node, "outputs"), shortened([tensor_text(value) for value in component["outputs"]], 6))
    transforms = ", ".join(f"{count} {name}" for name, count in component["transforms"].items())
    branch(node, "initializers", f"{component['initializers']} ({transforms})" if transforms else "none")
    if component["functions"]:
        branch(node, "functions", ", ".join(component["functions"]))


def _lineage(tree: Tree, data: Mapping[str, Any]) -> None:
    lineage = branch(tree, "lineage", f"from {data['lineage']['parent']}" if data["lineage"].get("parent") else "")
    for step in data["lineage"]["steps"]:
        options = " ".join(f"{key}={value}" for key, value in step["options"].items())
        node = branch(lineage, step["command"], options)
        leaves(node, map(_pass, step["passes"]))
    verification = data["verification"]
    node = branch(tree, "verification", verification["checked"])
    leaves(node, (f"{key}: {value}" for key, value in verification.items() if isinstance(value, str | int | float)))


def _pass(item: Mapping[str, Any]) -> str:
    options = " ".join(f"{key}={value}" for key, value in item.get("options", {}).items() if value not in ([], None))
    return f"{item.get('pass', '')}@{item.get('version', '')} {options}".strip()


def _onnx(tree: Tree, data: Mapping[str, Any]) -> None:
    branch(
        tree,
        "file",
        f"{human_bytes(data['file_bytes'])}, IR version {data['ir_version']}, {data['producer'] or 'no producer'}",
    )
    branch(tree, "opsets", ", ".join(f"{domain} {version}" for domain, version in data["opsets"].items()))
    leaves(branch(tree, "inputs"), shortened([tensor_text(value) for value in data["inputs"]], _LIMIT))
    leaves(branch(tree, "outputs"), shortened([tensor_text(value) for value in data["outputs"]], _LIMIT))
    ops = [f"{count:>5}  {name}" for name, count in data["ops"].items()]
    inside = f", in {data['subgraphs'] + 1} graphs" if data["subgraphs"] else ""
    leaves(branch(tree, "ops", f"{data['nodes']} nodes{inside}"), shortened(ops, _LIMIT))
    for key in ("initializers", "constants"):
        group = data[key]
        label = "weights in Constant nodes" if key == "constants" else key
        node = branch(
            tree, label, f"{group['tensors']} tensors, {group['elements']:,} elements, {human_bytes(group['bytes'])}"
        )
        leaves(node, (_group({"name": name, **item}) for name, item in group["dtypes"].items()))
        if group["largest"]:
            largest = branch(node, "largest")
            leaves(largest, (f"{tensor_text(item)}  {human_bytes(item['bytes'])}" for item in group["largest"]))
    if data["external_files"]:
        sizes = (f"{name}  {human_bytes(size)}" for name, size in data["external_files"].items())
        leaves(branch(tree, "external data"), sizes)
    if data["functions"]:
        spelled = (
            f"{item['name']}({', '.join(item['inputs'])}) -> {', '.join(item['outputs'])}" for item in data["functions"]
        )
        leaves(branch(tree, "functions"), spelled)


def _engines(tree: Tree, data: Mapping[str, Any]) -> None:
    branch(tree, "size", human_bytes(data["total_bytes"]))
    _facts(tree, data["index"])
    for engine in data["engines"]:
        node = branch(tree, engine["file"], human_bytes(engine["file_bytes"]))
        _facts(node, {key: value for key, value in engine.items() if key not in ("file", "file_bytes")})


def _facts(tree: Tree, facts: Mapping[str, Any]) -> None:
    """Add nested JSON data to a tree; sizes in bytes are shown with a unit."""
    for key, value in facts.items():
        if isinstance(value, dict) and value.keys() == {"name", "dtype", "shape"}:
            leaves(tree, [tensor_text(value)])
        elif isinstance(value, dict):
            _facts(branch(tree, key), value)
        elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
            node = branch(tree, key)
            for index, item in enumerate(value):
                _facts(node, {item.get("name", str(index)) if isinstance(item, dict) else str(index): item})
        elif key.endswith("_bytes") and isinstance(value, int):
            branch(tree, key.removesuffix("_bytes").replace("_", " "), human_bytes(value))
        else:
            branch(tree, key.replace("_", " "), ", ".join(map(str, value)) if isinstance(value, list) else value)
