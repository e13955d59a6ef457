"""A template that is drafted: its content, and a comment on everything that a person should look at."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

Place = tuple[str, ...]
_WIDTH = 120
#: Mappings that are written over several lines whatever they hold.
_BLOCKS = frozenset({"match", "dimensions", "components", "inputs", "outputs", "placeholders", "modalities", "image",
                     "audio", "video", "binding", "weights"})  # fmt: skip
_PLAIN = re.compile(r"^[A-Za-z0-9_][\w./*|+ ()-]*$")


@dataclass(frozen=True)
class Note:
    """A comment: a guess to `check`, or something to `finish`."""

    kind: Literal["check", "finish"]
    text: str


@dataclass
class Draft:
    """A template as plain data, with notes.

    Attributes:
        title: First line of the file.
        content: The template, in the order of its keys.
        notes: Place in the content, such as ("dimensions", "hidden") -> what to look at.
    """

    title: str
    content: dict[str, Any]
    notes: dict[Place, list[Note]] = field(default_factory=dict)

    def check(self, place: Sequence[str], text: str) -> None:
        """Note a guess."""
        self.notes.setdefault(tuple(place), []).append(Note("check", text))

    def finish(self, place: Sequence[str], text: str) -> None:
        """Note what is missing."""
        self.notes.setdefault(tuple(place), []).append(Note("finish", text))

    def count(self, kind: str) -> int:
        """Return how many notes of a kind there are."""
        return sum(note.kind == kind for notes in self.notes.values() for note in notes)

    def render(self) -> str:
        """Return the file in the shape of `templates/models/*.yaml`."""
        return "\n".join([f"# {self.title}", *self._mapping(self.content, (), 0)]) + "\n"

    def _mapping(self, value: Mapping[str, Any], place: Place, depth: int) -> Iterator[str]:
        for key, item in value.items():
            yield from self._entry(key, item, (*place, key), depth)

    def _entry(self, key: str, item: Any, place: Place, depth: int) -> Iterator[str]:
        indent = "  " * depth
        yield from self._comments(place, indent)
        if isinstance(item, Mapping) and item and (key in _BLOCKS or _deep(item)) and not _short_text(key, item):
            yield f"{indent}{_scalar(key)}:"
            yield from self._mapping(item, place, depth + 1)
        elif isinstance(item, (list, tuple)) and any(isinstance(part, (list, tuple, Mapping)) for part in item):
            yield f"{indent}{_scalar(key)}:"
            for number, part in enumerate(item):
                yield from self._comments((*place, str(number)), indent + "  ")
                yield f"{indent}  - {_flow(part)}"
        else:
            yield f"{indent}{_scalar(key)}: {_flow(item)}"

    def _comments(self, place: Place, indent: str) -> Iterator[str]:
        for note in self.notes.get(place, ()):
            yield from _wrapped(f"{note.kind}: {note.text}", indent)


def _deep(value: Mapping[str, Any]) -> bool:
    """Return True for a mapping of mappings."""
    return any(isinstance(item, Mapping) for item in value.values())


def _short_text(key: str, item: Mapping[str, Any]) -> bool:
    """Return True for a modality that only names its inputs, which fits a line."""
    return key in ("text", "image", "audio") and set(item) in ({"inputs"}, {"token_id"})


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    """Return a scalar, quoted only where YAML would read something else."""
    if isinstance(value, bool) or not isinstance(value, str):
        return json.dumps(value)
    plain = _PLAIN.match(value) and yaml.safe_load(value) == value
    return value if plain else json.dumps(value, ensure_ascii=False)


def _wrapped(text: str, indent: str) -> Iterator[str]:
    """Yield comment lines of at most 120 columns; those after the first are indented."""
    line = f"{indent}#"
    for word in text.split():
        if len(line) + 1 + len(word) > _WIDTH:
            yield line
            line = f"{indent}#  "
        line += f" {word}"
    yield line
