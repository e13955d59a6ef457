"""YAML files are refused with every problem at once, each with its line."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict

from mcpc.config.loader import load_yaml, parse_yaml
from mcpc.config.recipe import Recipe
from mcpc.errors import BadInputError
from mcpc.resources import templates_dir


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Inner(Strict):
    count: int
    rate: float = 0.0


class Outer(Strict):
    kind: Literal["one", "two"]
    inner: Inner
    items: tuple[Inner, ...] = ()


def problems_of(text: str) -> list[str]:
    with pytest.raises(BadInputError) as caught:
        parse_yaml(text, Outer, "file.yaml")
    assert caught.value.where.startswith("file.yaml")
    return [str(problem) for problem in caught.value.problems] or [str(caught.value)]


def test_a_good_file() -> None:
    assert parse_yaml("kind: one\ninner: {count: 3, rate: 1e-4}\nitems:\n  - count: 1\n", Outer, "x") == Outer(
        kind="one", inner=Inner(count=3, rate=1e-4), items=(Inner(count=1),)
    )


def test_all_problems_at_once_with_their_lines() -> None:
    text = "kind: three\ninner:\n  rate: fast\n  colour: red\nitems:\n  - count: 1\n  - {count: 1.5}\nsize: 3\n"
    assert problems_of(text) == [
        "line 1, kind: Input should be 'one' or 'two' (expected -, got 'three')",
        "line 2, inner.count: required key is missing",
        (
            "line 3, inner.rate: Input should be a valid number, unable to parse string as a number "
            "(expected -, got 'fast')"
        ),
        "line 4, inner.colour: unknown key",
        (
            "line 7, items.1.count: Input should be a valid integer, got a number with a fractional part"
            " (expected -, got 1.5)"
        ),
        "line 8, size: unknown key",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "kind: one\ninner: {count: 1, count: 2}",
            "line 2, inner.count: duplicate key (expected -, got also on line 2)",
        ),
        ("kind: one\nkind: two\n", "line 2, kind: duplicate key (expected -, got also on line 1)"),
        ("", "file.yaml: the file is empty (expected `key: value` lines, got -)"),
        ("# only a comment\n", "file.yaml: the file is empty (expected `key: value` lines, got -)"),
        ("- one\n", "file.yaml: the file is no mapping (expected `key: value` lines, got -)"),
        ("kind: &k one\ninner: *k\n", "file.yaml, line 2: aliases are refused"),
        ("inner:\n  <<: {count: 1}\n", "line 2: a key must be plain text"),
        ("? [1, 2]\n: one\n", "line 1: a key must be plain text"),
    ],
)
def test_what_yaml_allows_and_we_do_not(text: str, expected: str) -> None:
    assert problems_of(text) == [expected]


@pytest.mark.parametrize(
    "text", ["kind: [", "kind: one\n---\nkind: two\n", "kind: !!python/object:os.system x", "{" * 3000, "kind: \x00"]
)
def test_malformed_yaml_is_one_line(text: str) -> None:
    with pytest.raises(BadInputError, match="malformed") as caught:
        parse_yaml(text, Outer, "file.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.mkdir(), "not a file"),
        (lambda path: path.write_bytes(b"kind: \xff\xfe"), "not a UTF-8 text file"),
        (lambda path: path.write_text("# " + "x" * (1 << 20)), "the file is too large"),
    ],
)
def test_files_that_cannot_be_read(make: object, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    make(path)  # type: ignore[operator]
    with pytest.raises(BadInputError, match=expected):
        load_yaml(path, Outer)


@pytest.mark.parametrize("path", sorted(templates_dir("recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes(path: Path) -> None:
    recipe = load_yaml(path, Recipe)
    assert recipe.meta.name == path.stem
    assert recipe.meta.summary


def test_a_recipe_with_an_unknown_pass_option_and_version() -> None:
    text = """__meta__: {kind: recipe, schema_version: "1.0", name: x, version: 1.0.0}
steps:
  - {pass: quantize.linear-int4, version: 1, options: {block: 48}}
  - {pass: quantize.linear-int8, version: 2}
  - {pass: quantize.linear-int2, version: 1}
  - {pass: quantize.linear-int8, version: 1, options: {size: 3}}
"""
    with pytest.raises(BadInputError) as caught:
        parse_yaml(text, Recipe, "x.yaml")
    lines = [str(problem) for problem in caught.value.problems]
    assert [line.split(":")[0] for line in lines] == [
        "line 3, steps.0.options.block", "line 4, steps.1.version", "line 5, steps.2", "line 6, steps.3.options.size",
    ]  # fmt: skip
