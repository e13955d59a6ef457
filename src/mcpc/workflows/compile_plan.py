"""Validate a compile recipe whole: every path resolved, every name known, before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from mcpc.backends.trt.profiles import parse_profile
from mcpc.checkpoint import Checkpoint
from mcpc.checkpoint.adapters import Adapter
from mcpc.config.compile_recipe import FLOAT, CompileRecipe, Request
from mcpc.config.loader import load_yaml
from mcpc.config.target import load_target
from mcpc.config.template import Template
from mcpc.errors import BackendError, BadInputError, McpcError, Problem, UsageError
from mcpc.storage.directories import check_output
from mcpc.templates.match import load_templates, select
from mcpc.templates.outside import load_template, require_fit
from mcpc.workflows.quantize_steps import Options, load_recipe

ENGINES = "engines"
#: Parts of a request that each kind of model needs, and those that it takes besides.
_NEEDED = {
    "vision-language": {"prompt"},
    "dual-encoder": {"image", "texts"},
    "speech-seq2seq": {"audio"},
    "image-seq2seq": {"image"},
}
_OPTIONAL = {"vision-language": {"image"}}
T = TypeVar("T")


@dataclass(frozen=True)
class Chain:
    """A validated compile recipe: every path is resolved, every name is known."""

    recipe: CompileRecipe
    folder: Path
    checkpoint: Path
    output: Path

    def path(self, relative: str) -> Path:
        """Return a path of the recipe; paths are relative to its folder."""
        return self.folder / relative

    @property
    def template_file(self) -> Path | None:
        """Return the template of the recipe, None for the shipped one that fits."""
        name = self.recipe.convert.template
        return None if name is None else self.path(name)

    @property
    def adapters(self) -> list[tuple[Path, float]]:
        """Return the folders of the adapters, and their weights."""
        return [(self.path(item.path), item.weight) for item in self.recipe.convert.adapters]

    def quantize_recipe(self, name: str) -> str:
        """Return what `quantize` takes: the name of a shipped recipe, or a path."""
        return str(self.path(name)) if name.endswith((".yaml", ".yml")) else name

    @property
    def builds(self) -> list[tuple[str, str, str]]:
        """Return (package, target, folder of the engines) of every build."""
        engine = self.recipe.engine
        if engine is None:
            return []
        packages = engine.packages or self.recipe.packages[-1:]
        return [(package, target, f"{ENGINES}/{package}-{target}") for package in packages for target in engine.targets]


def validated(path: Path, output: Path | None, force: bool) -> Chain:
    """Check everything that can be known before the first stage, and report all of it at once."""
    recipe = load_yaml(path, CompileRecipe)
    folder = path.resolve().parent
    if output is None and recipe.output is None:
        raise UsageError("no output folder", where=str(path), hint="pass -o DIR, or write `output:` in the recipe")
    chain = Chain(recipe, folder, folder / recipe.checkpoint, output or folder / str(recipe.output))
    found: list[McpcError] = []
    _collect(found, lambda: check_output(chain.output, force))
    checkpoint = _collect(found, lambda: Checkpoint.open(chain.checkpoint))
    template = _collect(found, lambda: _template(chain, checkpoint)) if checkpoint else None
    for root, weight in chain.adapters:
        _collect(found, partial(Adapter.open, root, weight))
    for stage in recipe.quantize:
        options = Options(block=stage.block)
        _collect(found, partial(load_recipe, chain.quantize_recipe(stage.recipe), options))
    for target in recipe.engine.targets if recipe.engine else ():
        _collect(found, partial(load_target, target))
    for text in recipe.engine.profiles if recipe.engine else ():
        _collect(found, partial(parse_profile, text))
    for number, request in enumerate(recipe.run):
        found += _request_errors(chain, number, request, template)
    found += _missing_extras(recipe)
    if len(found) == 1:
        raise found[0]
    if found:
        problems = [Problem(item.message, item.where, item.expected, item.got) for item in found]
        hint = "; ".join(dict.fromkeys(item.hint for item in found if item.hint))
        raise type(found[0])(f"{len(found)} things are wrong", where=str(path), problems=problems, hint=hint)
    return chain


def _template(chain: Chain, checkpoint: Checkpoint) -> Template:
    """Return the template that convert will use."""
    if chain.template_file is None:
        return select(checkpoint, load_templates())
    return require_fit(load_template(chain.template_file), checkpoint)


def _collect(found: list[McpcError], work: Callable[[], T]) -> T | None:
    try:
        return work()
    except McpcError as error:
        found.append(error)
        return None


def _request_errors(chain: Chain, number: int, request: Request, template: Template | None) -> list[McpcError]:
    """Return what is wrong with a request: files that do not exist, parts that the kind of model does not take."""
    where = f"run.{number}"
    files = [chain.path(name) for name in (request.image, request.audio) if name]
    errors: list[McpcError] = [
        BadInputError("no such file", f"{where}: {file}") for file in files if not file.is_file()
    ]
    if template is None:
        return errors
    parts = {"image": request.image, "audio": request.audio, "prompt": request.prompt, "texts": request.texts or None}
    given = {name for name, value in parts.items() if value is not None}
    needed = _NEEDED.get(template.kind, set())
    accepted = needed | _OPTIONAL.get(template.kind, set())
    if not needed <= given <= accepted:
        message = f"the request does not suit a {template.kind} model"
        errors.append(BadInputError(message, where, ", ".join(sorted(accepted)), ", ".join(sorted(given))))
    return errors


def _missing_extras(recipe: CompileRecipe) -> list[McpcError]:
    needed = {"torch": "export", "transformers": "export"} | ({"tensorrt_rtx": "rtx"} if recipe.engine else {})
    return [
        BackendError(f"this recipe needs {module}", hint=f'pip install "mcpc[{extra}]"')
        for module, extra in needed.items()
        if find_spec(module) is None
    ]


def plan_of(chain: Chain) -> list[dict[str, Any]]:
    """Return the stages in order, as `--dry-run` shows them."""
    recipe = chain.recipe
    unset = set() if recipe.convert.adapters else {"adapters"}
    options = recipe.convert.model_dump(exclude=unset, exclude_none=True)
    first = {"stage": "convert", "from": str(chain.checkpoint), "to": FLOAT, **options}
    stages: list[dict[str, Any]] = [first]
    for item in recipe.quantize:
        options = item.model_dump(exclude={"name"}, exclude_none=True)
        stages.append({"stage": "quantize", "from": FLOAT, "to": item.package, **options})
    for package, target, folder in chain.builds:
        stages.append({"stage": "build-engine", "from": package, "to": folder, "target": target})
    for request in recipe.run:
        stages.append({"stage": "run", **request.model_dump(exclude_none=True, exclude_defaults=True)})
    return stages
