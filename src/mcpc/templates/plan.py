"""Resolve a template against a model's config: every size becomes a number, every dynamic dimension a name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcpc.config.template import Cache, Call, ComponentPlan, Template, TensorPlan
from mcpc.core.tensors import Dimension, TensorSpec
from mcpc.errors import BadInputError
from mcpc.templates.match import lookup

_TERM = re.compile(r"^(?:(?P<paths>config\.[\w.]+(?:\|config\.[\w.]+)*)(?:\|(?P<default>\d+))?|(?P<number>\d+))$")


@dataclass(frozen=True)
class CachePlan:
    """The decoder's cache: of each layer its parts, key and value or a state; dynamic dimensions stay names."""

    layers: int
    layout: tuple[str, ...]
    parts: tuple[Mapping[str, tuple[Dimension, ...]], ...]
    cross_shape: tuple[Dimension, ...] | None


@dataclass(frozen=True)
class PlannedComponent:
    """One component with all its graph inputs and outputs, caches included, in graph order."""

    name: str
    role: str
    modality: str | None
    call: Call
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    cache: CachePlan | None
    contract: str | None


@dataclass(frozen=True)
class ExportPlan:
    """What to export: components with concrete sizes, and the family's data."""

    template: Template
    sizes: Mapping[str, int]
    components: tuple[PlannedComponent, ...]
    placeholder_ids: Mapping[str, int]


def make_plan(template: Template, config: Mapping[str, Any], float_dtype: str) -> ExportPlan:
    """Resolve a template.

    Args:
        template: The family.
        config: The full config of the model, defaults included.
        float_dtype: The dtype that `float` stands for.

    Raises:
        BadInputError: The config lacks a value, or a size is not a positive integer.
    """
    sizes = {name: evaluate(expression, config, name) for name, expression in template.dimensions.items()}
    resolver = _Resolver(sizes, frozenset(template.dynamic), float_dtype, config)
    components = tuple(resolver.component(name, plan) for name, plan in template.components.items())
    placeholders = {
        modality: evaluate(plan.token_id, config, f"placeholder of {modality}", allow_zero=True)
        for modality, plan in template.placeholders.items()
    }
    return ExportPlan(template, sizes, components, placeholders)


def evaluate(expression: str, config: Mapping[str, Any], what: str, allow_zero: bool = False) -> int:
    """Return the integer of `config.path`, `a / b`, `a * b` or `a + b`, from left to right.

    Of `config.a|config.b|3` it is the first that there is.

    Raises:
        BadInputError: A path is absent, or the result is not a positive integer (or zero, when allowed).
    """
    parts = re.split(r"\s*([*/+])\s*", expression)
    value = _term(parts[0], config, what)
    for operator, term in zip(parts[1::2], parts[2::2], strict=True):
        operand = _term(term, config, what)
        if operator == "/" and (operand == 0 or value % operand):
            raise BadInputError(
                f"the config does not divide: {expression}",
                where="config.json",
                expected="an integer",
                got=f"{value} / {operand}",
            )
        value = value * operand if operator == "*" else value + operand if operator == "+" else value // operand
    if value < (0 if allow_zero else 1):
        raise BadInputError(
            f"the config gives no usable {what}",
            where=f"config.json: {expression}",
            expected="a positive integer",
            got=str(value),
        )
    return value


def expression_problem(expression: str) -> str:
    """Return the part of an expression that `evaluate` cannot read, "" when it reads all of it."""
    terms = re.split(r"\s*[*/+]\s*", expression)
    return next((term or expression for term in terms if _TERM.match(term) is None), "")


def _term(text: str, config: Mapping[str, Any], what: str) -> int:
    found = _TERM.match(text)
    if found is None:
        raise BadInputError(f"cannot read the expression for {what}", where="template", got=text)
    if found["number"]:
        return int(found["number"])
    paths = [path.removeprefix("config.") for path in found["paths"].split("|")]
    value = next((value for path in paths if (value := lookup(config, path)) is not None), None)
    if value is None and found["default"]:
        return int(found["default"])
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadInputError(
            f"the config lacks {what}", where=f"config.json: {' or '.join(paths)}", expected="an integer",
            got=repr(value),
        )  # fmt: skip
    return value


@dataclass(frozen=True)
class _Resolver:
    sizes: Mapping[str, int]
    dynamic: frozenset[str]
    float_dtype: str
    config: Mapping[str, Any]

    def dimension(self, dim: str | int) -> Dimension:
        if isinstance(dim, int):
            return dim
        if dim in self.sizes:
            return self.sizes[dim]
        if all(part in self.dynamic for part in dim.split("+")):
            return dim
        raise BadInputError(
            "the template names an unknown dimension",
            where="template",
            got=dim,
            expected=", ".join([*self.sizes, *self.dynamic]),
        )

    def spec(self, name: str, plan: TensorPlan) -> TensorSpec:
        dtype = self.float_dtype if plan.dtype == "float" else plan.dtype
        return TensorSpec(name, dtype, tuple(self.dimension(dim) for dim in plan.shape))

    def cache(self, cache: Cache) -> CachePlan:
        layers = self.sizes[cache.layers]
        keys_and_values = {"key": self.shape(cache.layout), "value": self.shape(cache.value or cache.layout)}
        states: dict[str, Mapping[str, tuple[Dimension, ...]]] = {
            kind: {part: self.shape(layout) for part, layout in parts.items()} for kind, parts in cache.states.items()
        }
        types = [""] * layers if cache.types is None else lookup(self.config, cache.types.removeprefix("config."))
        if not isinstance(types, (list, tuple)) or len(types) != layers:
            raise BadInputError(
                "the config does not give a type for each layer", where=f"config.json: {cache.types}",
                expected=f"{layers} types", got=repr(types),
            )  # fmt: skip
        parts = tuple(states.get(kind, keys_and_values) for kind in types)
        return CachePlan(layers, cache.layout, parts, None if cache.cross is None else self.shape(cache.cross))

    def shape(self, layout: Sequence[str | int]) -> tuple[Dimension, ...]:
        return tuple(self.dimension(dim) for dim in layout)

    def cache_specs(self, prefix: str, parts: Sequence[Mapping[str, tuple[Dimension, ...]]]) -> list[TensorSpec]:
        return [
            TensorSpec(f"{prefix}.{layer}.{part}", self.float_dtype, shape)
            for layer, shapes in enumerate(parts)
            for part, shape in shapes.items()
        ]

    def component(self, name: str, plan: ComponentPlan) -> PlannedComponent:
        inputs = [self.spec(key, value) for key, value in plan.inputs.items()]
        outputs = [self.spec(key, value) for key, value in plan.outputs.items()]
        cache = None if plan.cache is None else self.cache(plan.cache)
        cross = [] if cache is None else [dict.fromkeys(("key", "value"), cache.cross_shape or ())] * cache.layers
        if cache is not None and plan.cross_outputs:
            outputs += self.cache_specs("cross", cross)
        elif cache is not None:
            present = [{part: _grown(shape) for part, shape in shapes.items()} for shapes in cache.parts]
            inputs += self.cache_specs("past", cache.parts)
            if cache.cross_shape is not None:
                inputs += self.cache_specs("cross", cross)
            outputs += self.cache_specs("present", present)
        return PlannedComponent(
            name, plan.role, plan.modality, plan.call, tuple(inputs), tuple(outputs), cache, plan.contract
        )


def _grown(shape: tuple[Dimension, ...]) -> tuple[Dimension, ...]:
    return tuple("past+sequence" if dim == "past" else dim for dim in shape)
