"""What quantizing a package and quantizing one ONNX file have in common: recipe, refusals, plan, rewrite, figures."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from mcpc.config.loader import load_yaml
from mcpc.config.recipe import LinearInt4Step, Recipe, Step
from mcpc.core.pipeline import Pipeline
from mcpc.core.progress import Progress
from mcpc.errors import BadInputError, Problem, UsageError
from mcpc.passes.quantize.linear import BLOCKS
from mcpc.passes.quantize.plan import Decision, make_plan, matches
from mcpc.passes.quantize.weights import quantized_places, survey
from mcpc.passes.registry import RECIPE_PASSES
from mcpc.resources import templates_dir

Made = Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class Options:
    """What the command line changes in a recipe.

    Attributes:
        block: Block of the INT4 step; None keeps the recipe's.
        keep_int8: Patterns of weights that the INT4 step leaves to the INT8 step.
        keep_wide: Patterns of weights that no step takes.
    """

    block: int | None = None
    keep_int8: tuple[str, ...] = ()
    keep_wide: tuple[str, ...] = ()


def load_recipe(name: str, options: Options) -> Recipe:
    """Return a shipped recipe by name, or that of a file, with the options of the command line in it.

    Raises:
        BadInputError: No such recipe, or its file is malformed.
        UsageError: An option has no step that it could change.
    """
    folder = templates_dir("recipes")
    shipped = sorted(path.stem for path in folder.glob("*.yaml"))
    if name in shipped:
        recipe = load_yaml(folder / f"{name}.yaml", Recipe)
    elif Path(name).suffix in (".yaml", ".yml"):
        recipe = load_yaml(Path(name), Recipe)
    else:
        near = difflib.get_close_matches(name, shipped, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "pass the name of a shipped recipe, or a .yaml file"
        raise BadInputError("no such recipe", where=name, expected=", ".join(shipped), got=name, hint=hint)
    has_int4 = any(isinstance(step, LinearInt4Step) for step in recipe.steps)
    if not has_int4 and (options.block is not None or options.keep_int8):
        raise UsageError("the recipe has no INT4 step", where=name, hint="leave --block and --keep-int8 out")
    if options.block is not None and options.block not in BLOCKS:
        blocks = ", ".join(str(block) for block in reversed(BLOCKS))
        raise UsageError("no such block size", where="--block", expected=blocks, got=str(options.block))
    return recipe.model_copy(update={"steps": tuple(_changed(step, options) for step in recipe.steps)})


def _changed(step: Step, options: Options) -> Step:
    exclude = (*step.options.exclude, *options.keep_wide)
    update: dict[str, Any] = {"exclude": exclude}
    if isinstance(step, LinearInt4Step):
        update["exclude"] = (*exclude, *options.keep_int8)
        if options.block is not None:
            update["block"] = options.block
    return step.model_copy(update={"options": step.options.model_copy(update=update)})


def refuse_quantized(models: Mapping[str, ir.Model], where: str) -> None:
    """Refuse graphs that hold quantized weights already.

    Raises:
        BadInputError: Lists the places.
    """
    problems = [
        Problem(reason, f"{component}: {place}" if component else place)
        for component, model in models.items()
        for place, reason in quantized_places(model)
    ]
    if problems:
        raise BadInputError(
            f"already quantized: {problems[0]}",
            where=where,
            expected="float weights",
            got=f"{len(problems)} quantized places",
            hint="quantize the float package that this one was made from",
            problems=problems,
        )


def plan_for(
    models: Mapping[str, ir.Model], recipe: Recipe, source_names: Mapping[tuple[str, str], str]
) -> tuple[Decision, ...]:
    """Return the plan of a recipe, with the order of its steps checked.

    Raises:
        BadInputError: The order of the steps is wrong, or a pattern of theirs matches no weight.
    """
    passes = [RECIPE_PASSES[step.pass_id](step.options) for step in recipe.steps]
    Pipeline(passes)
    weights = survey(models, source_names)
    plan = make_plan(weights, passes)
    _check_patterns(recipe, plan)
    return plan


def _check_patterns(recipe: Recipe, plan: Sequence[Decision]) -> None:
    patterns = dict.fromkeys(pattern for step in recipe.steps for pattern in step.options.exclude)
    problems = [
        Problem("matches no weight", pattern)
        for pattern in patterns
        if not any(matches(decision.weight, [pattern]) for decision in plan)
    ]
    if problems:
        raise BadInputError(
            f"a pattern of the recipe is of no use: {problems[0]}",
            problems=problems,
            hint="--dry-run lists the weights",
        )


def rewrite(
    models: Mapping[str, ir.Model], recipe: Recipe, plan: Sequence[Decision], progress: Progress
) -> dict[str, Made]:
    """Carry out the plan, in place; return {component: {new initializer: (weight, transform)}}."""
    pipelines = {
        component: Pipeline([RECIPE_PASSES[step.pass_id](step.options, plan, component) for step in recipe.steps])
        for component in models
    }
    made: dict[str, Made] = {}
    for number, (component, model) in enumerate(models.items()):
        progress.advance(number, len(models), component)
        results = pipelines[component].run(model)
        made[component] = {name: origin for result in results for name, origin in result.details["made"].items()}
    return made


def step_records(recipe: Recipe) -> tuple[dict[str, Any], ...]:
    """Return the steps as the lineage records them."""
    return tuple(
        {"pass": step.pass_id, "version": step.version, "options": step.options.model_dump(mode="json")}
        for step in recipe.steps
    )


def plan_figures(plan: Sequence[Decision]) -> dict[str, Any]:
    """Return the plan as JSON data: every weight, and totals by form."""
    totals: Counter[str] = Counter()
    for decision in plan:
        totals[str(decision.form) if decision.form else "wide"] += 1
    return {
        "weights": [decision.to_dict() for decision in plan],
        "weights_by_form": dict(sorted(totals.items())),
        "weight_bytes_before": sum(decision.bytes_before for decision in plan),
        "weight_bytes_after": sum(decision.bytes_after for decision in plan),
    }
