"""Read a YAML file into a pydantic object. Every problem of the file is reported, each with its line.

Stricter than YAML 1.1: duplicate keys, aliases and several documents are refused, and `1e-4` is a number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from mcpc.errors import BadInputError, Problem

ModelT = TypeVar("ModelT", bound=BaseModel)
Key = tuple[str | int, ...]

_MAX_FILE_BYTES = 1 << 20
_MAX_DEPTH = 64


class _Loader(yaml.SafeLoader):
    """SafeLoader whose floats need no dot, as in YAML 1.2 and JSON."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def load_yaml(path: Path, kind: type[ModelT]) -> ModelT:
    """Return the validated object of a YAML file.

    Raises:
        BadInputError: The file is missing, not YAML, or does not fit `kind`; lists every problem with its line.
    """
    return parse_yaml(read_text(path), kind, str(path))


def read_text(path: Path) -> str:
    """Return the text of a small UTF-8 file.

    Raises:
        BadInputError: It is missing, a folder, too large, or not UTF-8.
    """
    if not path.exists():
        raise BadInputError("no such file", where=str(path))
    if not path.is_file():
        raise BadInputError("not a file", where=str(path))
    size = path.stat().st_size
    if size > _MAX_FILE_BYTES:
        raise BadInputError(
            "the file is too large", where=str(path), expected=f"at most {_MAX_FILE_BYTES} bytes", got=str(size)
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInputError("not a UTF-8 text file", where=str(path), got=str(error)) from None


def parse_yaml(text: str, kind: type[ModelT], where: str) -> ModelT:
    """Return the validated object of a YAML text; `where` names it in errors.

    Raises:
        BadInputError: As `load_yaml`.
    """
    root = _compose(text, where)
    lines: dict[Key, int] = {}
    problems = list(_walk(root, (), lines))
    if problems:
        raise _refusal(where, problems)
    loader = _Loader("")
    try:
        value = loader.construct_document(root)
    except (yaml.YAMLError, ValueError) as error:
        raise BadInputError("malformed YAML", where=where, got=_one_line(error)) from None
    finally:
        loader.dispose()
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        items = error.errors()
        inside = {item["loc"][:-depth] for item in items for depth in range(1, len(item["loc"]))}
        # A list whose items are refused counts as too short as well: that is no second problem.
        items = [item for item in items if not (item["type"] == "too_short" and item["loc"] in inside)]
        problems = [_problem(item["loc"], item["msg"], item["input"], item["type"], lines) for item in items]
        raise _refusal(where, problems) from None


def _compose(text: str, where: str) -> yaml.Node:
    loader = None
    try:
        _check_events(text, where)
        loader = _Loader(text)
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        raise BadInputError("malformed YAML", where=where, got=_one_line(error)) from None
    finally:
        if loader is not None:
            loader.dispose()
    if not isinstance(root, yaml.MappingNode):
        message = "the file is empty" if root is None else "the file is no mapping"
        raise BadInputError(message, where=where, expected="`key: value` lines")
    return root


def _check_events(text: str, where: str) -> None:
    """Refuse aliases and deep nesting before anything is built from the text."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.AliasEvent):
            raise BadInputError("aliases are refused", where=f"{where}, line {line}", hint="write the value out")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise BadInputError(
                "malformed YAML: nested too deeply",
                where=f"{where}, line {line}",
                expected=f"at most {_MAX_DEPTH} levels",
            )


def _walk(node: yaml.Node, place: Key, lines: dict[Key, int]) -> list[Problem]:
    """Note the line of every key and item in `lines`; return what YAML allows and this reader does not."""
    lines[place] = node.start_mark.line + 1
    problems: list[Problem] = []
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            problems += _walk(item, (*place, index), lines)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
                problems.append(Problem("a key must be plain text", f"line {line}"))
                continue
            inner = (*place, str(key.value))
            if inner in lines:
                problems.append(
                    Problem("duplicate key", f"line {line}, {_dotted(inner)}", got=f"also on line {lines[inner]}")
                )
                continue
            problems += _walk(value, inner, lines)
            lines[inner] = line
    return problems


def _problem(place: Sequence[str | int], message: str, given: object, code: str, lines: dict[Key, int]) -> Problem:
    if code == "missing":
        return Problem("required key is missing", _spell((*place,), lines))
    if code == "extra_forbidden":
        return Problem("unknown key", _spell((*place,), lines))
    return Problem(message, _spell((*place,), lines), got=_one_line(repr(given)))


def _spell(place: Key, lines: dict[Key, int]) -> str:
    """Return `line 12, steps.0.block`; parts that pydantic adds for unions are left out."""
    known: Key = ()
    for part in place:
        if (*known, part) in lines:
            known = (*known, part)
    missing = place[-1:] if place and (not known or known[-1] != place[-1]) else ()
    return f"line {lines.get(known, 1)}, {_dotted((*known, *missing))}" if place else "line 1"


def _dotted(place: Key) -> str:
    return ".".join(str(part) for part in place)


def _one_line(error: object) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."


def _refusal(where: str, problems: list[Problem]) -> BadInputError:
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return BadInputError(f"malformed file: {problems[0]}{more}", where=where, problems=problems)
