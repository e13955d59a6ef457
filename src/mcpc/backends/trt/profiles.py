"""Optimization profiles from one set of named dimensions, so that shapes that belong together cannot disagree.

TensorRT builds an engine in silence whose attention mask is not past + sequence; here such a profile is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mcpc.config.target import SizeRange
from mcpc.core.tensors import Dimension, TensorSpec, evaluate_dimension
from mcpc.errors import Problem, UnsupportedError, UsageError

Shape = tuple[int, ...]
#: Input name -> (smallest, typical, largest shape).
Profile = Mapping[str, tuple[Shape, Shape, Shape]]
Sizes = tuple[int, int, int]

_FORM = "component.input=1x3x32x32,1x3x32x32,4x3x32x32 or component.dim:NAME=min,opt,max"
_OPTION = re.compile(r"^(?:(?P<component>[^.=:]+)\.)?(?:dim:(?P<dim>[^=]+)|(?P<input>[^=]+))=(?P<ranges>.+)$")
_MISSING = "profile"
_WORDS = ("smallest", "typical", "largest")


@dataclass(frozen=True)
class ProfileOption:
    """One `--profile`: a range of sizes of a dimension or of an input, for one component or for all.

    Attributes:
        text: As it was given.
        component: The component it is for; "" for all.
        name: The dimension or input.
        is_dimension: Whether `name` is a dimension.
        ranges: One range per profile: (min, opt, max), each a shape; a dimension's shapes have one size.
    """

    text: str
    component: str
    name: str
    is_dimension: bool
    ranges: tuple[tuple[Shape, Shape, Shape], ...]


def parse_profile(text: str) -> ProfileOption:
    """Read one `--profile`; several profiles of one engine are separated by `/`.

    Raises:
        UsageError: It has another form, or sizes fall from min over opt to max.
    """
    match = _OPTION.match(text)
    if match is None:
        raise UsageError("malformed --profile", expected=_FORM, got=text)
    ranges = tuple(_range(part, text, dimension=match["dim"] is not None) for part in match["ranges"].split("/"))
    return ProfileOption(
        text, match["component"] or "", match["dim"] or match["input"], match["dim"] is not None, ranges
    )


def _range(part: str, text: str, dimension: bool) -> tuple[Shape, Shape, Shape]:
    try:
        shapes = [tuple(int(size) for size in shape.split("x")) for shape in part.split(",")]
    except ValueError:
        raise UsageError("malformed --profile", expected=_FORM, got=text) from None
    if len(shapes) != 3 or len({len(shape) for shape in shapes}) != 1 or (dimension and len(shapes[0]) != 1):
        raise UsageError("malformed --profile", expected=_FORM, got=text)
    smallest, typical, largest = shapes
    if any(not 0 <= low <= middle <= high for low, middle, high in zip(smallest, typical, largest, strict=True)):
        raise UsageError("sizes of a profile must not be negative or fall from min over opt to max", where=text)
    return smallest, typical, largest


def is_dynamic(inputs: Iterable[TensorSpec]) -> bool:
    """Tell whether any input has a named dimension."""
    return any(isinstance(dim, str) for spec in inputs for dim in spec.shape)


def make_profiles(
    component: str, inputs: Sequence[TensorSpec], options: Sequence[ProfileOption], defaults: Mapping[str, SizeRange]
) -> list[Profile]:
    """Return the profiles of one component; an empty list when no input is dynamic.

    Args:
        component: Its name.
        inputs: Its graph inputs.
        options: Every `--profile` that is for it or for all components.
        defaults: Sizes of named dimensions that no option sets.

    Raises:
        UnsupportedError: A dimension has no size; the hint names the options that would do.
        UsageError: The options contradict one another or the graph; all at once.
    """
    if not is_dynamic(inputs):
        return []
    count = max((len(option.ranges) for option in options), default=1)
    profiles, problems = [], []
    for number in range(count):
        solver = _Solver(component, inputs)
        for option in options:
            if len(option.ranges) in (1, count):
                solver.take(option, option.ranges[number if len(option.ranges) > 1 else 0])
            else:
                problems.append(
                    Problem(
                        "another number of profiles than the other options",
                        option.text,
                        str(count),
                        str(len(option.ranges)),
                    )
                )
        profiles.append(solver.solve(defaults))
        problems += solver.problems
    unique = list(dict.fromkeys(problems))
    if wrong := [problem for problem in unique if problem.code != _MISSING]:
        raise UsageError(f"the profile does not fit the graph: {wrong[0]}", where=component, problems=wrong)
    if unique:
        flags = " ".join(f"--profile '{component}.dim:{problem.got}=1,1,4'" for problem in unique)
        raise UnsupportedError(
            "dynamic inputs without a profile", where=component, problems=unique, hint=f"for instance {flags}"
        )
    return profiles


def names_of(dim: Dimension) -> list[str]:
    """Return the names in a dimension, such as past and sequence in `past+sequence`."""
    return [part for part in dim.split("+") if not part.isdigit()] if isinstance(dim, str) else []


class _Solver:
    """Finds the size of every named dimension of one profile."""

    def __init__(self, component: str, inputs: Sequence[TensorSpec]) -> None:
        self._component = component
        self._inputs = {spec.name: spec for spec in inputs}
        self._sizes: dict[str, tuple[Sizes, str]] = {}
        self._shapes: list[tuple[TensorSpec, tuple[Shape, Shape, Shape], str]] = []
        self.problems: list[Problem] = []

    def take(self, option: ProfileOption, shapes: tuple[Shape, Shape, Shape]) -> None:
        """Note what one option says."""
        if option.is_dimension:
            if not option.component and option.name not in self._names():
                return  # an option for all components; this one has no such dimension
            if option.name not in self._names():
                self.problems.append(Problem("no such dimension", option.text, ", ".join(self._names()), option.name))
            else:
                self._set(option.name, (shapes[0][0], shapes[1][0], shapes[2][0]), option.text)
            return
        spec = self._inputs.get(option.name)
        if spec is None:
            self.problems.append(Problem("no such input", option.text, ", ".join(self._inputs), option.name))
        elif len(spec.shape) != len(shapes[0]):
            self.problems.append(
                Problem("another number of dimensions", option.text, f"{len(spec.shape)}", f"{len(shapes[0])}")
            )
        else:
            self._shapes.append((spec, shapes, option.text))
            for axis, dim in enumerate(spec.shape):
                if isinstance(dim, str) and names_of(dim) == [dim]:
                    self._set(dim, (shapes[0][axis], shapes[1][axis], shapes[2][axis]), option.text)

    def _names(self) -> list[str]:
        return list(
            dict.fromkeys(name for spec in self._inputs.values() for dim in spec.shape for name in names_of(dim))
        )

    def _set(self, name: str, sizes: Sizes, text: str) -> None:
        known = self._sizes.setdefault(name, (sizes, text))
        if known[0] != sizes:
            self.problems.append(
                Problem(
                    f"the dimension {name} has two sizes", text, f"{_spell(known[0])} as in {known[1]}", _spell(sizes)
                )
            )

    def solve(self, defaults: Mapping[str, SizeRange]) -> Profile:
        """Return the shapes of all dynamic inputs; problems are noted."""
        self._solve_sums()
        for name in self._names():
            if name in self._sizes:
                continue
            if name in defaults:
                chosen = defaults[name]
                self._sizes[name] = ((chosen.min, chosen.opt, chosen.max), "the target's default")
            else:
                users = [
                    spec.name for spec in self._inputs.values() if any(name in names_of(dim) for dim in spec.shape)
                ]
                place = f"{self._component}: input {', '.join(users)}"
                self.problems.append(Problem("a dynamic dimension without sizes", place, "min,opt,max", name, _MISSING))
        if self.problems:
            return {}
        self._check_shapes()
        return {
            spec.name: (self._shape(spec, 0), self._shape(spec, 1), self._shape(spec, 2))
            for spec in self._inputs.values()
            if any(isinstance(dim, str) for dim in spec.shape)
        }

    def _solve_sums(self) -> None:
        """Find the one unknown part of a sum whose size is given, such as past from past+sequence."""
        for spec, shapes, text in self._shapes:
            for axis, dim in enumerate(spec.shape):
                unknown = [name for name in names_of(dim) if name not in self._sizes]
                if (
                    isinstance(dim, str)
                    and names_of(dim) != [dim]
                    and len(unknown) == 1
                    and dim.split("+").count(unknown[0]) == 1
                ):
                    rest = [evaluate_dimension(dim, {unknown[0]: 0, **self._at(index)}) for index in range(3)]
                    found = [shapes[index][axis] - rest[index] for index in range(3)]
                    self._set(unknown[0], (found[0], found[1], found[2]), text)

    def _at(self, index: int) -> dict[str, int]:
        return {name: sizes[index] for name, (sizes, _) in self._sizes.items()}

    def _shape(self, spec: TensorSpec, index: int) -> Shape:
        return spec.concrete(self._at(index))

    def _check_shapes(self) -> None:
        for name, (sizes, text) in self._sizes.items():
            if not 0 <= sizes[0] <= sizes[1] <= sizes[2]:
                self.problems.append(
                    Problem(f"the sizes of the dimension {name} are negative or fall", text, got=_spell(sizes))
                )
        for spec, shapes, text in self._shapes:
            for index, word in enumerate(_WORDS):
                expected = self._shape(spec, index)
                if shapes[index] != expected:
                    wanted = f"{'x'.join(map(str, expected))} from {list(spec.shape)}"
                    self.problems.append(
                        Problem(f"the {word} shape of {spec.name}", text, wanted, "x".join(map(str, shapes[index])))
                    )


def _spell(sizes: Sizes) -> str:
    return ",".join(map(str, sizes))
