"""`mcpc templates|recipes|targets list|show`: the data files that ship with mcpc, validated as they are read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from mcpc.config.loader import load_yaml, read_text
from mcpc.config.recipe import Recipe
from mcpc.config.target import Target
from mcpc.config.template import Template
from mcpc.core.report import Report
from mcpc.errors import BadInputError
from mcpc.resources import templates_dir

Kind = Literal["templates", "recipes", "targets"]
Item = Template | Recipe | Target
ItemT = TypeVar("ItemT", bound=Item)


@dataclass(frozen=True)
class Family:
    """Where the files of a kind lie and what they are."""

    folder: str
    type: type[Template | Recipe | Target]


FAMILIES: Mapping[Kind, Family] = {
    "templates": Family("models", Template),
    "recipes": Family("recipes", Recipe),
    "targets": Family("targets", Target),
}


def list_files(kind: Kind) -> Report:
    """Return name, version and summary of every shipped file of a kind."""
    family = FAMILIES[kind]
    items = [_facts(load_yaml(path, family.type)) for path in _paths(family)]
    return Report(f"{kind} list", data={kind: items})


def show_file(kind: Kind, name: str) -> Report:
    """Return one shipped file: its text, and its validated content with every default filled in.

    Raises:
        BadInputError: There is no file of that name.
    """
    family = FAMILIES[kind]
    paths = {path.stem: path for path in _paths(family)}
    if name not in paths:
        near = difflib.get_close_matches(name, paths, n=1)
        hint = f"mcpc {kind} show {near[0]}" if near else f"mcpc {kind} list"
        raise BadInputError(f"no such {kind[:-1]}", expected=", ".join(paths), got=name, hint=hint)
    path = paths[name]
    item = load_yaml(path, family.type)
    content = item.model_dump(mode="json", by_alias=True)
    return Report(f"{kind} show", data={"name": name, "file": str(path), "text": read_text(path), "content": content})


def _paths(family: Family) -> list[Path]:
    return sorted(templates_dir(family.folder).glob("*.yaml"))


def _facts(item: Item) -> dict[str, Any]:
    if isinstance(item, Template):
        summary = ", ".join(item.match.architectures)
    elif isinstance(item, Recipe):
        summary = item.meta.summary or ", ".join(step.pass_id for step in item.steps)
    else:
        summary = f"{item.description} ({', '.join(item.compute_capabilities)})"
    return {"name": item.meta.name, "version": item.meta.version, "summary": summary}
