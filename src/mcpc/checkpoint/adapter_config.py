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
        saved: Ends of the paths of modules that were trained whole.
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rank_stabilized: bool
    dora: bool
    saved: tuple[str, ...] = ()

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
        if name not in _WITHOUT_EFFECT | _WITH_EFFECT and not _is_off(name, value)
    ]
    if not isinstance(beginning, (bool, str, type(None))) or beginning not in _PLAIN_BEGINNINGS:
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
    except (ValueError, OverflowError) as error:
        raise BadInputError("malformed adapter config", where=str(path), got=str(error)) from None


def _parse(fields: Mapping[str, Any]) -> AdapterConfig:
    flags = {name: _flag(fields, name) for name in ("use_rslora", "use_dora", "fan_in_fan_out")}
    ranks = {key: _rank(f"rank_pattern.{key}", rank) for key, rank in _patterns(fields, "rank_pattern").items()}
    alphas = {key: _alpha(f"alpha_pattern.{key}", alpha) for key, alpha in _patterns(fields, "alpha_pattern").items()}
    saved = fields.get("modules_to_save") or []
    if not isinstance(saved, list) or not all(isinstance(name, str) and name for name in saved):
        raise ValueError(f"modules_to_save is no list of names: {saved!r}")
    return AdapterConfig(
        _rank("r", fields.get("r")), _alpha("lora_alpha", fields.get("lora_alpha")), ranks, alphas,
        flags["use_rslora"], flags["use_dora"], tuple(saved),
    )  # fmt: skip


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} is neither true nor false: {value!r}")
    return bool(value)


def _rank(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is no whole number above 0: {value!r}")
    return value


def _alpha(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} is no number: {value!r}")
    return float(value)


def _patterns(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    patterns = fields.get(name)
    if patterns is None:
        return {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{name} is no object: {patterns!r}")
    for pattern in patterns:
        _expression(pattern)
    return patterns


def _is_off(name: str, value: Any) -> bool:
    """Return True for what peft writes where nothing was asked for."""
    if name == "loftq_config" and isinstance(value, dict):
        return not any(value.values())
    return value is None or value is False or (isinstance(value, (list, dict)) and not value)


def _expression(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} is no regular expression: {error}") from None


def _match(patterns: Mapping[str, float], module: str, default: float) -> float:
    return next((value for pattern, value in patterns.items() if _expression(pattern).match(module)), default)
