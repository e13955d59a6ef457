"""Small, complete manifests for tests that need one."""

from __future__ import annotations

from typing import Any

from mcpc.package.manifest import Manifest

_DIGEST = "sha256:" + "0" * 64
_TRUNCATION = {"policy": "refuse"}


def component(name: str, role: str = "other", **fields: Any) -> dict[str, Any]:
    """Return one component as JSON data."""
    precision = {"weights": {}, "bytes": 0}
    return {
        "name": name,
        "role": role,
        "file": f"{name}.onnx",
        "inputs": [],
        "outputs": [],
        "precision": precision,
    } | fields


def manifest(kind: str = "vision-language", **fields: Any) -> Manifest:
    """Return a valid manifest; `fields` replace its own."""
    source = {"identity": _DIGEST, "digest": _DIGEST, "files": ["model.safetensors"], "dtype": "float32"}
    data: dict[str, Any] = {
        "kind": kind,
        "model": {"architecture": "A", "model_type": "a", "template": "a@1.0.0", "source": source},
        "opset": {"": 21},
        "components": [component("only")],
        "modalities": {
            "text": {"inputs": ["input_ids"], "tokenizer": "processor/tokenizer.json", "vocabulary": 411},
            "image": {"inputs": ["pixel_values"], "rows_per_item": 16},
        },
        "binding": {
            "placeholders": {"image": {"token": "<image>", "token_id": 4}},
            "max_tokens": 64,
            "truncation": _TRUNCATION,
            "prompt": "USER: {image}\n{text} ASSISTANT:",
        },
        "lineage": {"parent": None, "steps": []},
        "schema_hash": "fnv1a64:0",
        "verification": {"checked": "none"},
    }
    return Manifest.model_validate(data | fields)
