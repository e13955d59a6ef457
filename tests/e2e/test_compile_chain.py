"""`mcpc compile` on a real checkpoint: packages, engines and answers from one recipe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mcpc.package import Package

pytestmark = pytest.mark.slow


def test_the_chain_of_fashion_clip(fashion_clip: Path, tmp_path: Path) -> None:
    output = tmp_path / "a folder" / "out"
    command = [sys.executable, "-m", "mcpc", "compile", str(fashion_clip / "compile.yaml"), "-o", str(output), "--json"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report == json.loads((output / "compile.json").read_text())
    assert report["checked"] == "lowered"
    assert [item["checked"] for item in report["packages"]] == ["executed", "executed"]
    sizes = [item["total_bytes"] for item in report["packages"]]
    assert sizes[1] < sizes[0] / 3
    for item in report["packages"]:
        assert Package.open(output / item["name"], check_bytes=True).digest == item["digest"]
    assert Package.open(output / "int4").manifest.lineage.parent == report["packages"][0]["digest"]
    (engines,) = report["engines"]
    assert {engine["component"] for engine in engines["engines"]} == {"vision_encoder", "text_encoder", "similarity"}
    answers = [{name: said["text"] for name, said in item["answers"].items()} for item in report["answers"]]
    assert answers == [
        {"float": "a photo of a sneaker", "int4": "a photo of a sneaker"},
        {"float": "a photo of a trouser", "int4": "a photo of a trouser"},
    ]
    assert list(output.parent.iterdir()) == [output]


def test_a_stage_that_fails_leaves_nothing(fashion_clip: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        '__meta__: {kind: compile-recipe, schema_version: "1.0", name: test}\n'
        f"checkpoint: {fashion_clip}\noutput: out\nconvert: {{verify: none}}\n"
        "engine: {targets: [rtx-sm89], profiles: ['nowhere.dim:batch=1,2,3']}\n"
    )
    command = [sys.executable, "-m", "mcpc", "compile", str(recipe)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "nowhere" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.yaml"]
