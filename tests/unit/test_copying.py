"""Copying a tensor file in one read: the same bytes, their digest, and every value of every tensor seen."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mcpc.checkpoint.finite import FiniteCheck, count_non_finite
from mcpc.core.runner import Array
from mcpc.errors import BadInputError
from mcpc.storage import copying, safetensors
from mcpc.storage.copying import copy_tensor_file
from mcpc.storage.safetensors import Entry, Plan, read_header, write_stream

_TENSORS = {
    "odd": np.arange(7, dtype=np.uint8),  # what follows is not aligned to its elements
    "half": np.linspace(-1, 1, 5001).astype(np.float16),
    "empty": np.zeros((0, 4), np.float32),
    "wide": np.arange(300, dtype=np.float32).reshape(20, 15),
    "brain": np.linspace(-3, 3, 77).astype(ml_dtypes.bfloat16),
}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose tensors take several pieces each."""
    for module in (copying, safetensors):
        monkeypatch.setattr(module, "PIECE_BYTES", 64)
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        plans = [Plan(name, array.dtype.name, array.shape) for name, array in _TENSORS.items()]
        write_stream(file, plans, list(_TENSORS.values()))
    return path


def test_the_copy_is_exact_and_every_value_is_seen(source: Path, tmp_path: Path) -> None:
    seen: dict[str, list[Array]] = defaultdict(list)
    entries = list(read_header(source).values())
    target = tmp_path / "copy.safetensors"
    digest = copy_tensor_file(source, target, entries, lambda entry, piece: seen[entry.name].append(piece.copy()))
    assert target.read_bytes() == source.read_bytes()
    assert digest == hashlib.sha256(source.read_bytes()).hexdigest()
    assert len(seen["half"]) > 100
    for name, array in _TENSORS.items():
        if array.size:
            assert np.array_equal(np.concatenate(seen[name]), array.reshape(-1)), name
    assert "empty" not in seen


def test_tied_tensors_are_both_seen(source: Path, tmp_path: Path) -> None:
    entry = read_header(source)["wide"]
    names = []
    tied = [entry, Entry("tied", entry.dtype, entry.shape, entry.file, entry.offset, entry.length)]
    copy_tensor_file(source, tmp_path / "copy", tied, lambda entry, piece: names.append(entry.name))
    assert set(names) == {"wide", "tied"}


def test_what_a_watcher_raises_comes_through(source: Path, tmp_path: Path) -> None:
    def refuse(entry: Entry, piece: Array) -> None:
        raise ValueError(entry.name)

    with pytest.raises(ValueError, match="half"):
        copy_tensor_file(source, tmp_path / "copy", [read_header(source)["half"]], refuse)


def test_a_full_disk_is_an_os_error(source: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        copy_tensor_file(source, Path("/dev/full"), [], lambda entry, piece: None)


@pytest.mark.parametrize(
    "dtype",
    [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2],
)
def test_non_finite_values_are_counted(dtype: type) -> None:
    values = np.linspace(-8, 8, 3001, dtype=np.float32).astype(dtype)
    assert count_non_finite(values) == 0
    values[[0, 1500, 3000]] = np.nan
    infinite = 0 if dtype is ml_dtypes.float8_e4m3fn else 2  # that one has no infinity
    if infinite:
        values[[7, 8]] = [np.inf, -np.inf]
    assert count_non_finite(values) == 3 + infinite
    extremes = np.array([np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal, 0.0], np.float32)
    assert count_non_finite(extremes) == 0


def test_every_tensor_with_a_non_finite_value_is_named(tmp_path: Path) -> None:
    check = FiniteCheck()
    for name, value in (("b", np.nan), ("fine", 1.0), ("a", np.inf)):
        check.see(Entry(name, "float32", (2,), tmp_path, 0, 8), np.array([value, 0.0], np.float32))
    with pytest.raises(BadInputError) as caught:
        check.require_finite(tmp_path)
    assert [str(problem) for problem in caught.value.problems] == [
        "a: 1 non-finite values",
        "b: 1 non-finite values",
    ]
