"""`mcpc inspect` on each kind of thing, and on things that are none of them."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import pytest
from rich.console import Console

from mcpc.cli.inspect import render
from mcpc.errors import BadInputError
from mcpc.package import Manifest, package_writer
from mcpc.workflows.inspect import inspect

GRAPH = """
<ir_version: 10, opset_import: ["": 21, "mcpc": 1], producer_name: "a test">
net (float[batch, 3] x, bool flag) => (float[batch, 2] y)
<float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[2] b = {1, 1}> {
    k = Constant <value = float[2, 2] {1, 0, 0, 1}> ()
    two = Constant <value_float = 2.0> ()
    h = MatMul (x, w)
    a = Add (h, b)
    c = MatMul (a, k)
    d = mcpc.Twice (c)
    y = If (flag) <
        then_branch = yes () => (float[batch, 2] p) { p = Mul (d, two) },
        else_branch = no () => (float[batch, 2] q) { q = Identity (d) }
    >
}
<domain: "mcpc", opset_import: ["": 21]> Twice (v) => (r) { r = Add (v, v) }
"""


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "net.onnx"
    onnx.save_model(onnx.parser.parse_model(GRAPH), str(path))
    return path


@pytest.fixture
def package(tmp_path: Path, graph: Path) -> Path:
    digest = "sha256:" + "0" * 64
    tensor = {"name": "x", "dtype": "float32", "shape": ["batch", 3]}
    manifest = Manifest.model_validate(
        {
            "kind": "onnx",
            "model": {
                "architecture": "Net",
                "model_type": "net",
                "template": "none@0.0.0",
                "source": {"identity": digest, "digest": digest, "files": ["a.safetensors"], "dtype": "float32"},
            },
            "opset": {"": 21, "mcpc": 1},
            "components": [
                {
                    "name": "net",
                    "role": "other",
                    "file": "net.onnx",
                    "functions": ["mcpc::Twice"],
                    "inputs": [tensor],
                    "outputs": [tensor | {"name": "y", "shape": ["batch", 2]}],
                    "precision": {"weights": {"float32": 8}, "bytes": 32},
                    "initializers": {"w": {"source_name": "net.w"}, "b": {"source_name": "net.b", "transform": "cast"}},
                }
            ],
            "lineage": {"parent": None, "steps": [{"command": "convert", "options": {"dtype": "keep"}}]},
            "schema_hash": "fnv1a64:0",
            "verification": {"checked": "executed"},
        }
    )
    root = tmp_path / "a package"
    with package_writer(root) as writer:
        writer.copy(graph, "net.onnx")
        writer.write_manifest(manifest)
        writer.write_json("verification.json", {"checked": "executed", "max_abs_bound": 1e-4})
    return root


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    root = tmp_path / "engines"
    root.mkdir()
    (root / "decoder.engine").write_bytes(b"plan" * 25)
    sidecar = {"target": "rtx-sm89", "profiles": [{"name": "prefill", "activation_bytes": 8_192_000}]}
    (root / "decoder.engine.json").write_text(json.dumps(sidecar))
    (root / "engines.json").write_text(json.dumps({"target": "rtx-sm89", "checked": "lowered"}))
    return root


def shown(path: Path) -> tuple[dict[str, Any], str]:
    """Return the data and the human view, which must both be complete and JSON-ready."""
    report = inspect(path)
    json.dumps(report.to_dict(), allow_nan=False)
    screen = io.StringIO()
    render(Console(file=screen, width=1000), report)
    return report.data, screen.getvalue()


def test_a_checkpoint(fashion_llava: Path) -> None:
    data, text = shown(fashion_llava)
    assert data["kind"] == "checkpoint"
    assert data["template"] == {"id": "llava@1.0.0"}
    assert data["total"] == {"tensors": 114, "elements": 4_277_760, "bytes": 8_555_520}
    assert [item["name"] for item in data["dtypes"]] == ["bfloat16"]
    for key in ("files", "dtypes", "modules"):
        assert sum(item["bytes"] for item in data[key]) == data["total"]["bytes"]
    layers = next(item for item in data["modules"] if item["name"] == "language_model.model.layers.{0..3}")
    assert layers["tensors"] == 36
    assert data["tokenizer"]["vocabulary"] == 411
    assert "8.56 MB" in text
    assert "llava@1.0.0" in text


def test_a_checkpoint_that_no_template_fits_says_why(fashion_clip: Path, tmp_path: Path) -> None:
    copy = tmp_path / "other"
    shutil.copytree(fashion_clip, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps(config | {"architectures": ["ClapModel"], "tie_word_embeddings": True})
    )
    data, text = shown(copy)
    assert data["template"]["id"] is None
    assert "ClapModel" in data["template"]["why"]
    assert data["ties"] == ["tie_word_embeddings"]
    assert "none: " in text


def test_an_onnx_file(graph: Path) -> None:
    data, text = shown(graph)
    assert data["kind"] == "onnx"
    assert data["opsets"] == {"ai.onnx": 21, "mcpc": 1}
    assert data["inputs"][0] == {"name": "x", "dtype": "float32", "shape": ["batch", 3]}
    assert data["initializers"] == {
        "tensors": 2, "elements": 8, "bytes": 32,
        "dtypes": {"float32": {"tensors": 2, "elements": 8, "bytes": 32}},
        "largest": [
            {"name": "w", "dtype": "float32", "shape": [3, 2], "bytes": 24},
            {"name": "b", "dtype": "float32", "shape": [2], "bytes": 8},
        ],
    }  # fmt: skip
    assert (data["constants"]["tensors"], data["constants"]["bytes"]) == (1, 16)
    assert data["ops"]["MatMul"] == 2
    assert data["ops"]["mcpc::Twice"] == 1
    assert data["ops"]["Mul"] == 1  # inside a branch
    assert data["subgraphs"] == 2
    assert data["functions"] == [{"name": "mcpc::Twice", "inputs": ["v"], "outputs": ["r"], "ops": {"Add": 1}}]
    assert "mcpc::Twice(v) -> r" in text


def test_a_package(package: Path) -> None:
    data, text = shown(package)
    assert data["kind"] == "package"
    assert data["digest"].startswith("sha256:")
    assert data["total_bytes"] == sum(data["files"].values())
    (component,) = data["components"]
    assert component["initializers"] == 2
    assert component["transforms"] == {"cast": 1, "none": 1}
    assert data["verification"] == {"checked": "executed", "max_abs_bound": 1e-4}
    for words in ("x  float32[batch, 3]", "8 float32", "convert  dtype=keep", "verification  executed", "mcpc::Twice"):
        assert words in text


def test_an_engine_folder_and_one_engine(engines: Path) -> None:
    data, text = shown(engines)
    assert data["kind"] == "engines"
    assert data["total_bytes"] == 100
    assert data["engines"][0]["target"] == "rtx-sm89"
    assert "activation  8.19 MB" in text
    one, _ = shown(engines / "decoder.engine")
    assert one["engines"] == data["engines"]


def test_incomplete_engine_folders_list_what_is_missing(engines: Path) -> None:
    (engines / "embed.engine").write_bytes(b"plan")
    (engines / "vision.engine.json").write_text("{}")
    with pytest.raises(BadInputError) as caught:
        inspect(engines)
    assert {problem.where for problem in caught.value.problems} == {"embed.engine", "vision.engine.json"}
    with pytest.raises(BadInputError, match=r"the sidecar of this engine is missing \(expected embed.engine.json"):
        inspect(engines / "embed.engine")


def test_a_damaged_package_is_refused(package: Path) -> None:
    with (package / "net.onnx").open("ab") as file:
        file.write(b"x")
    with pytest.raises(BadInputError, match="wrong size"):
        inspect(package)


def test_things_that_are_none_of_the_four_say_what_was_looked_for(tmp_path: Path, graph: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInputError, match=r"got an empty folder"):
        inspect(tmp_path / "empty")
    with pytest.raises(BadInputError, match="no such file or folder"):
        inspect(tmp_path / "absent")
    with pytest.raises(BadInputError) as caught:
        inspect(graph.parent)
    assert caught.value.hint == f"mcpc inspect {graph}"
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(BadInputError, match="cannot tell what this file is"):
        inspect(tmp_path / "notes.txt")
    (tmp_path / "text.onnx").write_text("hello")
    with pytest.raises(BadInputError, match="not an ONNX model"):
        inspect(tmp_path / "text.onnx")


def test_the_command_takes_a_path_with_spaces_and_brackets(package: Path, tmp_path: Path) -> None:
    path = tmp_path / "a [red] package"
    package.rename(path)
    command = [sys.executable, "-m", "mcpc", "inspect", str(path)]
    human = subprocess.run(command, capture_output=True, text=True)
    assert (human.returncode, human.stderr) == (0, "")
    assert human.stdout.startswith(f"{path}  package\n")
    machine = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert json.loads(machine.stdout)["kind"] == "package"
