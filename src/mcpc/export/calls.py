"""What a template calls must exist: a wrapper of mcpc, a method of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import transformers

from mcpc.errors import BadInputError, Problem
from mcpc.export.components import WRAPPERS
from mcpc.templates.plan import ExportPlan

_FEATURES = ("features", "masked-features")


def check_calls(model: transformers.PreTrainedModel, plan: ExportPlan) -> None:
    """Compare the calls of a plan's components with what there is.

    Raises:
        BadInputError: A wrapper or a method does not exist; lists every one, and what exists.
    """
    problems = list(_problems(model, plan))
    if problems:
        raise BadInputError(
            f"the template calls what does not exist: {problems[0]}", where=plan.template.id, problems=problems,
            hint="docs/adding_a_template.md lists the wrappers",
        )  # fmt: skip


def feature_methods(model: Any) -> tuple[str, ...]:
    """Return the `get_..._features` methods of a model, or of the base that it holds."""
    owners = [owner for owner in (model, getattr(model, "model", None)) if owner is not None]
    names = {name for owner in owners for name in dir(type(owner)) if name.startswith("get_")}
    return tuple(sorted(name for name in names if name.endswith("_features")))


def _problems(model: transformers.PreTrainedModel, plan: ExportPlan) -> Iterator[Problem]:
    for component in plan.components:
        call, where = component.call, f"components.{component.name}.call"
        if call.wrapper not in WRAPPERS:
            yield Problem("no such wrapper", f"{where}.wrapper", ", ".join(WRAPPERS), call.wrapper)
        elif call.wrapper in _FEATURES and call.method not in (methods := feature_methods(model)):
            expected = ", ".join(methods) or f"a method that {type(model).__name__} has"
            yield Problem("no such method", f"{where}.method", expected, str(call.method))
