"""What a checkpoint folder holds: read from config and headers alone, no tensor is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mcpc.checkpoint import Checkpoint
from mcpc.errors import McpcError
from mcpc.storage.safetensors import Entry
from mcpc.templates.match import load_templates, select

_LAYER = re.compile(r"\.(\d+)(?=\.)")
_TIE = "tie_word_embeddings"


def checkpoint_summary(root: Path) -> dict[str, Any]:
    """Return config, shards, tensors by dtype and by module, ties, tokenizer and the template that fits."""
    checkpoint = Checkpoint.open(root)
    tensors = checkpoint.tensors.values()
    return {
        "architecture": checkpoint.architecture,
        "model_type": str(checkpoint.config.get("model_type", "")),
        "dtype": checkpoint.dtype,
        "identity": checkpoint.identity,
        "template": _template(checkpoint),
        "total": _size(tensors),
        "files": _by(tensors, lambda entry: entry.file.name),
        "dtypes": _by(tensors, lambda entry: entry.dtype),
        "modules": _modules(checkpoint.tensors),
        "ties": sorted(_ties(checkpoint.config)),
        "tokenizer": _tokenizer(checkpoint),
        "processor": _processor(checkpoint),
        "notes": list(checkpoint.notes),
        "config": dict(checkpoint.config),
    }


def _template(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the template that `mcpc convert` would use, or why there is none."""
    try:
        return {"id": select(checkpoint, load_templates()).id}
    except McpcError as error:
        return {"id": None, "why": str(error), "hint": error.hint}


def _size(entries: Iterable[Entry]) -> dict[str, int]:
    total = {"tensors": 0, "elements": 0, "bytes": 0}
    for entry in entries:
        total["tensors"] += 1
        total["elements"] += math.prod(entry.shape)
        total["bytes"] += entry.length
    return total


def _by(entries: Iterable[Entry], key: Any) -> list[dict[str, Any]]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return [{"name": name, **_size(groups[name])} for name in sorted(groups)]


def _modules(tensors: Mapping[str, Entry]) -> list[dict[str, Any]]:
    """Group tensors by module; equal layers become one line, `model.layers.{0..31}`."""
    groups: dict[str, list[Entry]] = {}
    layers: dict[str, set[int]] = {}
    for name, entry in tensors.items():
        found = _LAYER.search(name)
        module = name[: found.start()] + ".*" if found else name.rpartition(".")[0] or name
        groups.setdefault(module, []).append(entry)
        if found:
            layers.setdefault(module, set()).add(int(found[1]))
    return [{"name": _spell(name, layers.get(name)), **_size(groups[name])} for name in sorted(groups)]


def _spell(module: str, layers: set[int] | None) -> str:
    if not layers:
        return module
    low, high = min(layers), max(layers)
    return module[:-1] + (f"{{{low}..{high}}}" if high > low else str(low))


def _ties(config: Mapping[str, Any], place: str = "") -> list[str]:
    """Return the places of the config that say that embedding and head share one tensor."""
    found = [f"{place}{_TIE}"] if config.get(_TIE) is True else []
    for key, value in config.items():
        if isinstance(value, Mapping):
            found += _ties(value, f"{place}{key}.")
    return found


def _tokenizer(checkpoint: Checkpoint) -> dict[str, Any] | None:
    data = checkpoint.optional_json("tokenizer.json")
    if data is None:
        return None
    model = data.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    added = data.get("added_tokens")
    special = [str(item.get("content")) for item in added if isinstance(item, dict)] if isinstance(added, list) else []
    return {
        "file": "tokenizer.json",
        "model": str(model.get("type", "")) if isinstance(model, dict) else "",
        "vocabulary": len(vocabulary) if isinstance(vocabulary, (dict, list)) else 0,
        "special_tokens": len(special),
        "first_special_tokens": special[:8],
    }


def _processor(checkpoint: Checkpoint) -> dict[str, Any] | None:
    data = checkpoint.optional_json("preprocessor_config.json")
    if data is None:
        return None
    kind = data.get("image_processor_type") or data.get("feature_extractor_type") or data.get("processor_class", "")
    return {"file": "preprocessor_config.json", "type": str(kind)}
