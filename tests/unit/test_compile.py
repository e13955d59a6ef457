"""Compile recipes are validated whole before the first stage runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mcpc.config.compile_recipe import CompileRecipe
from mcpc.config.loader import parse_yaml
from mcpc.core.progress import Silent
from mcpc.errors import BadInputError, McpcError, UnsupportedError, UsageError
from mcpc.workflows.compile import compile_recipe

HEAD = '__meta__: {kind: compile-recipe, schema_version: "1.0", name: test}\n'


class Untouched(Silent):
    """Fails the test when a stage begins."""

    def stage(self, name: str, detail: str = "") -> None:
        pytest.fail(f"a stage began: {name} {detail}")


def refused(path: Path, output: Path | None) -> McpcError:
    """Return the error of a recipe that must not start."""
    with pytest.raises(McpcError) as caught:
        compile_recipe(path, output=output, progress=Untouched())
    return caught.value


@pytest.fixture
def recipe(tmp_path: Path, fashion_llava: Path) -> Path:
    path = tmp_path / "my recipe.yaml"
    path.write_text(
        HEAD + f"checkpoint: {fashion_llava}\noutput: out\n"
        "quantize: [{recipe: int4}, {recipe: int4, block: 64, name: b64}]\n"
        "engine: {targets: [rtx-sm89, rtx-sm86]}\nrun: [{prompt: 'What is this?'}]\n"
    )
    return path


def test_the_plan_lists_every_stage_in_order(recipe: Path) -> None:
    report = compile_recipe(recipe, dry_run=True, progress=Untouched())
    stages = [(stage["stage"], stage.get("from"), stage.get("to")) for stage in report.data["plan"]][1:]
    assert stages == [
        ("quantize", "float", "int4"),
        ("quantize", "float", "b64"),
        ("build-engine", "b64", "engines/b64-rtx-sm89"),
        ("build-engine", "b64", "engines/b64-rtx-sm86"),
        ("run", None, None),
    ]
    assert not (recipe.parent / "out").exists()


def test_everything_that_is_wrong_is_listed_at_once(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        HEAD + "checkpoint: nowhere\nquantize: [{recipe: int5}]\nengine: {targets: [rtx-sm999]}\n"
        "run: [{image: absent.png, prompt: x}]\n"
    )
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    error = refused(path, tmp_path / "out")
    text = "\n".join(str(problem) for problem in error.problems)
    for words in ("output folder exists", "nowhere: no such checkpoint folder", "int5: no such recipe",
                  "rtx-sm999: unknown target", f"run.0: {tmp_path}/absent.png: no such file"):  # fmt: skip
        assert words in text
    assert len(error.problems) == 5
    assert (tmp_path / "out" / "mine").read_text() == "keep"


def test_one_finding_keeps_its_own_kind_and_exit_code(recipe: Path, tmp_path: Path) -> None:
    text = recipe.read_text()
    recipe.write_text(text.replace("rtx-sm86", "jetson"))
    assert isinstance(refused(recipe, None), UnsupportedError)
    recipe.write_text(text.replace("output: out\n", ""))
    assert isinstance(refused(recipe, None), UsageError)
    recipe.write_text(text.replace("{prompt:", "{audio: a.wav, prompt:"))
    assert refused(recipe, None).problems[1].message == "the request does not suit a vision-language model"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("checkpoint: x\nquantise: []\n", "unknown key"),
        (
            "checkpoint: x\nquantize: [{recipe: int4}, {recipe: int4}]\n",
            "two packages have one name: float, int4, int4",
        ),
        ("checkpoint: x\nengine: {targets: []}\n", "at least 1 item"),
        ("checkpoint: x\nengine: {targets: [rtx], packages: [int8]}\n", "no package of this recipe: int8"),
        ("checkpoint: x\nrun: [{texts: [a]}]\n", "a request needs an image, an audio file or a prompt"),
        ("output: x\n", "required key is missing"),
        ("checkpoint: x\nconvert: {dtype: int8}\n", "line 3, convert.dtype"),
    ],
)
def test_malformed_recipes_say_what_is_wrong(body: str, words: str) -> None:
    with pytest.raises(BadInputError) as caught:
        parse_yaml(HEAD + body, CompileRecipe, "r.yaml")
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["fashion-llava", "fashion-clip"])
def test_the_example_recipes_are_valid(name: str, fashion_clip: Path, tmp_path: Path) -> None:
    path = fashion_clip.parent / name / "compile.yaml"
    command = [sys.executable, "-m", "mcpc", "compile", str(path), "-o", str(tmp_path / "o"), "--dry-run", "--json"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert [stage["stage"] for stage in json.loads(result.stdout)["plan"]][:3] == [
        "convert",
        "quantize",
        "build-engine",
    ]
