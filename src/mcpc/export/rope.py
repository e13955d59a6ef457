"""Rotary embedding settings in all their spellings: known to transformers, and fixed while a graph runs.

transformers reads `rope_scaling` or `rope_parameters`, `type` or `rope_type`, and writes one form into the config. It
answers a type that a model does not have with a bare KeyError.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mcpc.errors import BadInputError, Problem, UnsupportedError

#: Types whose frequencies change with the length of the prompt; a graph holds one set.
_MOVING = frozenset({"dynamic", "longrope"})


def check_rope(config: transformers.PretrainedConfig, root: Path) -> None:
    """Refuse rotary embeddings that contradict themselves, or that the model or a graph does not compute.

    Raises:
        BadInputError: Lists every setting that transformers would read as something else than it says.
        UnsupportedError: Lists every type that is not computed.
    """
    parts = [config, *(part for name in config.sub_configs if (part := getattr(config, name, None)) is not None)]
    settings = [(part, value, place) for part in parts for value, place in _settings(part)]
    wrong = [problem for _, value, place in settings for problem in _contradictions(value, place)]
    if wrong:
        raise BadInputError(f"rotary embedding: {wrong[0]}", where=str(root / "config.json"), problems=wrong)
    problems = [problem for part, value, place in settings for problem in _not_computed(part, value, place)]
    if problems:
        raise UnsupportedError(
            f"rotary embedding: {problems[0]}", where=str(root / "config.json"), problems=problems,
            hint="rope_scaling is None, or has a rope_type (or type) that the architecture knows",
        )  # fmt: skip


def _settings(config: transformers.PretrainedConfig) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (settings, place) of every rotary embedding of a config; some models have one for each kind of layer."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    nested = {name: value for name, value in parameters.items() if isinstance(value, dict)}
    for name, value in (nested or {"": parameters}).items():
        yield value, f"{config.model_type}: rope_scaling{f'.{name}' if name else ''}"


def _contradictions(value: dict[str, Any], place: str) -> Iterator[Problem]:
    new, old = value.get("rope_type"), value.get("type")
    if old is not None and new != old and "mrope" not in (old, new):  # mrope became a default with sections
        yield Problem("type and rope_type differ", place, f"one type, such as {new}", f"type {old}, rope_type {new}")
    factor = value.get("factor")
    if new == "default" and factor not in (None, 1, 1.0):
        yield Problem("a factor without a type: transformers ignores it", place, "a rope_type", f"factor {factor}")


def _not_computed(config: transformers.PretrainedConfig, value: dict[str, Any], place: str) -> Iterator[Problem]:
    kind = str(value.get("rope_type", "default"))
    known = {"default", getattr(config, "default_rope_type", "default"), *ROPE_INIT_FUNCTIONS}
    if kind not in known:
        yield Problem("transformers does not compute this type for this model", place, ", ".join(sorted(known)), kind)
    elif kind in _MOVING:
        yield Problem(
            "the frequencies change with the length of the prompt", place, ", ".join(sorted(known - _MOVING)), kind
        )
