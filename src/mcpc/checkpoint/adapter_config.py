"""`adapter_config.json` of a LoRA adapter: which of its fields decide what a merged weight is.

Source: peft `LoraConfig`, and `get_pattern_key` for how ranks and alphas are looked up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcpc.checkpoint.index import read_json
from mcpc.errors import BadInputError, Problem, UnsupportedError

CONFIG = "adapter_config.json"

#: Fields that only choose modules or steer training: what they led to is in the adapter's own tensors.
_WITHOUT_EFFECT = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config", "exclude_modules",
        "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_bias", "lora_dropout",
        "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "revision",
        "runtime_config", "target_modules", "task_type",
    }
)  # fmt: skip
_WITH_EFFECT = frozenset(
    {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out"}
)
#: Ways to begin that leave the base weights alone. The others subtract from them, so that the adapter's tensors mean
#: nothing without the changed base.
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class AdapterConfig:
    """What decides a merged weight.

    Attributes:
        rank: Of modules that `rank_pattern` does not name.
        alpha: Of modules that `alpha_pattern` does not name.
        rank_pattern: Regular expression for the end of a module's path -> rank.
        alpha_pattern: The same -> alpha.
        rank_stabilized: Scale by alpha / sqrt(rank) instead of alpha / rank.
        dora: Weights are decomposed into magnitude and direction.
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilized: bool
    dora: bool

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's update."""
        return int(_match(self.rank_pattern, module, self.rank))

    def scaling_of(self, module: str) -> float:
        """Return the factor of a module's update."""
        rank = self.rank_of(module)
        alpha = float(_match(self.alpha_pattern, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def read_config(root: Path) -> AdapterConfig:
    """Return the config of an adapter's folder.

    Raises:
        BadInputError: The file is missing or malformed.
        UnsupportedError: It is not LoRA, or uses what mcpc does not merge; everything is listed.
    """
    path = root / CONFIG
    fields = read_json(path, f"an adapter's folder holds {CONFIG} and adapter_model.safetensors")
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError("the adapter is not LoRA", where=str(path), expected="LORA", got=str(kind))
    beginning = fields.get("init_lora_weights")
    problems = [
        Problem("a field that mcpc does not merge", name, got=str(value)[:80])
        for name, value in sorted(fields.items())
        if value and name not in _WITHOUT_EFFECT | _WITH_EFFECT and not _is_default(name, value)
    ]
    if beginning not in _PLAIN_BEGINNINGS:
        problems.append(
            Problem("changes the base weights, which the adapter belongs to", "init_lora_weights", got=str(beginning))
        )
    if problems:
        raise UnsupportedError(
            f"the adapter cannot be merged: {problems[0]}", where=str(path), problems=problems,
            hint="merge it with peft (merge_and_unload), save the model, and convert that",
        )  # fmt: skip
    try:
        return _parse(fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInputError("malformed adapter config", where=str(path), got=repr(error)) from None


def _parse(fields: Mapping[str, Any]) -> AdapterConfig:
    ranks = {str(name): int(rank) for name, rank in (fields.get("rank_pattern") or {}).items()}
    alphas = {str(name): float(alpha) for name, alpha in (fields.get("alpha_pattern") or {}).items()}
    rank, alpha = int(fields["r"]), float(fields["lora_alpha"])
    if min(rank, *ranks.values(), 1) < 1 or not all(math.isfinite(value) for value in (alpha, *alphas.values())):
        raise ValueError(f"r {rank}, lora_alpha {alpha}")
    for pattern in (*ranks, *alphas):
        _expression(pattern)
    return AdapterConfig(rank, alpha, ranks, alphas, bool(fields.get("use_rslora")), bool(fields.get("use_dora")))


def _is_default(name: str, value: Any) -> bool:
    """Return True for objects that peft writes although nothing was asked for."""
    return name == "loftq_config" and not any(value.values()) if isinstance(value, dict) else False


def _expression(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} is no regular expression: {error}") from None


def _match(patterns: Mapping[str, float], module: str, default: float) -> float:
    return next((value for pattern, value in patterns.items() if _expression(pattern).match(module)), default)
