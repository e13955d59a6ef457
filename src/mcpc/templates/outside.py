"""A template from a file of the user instead of those that ship with mcpc."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mcpc.checkpoint import Checkpoint
from mcpc.config.loader import parse_yaml, read_text
from mcpc.config.template import Cache, ComponentPlan, Template
from mcpc.errors import BadInputError, Problem, UnsupportedError
from mcpc.resources import templates_dir
from mcpc.storage.digests import sha256_of_file
from mcpc.templates.match import match
from mcpc.templates.plan import expression_problem

#: Its name in a package, which has to be understood without the user's folders.
TEMPLATE_FILE = "template.yaml"
#: Components that the chain of a kind asks for by name.
_COMPONENTS: Mapping[str, tuple[str, ...]] = {
    "vision-language": ("vision_encoder", "embed", "decoder"),
    "audio-language": ("audio_encoder", "embed", "decoder"),
    "dual-encoder": ("vision_encoder", "text_encoder", "similarity"),
    "speech-seq2seq": ("encoder", "decoder"),
    "image-seq2seq": ("encoder", "decoder"),
}
#: Dynamic dimensions that get a size of their own in a trace; more need `sizes`.
_MOST_DYNAMIC = 8


@dataclass(frozen=True)
class Outside:
    """A template file.

    Attributes:
        template: What it says.
        path: Where it lies.
        digest: `sha256:...` of its bytes: a name and a version do not tell two edits of a file apart.
    """

    template: Template
    path: Path
    digest: str


def load_template(path: Path) -> Outside:
    """Return the template of a file.

    Raises:
        BadInputError: It is missing, is no template, or names a dimension, component, edge or contract that there is
            not; lists every problem.
    """
    template = parse_yaml(read_text(path), Template, str(path))
    problems = list(template_problems(template))
    if problems:
        raise BadInputError(
            f"the template contradicts itself: {problems[0]}", where=str(path), problems=problems,
            hint="docs/adding_a_template.md says what each part is",
        )  # fmt: skip
    return Outside(template, path, f"sha256:{sha256_of_file(path)}")


def require_fit(outside: Outside, checkpoint: Checkpoint) -> Template:
    """Return the template when it fits a checkpoint.

    Raises:
        UnsupportedError: A `match` line does not hold; lists every one.
    """
    result = match(outside.template, checkpoint)
    if not result.matches:
        raise UnsupportedError(
            f"the template does not fit this checkpoint: {result.reasons[0]}", where=str(outside.path),
            problems=[Problem(reason, outside.template.id) for reason in result.reasons],
            hint=f"correct `match`, or draft one of its own: mcpc templates derive {checkpoint.root}",
        )  # fmt: skip
    return outside.template


def template_problems(template: Template) -> Iterator[Problem]:
    """Yield what a template names and does not say: parts that fit no other part."""
    yield from _missing_components(template)
    for name, expression in template.dimensions.items():
        if wrong := expression_problem(expression):
            yield Problem("cannot read the expression", f"dimensions.{name}", "config.a / config.b", wrong)
    if len(template.dynamic) > _MOST_DYNAMIC:
        yield Problem("too many dynamic dimensions", "dynamic", f"at most {_MOST_DYNAMIC}", str(len(template.dynamic)))
    known = {*template.dimensions, *template.dynamic}
    for name, component in template.components.items():
        yield from _unknown_dimensions(f"components.{name}", component, known)
        yield from _unknown_contract(f"components.{name}", component)
        if component.cache is not None and component.cache.layers not in template.dimensions:
            yield Problem("unknown dimension", f"components.{name}.cache.layers", ", ".join(template.dimensions),
                          component.cache.layers)  # fmt: skip
    yield from _broken_edges(template)
    for name, modality in template.modalities.items():
        for dim in modality.sizes:
            if dim not in template.dynamic:
                yield Problem("no dynamic dimension", f"modalities.{name}.sizes", ", ".join(template.dynamic), dim)


def _missing_components(template: Template) -> Iterator[Problem]:
    for name in _COMPONENTS[template.kind]:
        if name not in template.components:
            yield Problem(f"a {template.kind} model needs this component", f"components.{name}",
                          ", ".join(_COMPONENTS[template.kind]), ", ".join(template.components))  # fmt: skip


def _unknown_dimensions(where: str, component: ComponentPlan, known: set[str]) -> Iterator[Problem]:
    shapes = {
        **{f"inputs.{name}": plan.shape for name, plan in component.inputs.items()},
        **{f"outputs.{name}": plan.shape for name, plan in component.outputs.items()},
        **(_layouts(component.cache) if component.cache else {}),
    }
    for place, shape in shapes.items():
        for dim in shape:
            if isinstance(dim, str) and not set(dim.split("+")) <= known:
                yield Problem("unknown dimension", f"{where}.{place}", ", ".join(sorted(known)), dim)


def _layouts(cache: Cache) -> dict[str, tuple[str | int, ...]]:
    return {f"cache.{name}": value for name, value in cache if isinstance(value, tuple)}


def _unknown_contract(where: str, component: ComponentPlan) -> Iterator[Problem]:
    known = sorted(path.stem for path in templates_dir("contracts").glob("*.yaml"))
    if component.contract is not None and component.contract not in known:
        yield Problem("unknown contract", f"{where}.contract", ", ".join(known), component.contract)


def _broken_edges(template: Template) -> Iterator[Problem]:
    outputs = {f"{name}.{tensor}" for name, item in template.components.items() for tensor in item.outputs}
    inputs = {f"{name}.{tensor}" for name, item in template.components.items() for tensor in item.inputs}
    for number, (source, target) in enumerate(template.edges):
        for kind, given, known in (("output", source, outputs), ("input", target, inputs)):
            if given not in known:
                yield Problem(f"no such {kind}", f"edges.{number}", ", ".join(sorted(known)), given)
