"""Find the template of a checkpoint; a refusal carries its reasons."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcpc.checkpoint import Checkpoint
from mcpc.config.loader import load_yaml
from mcpc.config.refusals import Refusals
from mcpc.config.template import Template
from mcpc.errors import BadInputError, Problem, UnsupportedError
from mcpc.resources import templates_dir


@dataclass(frozen=True)
class MatchResult:
    """Whether a template fits, and every line that did not hold."""

    template: Template
    reasons: tuple[str, ...]

    @property
    def matches(self) -> bool:
        """Return True when no line failed."""
        return not self.reasons


def load_templates() -> tuple[Template, ...]:
    """Return the shipped model templates, by file name."""
    return tuple(load_yaml(path, Template) for path in sorted(templates_dir("models").glob("*.yaml")))


def load_refusals() -> Mapping[str, str]:
    """Return {model type: what it needs that mcpc does not do}, for types that transformers lists as multimodal."""
    return load_yaml(templates_dir() / "refusals.yaml", Refusals).reasons


def lookup(config: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or None when a part is absent.

    Of a list, a number is a place in it and `length` its length.
    """
    value: Any = config
    for part in path.split("."):
        if isinstance(value, (list, tuple)) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, (list, tuple)) and part == "length":
            value = len(value)
        elif isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            return None
    return value


def match(template: Template, checkpoint: Checkpoint) -> MatchResult:
    """Compare a checkpoint's config with the `match` lines of a template."""
    reasons = []
    if checkpoint.architecture not in template.match.architectures:
        reasons.append(f"architecture {checkpoint.architecture!r} is not {' or '.join(template.match.architectures)}")
    for path, allowed in template.match.config.items():
        value = lookup(checkpoint.config, path)
        if value not in allowed:
            reasons.append(f"config {path} is {value!r}, not {' or '.join(map(repr, allowed))}")
    return MatchResult(template, tuple(reasons))


def select(checkpoint: Checkpoint, templates: Sequence[Template]) -> Template:
    """Return the one template that fits.

    Raises:
        BadInputError: The config names no architecture.
        UnsupportedError: None fits; the reasons and the nearest family are given.
    """
    if not checkpoint.architecture:
        raise BadInputError(
            "config.json names no architecture", where=str(checkpoint.root), expected='"architectures": ["..."]'
        )
    results = [match(template, checkpoint) for template in templates]
    fitting = [result.template for result in results if result.matches]
    if fitting:
        return fitting[0]
    near = [result for result in results if checkpoint.architecture in result.template.match.architectures]
    names = {name: result.template for result in results for name in result.template.match.architectures}
    closest = difflib.get_close_matches(checkpoint.architecture, names, n=1, cutoff=0.0)
    nearest = near[0].template if near else names[closest[0]]
    why = load_refusals().get(str(checkpoint.config.get("model_type", "")))
    raise UnsupportedError(
        f"no template for architecture {checkpoint.architecture}{f': {why}' if why else ''}",
        where=str(checkpoint.root),
        problems=[Problem(reason, result.template.id) for result in (near or results) for reason in result.reasons],
        hint=f"the nearest supported family is {nearest.id} ({', '.join(nearest.match.architectures)}); "
        f"`mcpc templates list` shows all; mcpc templates derive {checkpoint.root} drafts one",
        details={"nearest": nearest.id},
    )  # fmt: skip
