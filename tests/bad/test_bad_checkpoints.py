"""Damaged and foreign checkpoints: one clear line, the right exit code, every finding listed, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mcpc.storage.safetensors import Plan, read_header, write_stream

#: The command line in a process that may not write a file of more than 100 kB.
SMALL_FILES = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from mcpc.cli.app import main
main()
"""
Damage = Callable[[Path], None]


def rewrite(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Read the weights, let `change` edit {name: array}, and write them again."""
    path = checkpoint / "model.safetensors"
    arrays: dict[str, Any] = {name: np.array(entry.read()) for name, entry in read_header(path).items()}
    change(arrays)
    dtypes = {np.dtype(ml_dtypes.bfloat16): "bfloat16"}
    plans = [Plan(name, dtypes.get(array.dtype, array.dtype.name), array.shape) for name, array in arrays.items()]
    with path.open("wb") as file:
        write_stream(file, plans, iter(arrays.values()))


def edit_config(checkpoint: Path, **values: Any) -> None:
    """Set keys of config.json; None removes one."""
    path = checkpoint / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def shard(checkpoint: Path) -> None:
    """Split the weights into two shards with an index."""
    arrays = {name: np.array(entry.read()) for name, entry in read_header(checkpoint / "model.safetensors").items()}
    names = sorted(arrays)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file_name = f"model-0000{number}-of-00002.safetensors"
        with (checkpoint / file_name).open("wb") as file:
            write_stream(
                file, [Plan(n, arrays[n].dtype.name, arrays[n].shape) for n in part], (arrays[n] for n in part)
            )
        weight_map |= dict.fromkeys(part, file_name)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (checkpoint / "model.safetensors").unlink()


def delete_shard(checkpoint: Path) -> None:
    shard(checkpoint)
    (checkpoint / "model-00002-of-00002.safetensors").unlink()


def index_names_absent_tensor(checkpoint: Path) -> None:
    shard(checkpoint)
    path = checkpoint / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["text_model.ghost.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))


def truncate(checkpoint: Path) -> None:
    with (checkpoint / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) - 100)


def lfs_pointer(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5173980\n"
    )


def misshapen(arrays: dict[str, Any]) -> None:
    arrays["text_projection.weight"] = arrays["text_projection.weight"][:, :-1].copy()


def missing_and_unexpected(arrays: dict[str, Any]) -> None:
    arrays["ghost.weight"] = arrays.pop("visual_projection.weight")
    del arrays["vision_model.post_layernorm.bias"]


def non_finite(arrays: dict[str, Any]) -> None:
    arrays["text_projection.weight"][3, 5] = np.nan
    arrays["visual_projection.weight"][0, 0] = np.inf


CASES: dict[str, tuple[Damage, int, list[str]]] = {
    "no-config": (lambda c: (c / "config.json").unlink(), 3, ["config.json is missing"]),
    "config-is-no-json": (lambda c: (c / "config.json").write_text("{"), 3, ["not valid JSON", "config.json"]),
    "unknown-architecture": (
        lambda c: edit_config(c, architectures=["CLIPModelPlus"]), 4,
        ["CLIPModelPlus", "nearest supported family is clip@"],
    ),
    "no-architecture": (lambda c: edit_config(c, architectures=None), 3, ["names no architecture"]),
    "remote-code": (lambda c: edit_config(c, auto_map={"AutoModel": "x.Y"}), 4, ["wants to run its own code"]),
    "no-weights": (lambda c: (c / "model.safetensors").unlink(), 3, ["no weights"]),
    "only-pickle": (
        lambda c: (c / "model.safetensors").rename(c / "pytorch_model.bin"), 4,
        ["only pickled weights", "pytorch_model.bin"],
    ),
    "missing-shard": (delete_shard, 3, ["missing shards: model-00002-of-00002.safetensors"]),
    "absent-tensor": (index_names_absent_tensor, 3, ["text_model.ghost.weight"]),
    "truncated": (truncate, 3, ["truncated tensor file", "5173980", "5173880"]),
    "empty-file": (lambda c: (c / "model.safetensors").write_bytes(b""), 3, ["truncated tensor file"]),
    "lfs-pointer": (lfs_pointer, 3, ["Git LFS pointer", "a file of 5173980 bytes", "git lfs pull"]),
    "misshapen": (
        lambda c: rewrite(c, misshapen), 3, ["1 wrong shape", "text_projection.weight", "[64, 128]", "[64, 127]"],
    ),
    "missing-and-unexpected": (
        lambda c: rewrite(c, missing_and_unexpected), 3,
        ["2 missing, 1 unexpected", "visual_projection.weight", "vision_model.post_layernorm.bias", "ghost.weight"],
    ),
    "non-finite": (
        lambda c: rewrite(c, non_finite), 3,
        ["non-finite weights", "text_projection.weight", "visual_projection.weight"],
    ),
    "no-preprocessor": (
        lambda c: (c / "preprocessor_config.json").unlink(), 3, ["preprocessor_config.json is missing"],
    ),
    "no-tokenizer": (lambda c: (c / "tokenizer.json").unlink(), 3, ["tokenizer.json"]),
}  # fmt: skip


def mcpc(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    return subprocess.run(
        [sys.executable, "-m", "mcpc", *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", CASES)
def test_refusal(name: str, fashion_clip: Path, tmp_path: Path) -> None:
    """The checkpoint is refused in words, and no output and no staging folder stays."""
    damage, code, words = CASES[name]
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(fashion_clip, checkpoint)
    damage(checkpoint)
    before = {path.name: path.stat().st_mtime_ns for path in checkpoint.iterdir()}
    result = mcpc("convert", checkpoint, "-o", tmp_path / "out" / "package", "--verify", "none")
    text = " ".join((result.stdout + result.stderr).split())
    assert result.returncode == code, text
    assert "Traceback" not in text
    assert text.startswith("error: "), text
    for word in words:
        assert word in text, text
    assert list((tmp_path / "out").glob("*")) == []  # a glob of a missing folder is empty too
    assert {path.name: path.stat().st_mtime_ns for path in checkpoint.iterdir()} == before


def test_refusal_as_json(fashion_clip: Path, tmp_path: Path) -> None:
    """The same fields in JSON, with every finding."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(fashion_clip, checkpoint)
    rewrite(checkpoint, missing_and_unexpected)
    result = mcpc("convert", checkpoint, "-o", tmp_path / "package", "--json")
    document = json.loads(result.stdout)
    assert (document["error"], document["exit_code"]) == ("BadInputError", 3)
    assert len(document["problems"]) == 3


def test_the_output_exists(fashion_clip: Path, tmp_path: Path) -> None:
    """An output with something in it is never touched."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "mine.txt").write_text("keep")
    result = mcpc("convert", fashion_clip, "-o", tmp_path / "package")
    assert result.returncode == 2
    assert "exists and is not empty" in result.stderr
    assert (tmp_path / "package" / "mine.txt").read_text() == "keep"


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(fashion_clip: Path, tmp_path: Path, sent: signal.Signals) -> None:
    """Interrupted while it writes: exit 130, one line, nothing half-written."""
    output = tmp_path / "out" / "package"
    process = subprocess.Popen(
        [sys.executable, "-m", "mcpc", "convert", str(fashion_clip), "-o", str(output)],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list((tmp_path / "out").glob(".package.*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(sent)
    _, text = process.communicate(timeout=120)
    assert process.returncode == 130, text
    assert "Traceback" not in text
    assert list((tmp_path / "out").iterdir()) == []


def test_no_room(fashion_clip: Path, tmp_path: Path) -> None:
    """A file size limit below the weights: exit 7 with the file, nothing left."""
    arguments = ["convert", fashion_clip, "-o", tmp_path / "out" / "package", "--verify", "none"]
    result = subprocess.run(
        [sys.executable, "-c", SMALL_FILES, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 7, result.stderr
    assert "Traceback" not in result.stderr
    assert list((tmp_path / "out").iterdir()) == []
