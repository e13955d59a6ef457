"""`<component>.engine.json`: what an engine is, for whom, from what, and how it was checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mcpc.backends.trt.build import Built
from mcpc.backends.trt.lowering import Lowered
from mcpc.backends.trt.profiles import Profile
from mcpc.config.target import Target
from mcpc.core.tensors import TensorSpec

SIDECAR_VERSION = "1.0"


@dataclass(frozen=True)
class EngineRecord:
    """One engine as JSON data.

    Attributes:
        component: Name of the component.
        source: Digest of the package or ONNX file, and the component's file in it.
        target: The chips it runs on.
        builder: Name and version of what built it, and the conditions under which its bytes are the same again.
        engine_sha256: SHA-256 of the engine file.
        engine_bytes: Size of the engine file.
        precision: Dtype of the activations.
        lowering: What the lowering did to the graph.
        inputs: Graph inputs with dtype and shape.
        outputs: Graph outputs with dtype and shape.
        profiles: Shapes of each optimization profile.
        memory: Planned bytes: weights, and activation and scratch per profile.
        warnings: What the builder warned of.
        checked: `lowered` or `none`.
        checks: Figures of the checks.
    """

    component: str
    source: dict[str, str]
    target: dict[str, Any]
    builder: dict[str, Any]
    engine_sha256: str
    engine_bytes: int
    precision: str
    lowering: dict[str, Any]
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    profiles: list[dict[str, Any]]
    memory: dict[str, Any]
    warnings: list[str]
    checked: str
    checks: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {"sidecar_version": SIDECAR_VERSION, **asdict(self)}


def target_facts(target: Target) -> dict[str, Any]:
    """Return the target as JSON data."""
    return {
        "name": target.name,
        "version": target.meta.version,
        "compute_capabilities": list(target.compute_capabilities),
    }


def builder_facts(built: Built) -> dict[str, Any]:
    """Return the builder as JSON data."""
    return {"name": "tensorrt-rtx", "version": built.tensorrt, "fixed_addresses": built.fixed_addresses}


def lowering_facts(lowered: Lowered) -> dict[str, Any]:
    """Return what the lowering did as JSON data."""
    return {
        "casts": lowered.casts,
        "float32_nodes": len(lowered.wide),
        "limited_constants": list(lowered.clamped),
        "kept_float32": list(lowered.kept),
        "padded_weights": list(lowered.padded),
    }


def tensor_facts(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    """Return inputs or outputs as JSON data."""
    return [{"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in specs]


def profile_facts(profiles: Sequence[Profile]) -> list[dict[str, Any]]:
    """Return optimization profiles as JSON data."""
    words = ("min", "opt", "max")
    return [
        {
            name: {word: list(shape) for word, shape in zip(words, shapes, strict=True)}
            for name, shapes in profile.items()
        }
        for profile in profiles
    ]


def memory_facts(built: Built) -> dict[str, Any]:
    """Return the planned memory as JSON data."""
    profiles = [{"activation_bytes": item["activation"], "scratch_bytes": item["scratch"]} for item in built.memory]
    return {"weights_bytes": built.weights_bytes, "profiles": profiles}
