"""Damaged tensor files and indexes, made from real tiny checkpoints: each fault is named, with expected and got."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import tiny_checkpoints as tiny
from tiny_checkpoints import INDEX, SINGLE

from mcpc.checkpoint import Checkpoint
from mcpc.core.progress import Silent
from mcpc.errors import BadInputError, McpcError, UnsupportedError
from mcpc.workflows.convert import convert

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 987654321\n"
PROJECTION = "text_projection.weight"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.clip(tmp_path_factory.mktemp("single") / "clip")


@pytest.fixture(scope="module")
def sharded(single: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sharded") / "clip"
    shutil.copytree(single, root)
    tiny.shard(root)
    return root


def shard_of(root: Path, tensor: str) -> Path:
    return root / json.loads((root / INDEX).read_text())["weight_map"][tensor]


def other_shard(root: Path, tensor: str) -> Path:
    names = sorted(set(json.loads((root / INDEX).read_text())["weight_map"].values()))
    return next(root / name for name in names if root / name != shard_of(root, tensor))


def refusal(root: Path) -> McpcError:
    """Convert; return the error with every finding in its text."""
    with pytest.raises(McpcError) as caught:
        convert(root, root.parent / "package", verify="none", progress=Silent())
    assert list(root.parent.glob("*package*")) == []
    return caught.value


def text_of(error: McpcError) -> str:
    return " | ".join([str(error), *map(str, error.problems), error.hint])


def delete_two_shards(root: Path) -> list[str]:
    first, second = sorted(root.glob("*.safetensors"))[:2]
    first.unlink()
    second.unlink()
    return ["missing shards", first.name, second.name, "download the checkpoint again"]


def take_tensor_out(root: Path) -> list[str]:
    path = shard_of(root, PROJECTION)
    tiny.edit_arrays(path, lambda arrays: arrays.pop(PROJECTION))
    return [f"{PROJECTION}: the index names a tensor that its shard lacks", path.name, "in no shard"]


def move_to_another_shard(root: Path) -> list[str]:
    path, other = shard_of(root, PROJECTION), other_shard(root, PROJECTION)
    moved = tiny.arrays_of(path)[PROJECTION]
    tiny.edit_arrays(path, lambda arrays: arrays.pop(PROJECTION))
    tiny.edit_arrays(other, lambda arrays: arrays.update({PROJECTION: moved}))
    return ["the index names a tensor that its shard lacks", f"expected {path.name}, got {other.name}"]


def pointer_for_a_shard(root: Path) -> list[str]:
    path = shard_of(root, PROJECTION)
    path.write_text(POINTER)
    return ["this is a Git LFS pointer, not the file", path.name, "a file of 987654321 bytes", "git lfs pull"]


def pointers_for_all(root: Path) -> list[str]:
    names = sorted(path.name for path in root.glob("*.safetensors"))
    for name in names:
        (root / name).write_text(POINTER)
    return ["a file of 987654321 bytes", *names]


def cut_a_shard(root: Path) -> list[str]:
    path = shard_of(root, PROJECTION)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 100)
    return [f"{path.name}: truncated tensor file (expected {size} bytes, got {size - 100} bytes)"]


SHARDED: dict[str, Callable[[Path], list[str]]] = {
    "two-shards-deleted": delete_two_shards,
    "tensor-out-of-its-shard": take_tensor_out,
    "tensor-in-another-shard": move_to_another_shard,
    "lfs-pointer": pointer_for_a_shard,
    "lfs-pointers": pointers_for_all,
    "cut-by-100-bytes": cut_a_shard,
}


@pytest.mark.parametrize("name", SHARDED)
def test_damaged_shards(name: str, sharded: Path, tmp_path: Path) -> None:
    """Exit 3; the file or tensor, what was expected and what is there."""
    root = tmp_path / "clip"
    shutil.copytree(sharded, root)
    words = SHARDED[name](root)
    error = refusal(root)
    assert isinstance(error, BadInputError)
    for word in words:
        assert word in text_of(error)


def cut_the_header(root: Path) -> list[str]:
    with (root / SINGLE).open("r+b") as file:
        file.truncate(50)
    return ["truncated tensor file", "got 50 bytes"]


def page_instead_of_file(root: Path) -> list[str]:
    (root / SINGLE).write_text("<!DOCTYPE html><html>404: not found</html>")
    return ["not a safetensors file", "<!DOCTYP"]


def append(root: Path) -> list[str]:
    size = (root / SINGLE).stat().st_size
    with (root / SINGLE).open("ab") as file:
        file.write(bytes(24))
    return ["goes on after its last tensor", f"expected {size} bytes, got {size + 24} bytes"]


def overlap(root: Path) -> list[str]:
    def shift(header: dict[str, Any]) -> None:
        entry = header[PROJECTION]
        entry["data_offsets"] = [offset - 4 for offset in entry["data_offsets"]]

    tiny.edit_header(root / SINGLE, shift)
    return ["tensor bytes overlap", PROJECTION]


def shape_against_bytes(root: Path) -> list[str]:
    tiny.edit_header(root / SINGLE, lambda header: header[PROJECTION].update(shape=[24, 31]))
    return [f"{PROJECTION}: tensor bytes do not match its shape (expected 2976 bytes for float32[24, 31], got 3072)"]


def wrong_shape(root: Path) -> list[str]:
    tiny.edit_header(root / SINGLE, lambda header: header[PROJECTION].update(shape=[32, 24]))
    return [f"{PROJECTION}: wrong shape (expected [24, 32], got [32, 24])"]


def emptied(root: Path) -> list[str]:
    tiny.edit_arrays(root / SINGLE, lambda arrays: arrays.update({PROJECTION: np.zeros((0, 32), np.float32)}))
    return [f"{PROJECTION}: wrong shape (expected [24, 32], got [0, 32])"]


def unknown_empty_tensor(root: Path) -> list[str]:
    tiny.edit_arrays(root / SINGLE, lambda arrays: arrays.update(ghost=np.zeros((0,), np.float32)))
    return ["ghost: unexpected"]


def broken_link(root: Path) -> list[str]:
    (root / SINGLE).unlink()
    (root / SINGLE).symlink_to("../blobs/4d7a2146")
    return ["the link leads nowhere", SINGLE, "../blobs/4d7a2146"]


def pointer_for_the_tokenizer(root: Path) -> list[str]:
    (root / "tokenizer.json").write_text(POINTER)
    return ["tokenizer.json", "Git LFS pointer", "987654321 bytes"]


def not_finite(root: Path) -> list[str]:
    def damage(arrays: dict[str, Any]) -> None:
        arrays[PROJECTION][3, :5] = np.nan
        arrays["visual_projection.weight"][0, 0] = -np.inf

    tiny.edit_arrays(root / SINGLE, damage)
    return [f"{PROJECTION}: 5 non-finite values", "visual_projection.weight: 1 non-finite values"]


FILES: dict[str, Callable[[Path], list[str]]] = {
    "cut-in-the-header": cut_the_header,
    "a-web-page": page_instead_of_file,
    "longer-than-its-header": append,
    "overlapping-offsets": overlap,
    "bytes-against-shape": shape_against_bytes,
    "wrong-shape": wrong_shape,
    "zero-size-for-a-matrix": emptied,
    "zero-size-unknown": unknown_empty_tensor,
    "link-to-nowhere": broken_link,
    "lfs-pointer-for-the-tokenizer": pointer_for_the_tokenizer,
    "non-finite": not_finite,
}


@pytest.mark.parametrize("name", FILES)
def test_damaged_file(name: str, single: Path, tmp_path: Path) -> None:
    """Exit 3; the file or tensor, what was expected and what is there."""
    root = tmp_path / "clip"
    shutil.copytree(single, root)
    words = FILES[name](root)
    error = refusal(root)
    assert isinstance(error, BadInputError)
    for word in words:
        assert word in text_of(error)


def test_leftover_beside_the_shards(sharded: Path, single: Path, tmp_path: Path) -> None:
    """A zero-filled `model.safetensors` beside the shards: the index is followed, and a note says so."""
    root = tmp_path / "clip"
    shutil.copytree(sharded, root)
    zeros = {name: np.zeros_like(array) for name, array in tiny.arrays_of(single / SINGLE).items()}
    tiny.write_arrays(root / SINGLE, zeros)
    checkpoint = Checkpoint.open(root)
    assert checkpoint.notes == (f"ignored, because the index does not name it: {SINGLE}",)
    assert SINGLE not in checkpoint.files
    for name, array in tiny.arrays_of(single / SINGLE).items():
        np.testing.assert_array_equal(checkpoint.tensors[name].read(), array)
    report = convert(root, tmp_path / "package", verify="full", progress=Silent())
    assert report.checked == "executed"
    assert report.data["notes"] == list(checkpoint.notes)


def test_same_bytes_under_two_names(single: Path, tmp_path: Path) -> None:
    """Two entries with the very same range are a tie, not damage."""
    root = tmp_path / "clip"
    shutil.copytree(single, root)
    first, second = "text_model.final_layer_norm.bias", "text_model.final_layer_norm.weight"
    tiny.edit_arrays(root / SINGLE, lambda arrays: arrays.pop(second))
    tiny.edit_header(root / SINGLE, lambda header: header.update({second: header[first]}))
    tensors = Checkpoint.open(root).tensors
    np.testing.assert_array_equal(tensors[first].read(), tensors[second].read())


def test_zero_size_parameter(single: Path, tmp_path: Path) -> None:
    """A model that has zero-size parameters: MLPs of no width."""
    root = tmp_path / "clip"
    shutil.copytree(single, root)
    tiny.edit_json(root / "config.json", text_config__intermediate_size=0)

    def empty(arrays: dict[str, Any]) -> None:
        for layer in (0, 1):
            mlp = f"text_model.encoder.layers.{layer}.mlp"
            arrays[f"{mlp}.fc1.weight"] = np.zeros((0, 32), np.float32)
            arrays[f"{mlp}.fc1.bias"] = np.zeros((0,), np.float32)
            arrays[f"{mlp}.fc2.weight"] = np.zeros((32, 0), np.float32)

    tiny.edit_arrays(root / SINGLE, empty)
    assert convert(root, tmp_path / "package", verify="full", progress=Silent()).checked == "executed"


def test_pickles_are_refused(single: Path, tmp_path: Path) -> None:
    """Exit 4, with the files and what to do."""
    root = tmp_path / "clip"
    shutil.copytree(single, root)
    (root / SINGLE).rename(root / "pytorch_model-00001-of-00001.bin")
    (root / "consolidated.00.pth").write_bytes(b"x")
    error = refusal(root)
    assert isinstance(error, UnsupportedError)
    assert "consolidated.00.pth, pytorch_model-00001-of-00001.bin" in text_of(error)
    assert "save_pretrained" in error.hint


def test_remote_code_is_refused(single: Path, tmp_path: Path) -> None:
    """Exit 4, with the list of the files that would run; none of them runs."""
    root = tmp_path / "clip"
    shutil.copytree(single, root)
    tiny.edit_json(root / "config.json", auto_map={"AutoModel": "modeling_mine.Mine"})
    for name in ("modeling_mine.py", "configuration_mine.py"):
        (root / name).write_text("raise SystemExit('this code ran')\n")
    error = refusal(root)
    assert isinstance(error, UnsupportedError)
    assert "configuration_mine.py, modeling_mine.py" in text_of(error)
    assert "remove auto_map" in error.hint
