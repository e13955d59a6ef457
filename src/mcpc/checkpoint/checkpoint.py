"""Open a checkpoint folder: config, shards, and an index of lazy tensors. No tensor is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mcpc.core.tensors import FLOAT_DTYPES
from mcpc.errors import BadInputError, Problem, UnsupportedError
from mcpc.storage.digests import digest_of, digest_of_files, sha256_of_file
from mcpc.storage.safetensors import Entry, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "flax_model*.msgpack", "tf_model*.h5")
_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder.

    Attributes:
        root: The folder.
        config: `config.json`.
        files: Tensor files, relative to `root`, in the order of the index.
        tensors: Name -> where the tensor lies.
        notes: What a user should know, such as files that were ignored.
    """

    root: Path
    config: Mapping[str, Any]
    files: tuple[str, ...]
    tensors: Mapping[str, Entry]
    notes: tuple[str, ...] = ()

    @classmethod
    def open(cls, root: Path) -> Checkpoint:
        """Open a folder that holds `config.json` and safetensors files.

        Raises:
            BadInputError: Something is missing, truncated or inconsistent; every finding is listed.
            UnsupportedError: The weights are pickled, or the model needs remote code.
        """
        if not root.is_dir():
            raise BadInputError("no such checkpoint folder", where=str(root))
        config = read_json(root / "config.json", "a checkpoint folder holds config.json and *.safetensors files")
        _refuse_remote_code(root, config)
        files, listed, notes = _tensor_files(root)
        tensors = _read_tensors(root, files, listed)
        return cls(root, config, files, tensors, notes)

    @cached_property
    def identity(self) -> str:
        """Return the digest of config, headers and sizes: enough for planning, costs no tensor I/O."""
        entries = [
            [entry.name, entry.dtype, list(entry.shape), entry.file.name, entry.offset, entry.length]
            for entry in self.tensors.values()
        ]
        return digest_of({"config": dict(self.config), "entries": sorted(entries)})

    def digest(self, sha256: Mapping[str, str] | None = None) -> str:
        """Return the digest of the contents of config and tensor files.

        Args:
            sha256: Hex digests that are known already, by file name; the others are computed.
        """
        known = sha256 or {}
        names = ("config.json", *self.files)
        return digest_of_files({name: known.get(name) or sha256_of_file(self.root / name) for name in names})

    @property
    def architecture(self) -> str:
        """Return the first architecture of the config, or ""."""
        names = self.config.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else ""

    @property
    def dtype(self) -> str:
        """Return the float dtype of most weight elements."""
        counts: dict[str, int] = {}
        for entry in self.tensors.values():
            if entry.dtype in FLOAT_DTYPES:
                counts[entry.dtype] = counts.get(entry.dtype, 0) + entry.length
        return max(sorted(counts), key=lambda name: counts[name]) if counts else "float32"

    def optional_json(self, name: str) -> dict[str, Any] | None:
        """Return a JSON file of the folder, or None when it is not there."""
        path = self.root / name
        return read_json(path, "") if path.is_file() else None

    def check_finite(self, names: list[str]) -> None:
        """Read the named tensors, a piece at a time, and refuse non-finite values.

        Raises:
            BadInputError: Lists every tensor that holds NaN or infinity.
        """
        problems = []
        for name in names:
            entry = self.tensors[name]
            if entry.dtype in FLOAT_DTYPES and (bad := _count_non_finite(entry)):
                problems.append(Problem(f"{bad} non-finite values", name))
        if problems:
            raise BadInputError(
                f"non-finite weights: {problems[0]}", where=str(self.root), problems=problems,
                hint="the checkpoint is damaged or its training diverged: fetch it again",
            )  # fmt: skip


def _count_non_finite(entry: Entry) -> int:
    flat = entry.read().reshape(-1)
    return sum(
        int(np.count_nonzero(~np.isfinite(flat[start : start + _CHUNK_ELEMENTS])))
        for start in range(0, flat.size, _CHUNK_ELEMENTS)
    )


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """Return a JSON object from a file.

    Raises:
        BadInputError: The file is missing, or is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInputError(f"{path.name} is missing", where=str(path.parent), hint=hint) from None
    except (ValueError, RecursionError) as error:
        raise BadInputError("not valid JSON", where=str(path), got=str(error)) from None
    if not isinstance(value, dict):
        raise BadInputError("not a JSON object", where=str(path), got=type(value).__name__)
    return value


def _refuse_remote_code(root: Path, config: Mapping[str, Any]) -> None:
    if config.get("auto_map"):
        files = sorted(path.name for path in root.glob("*.py"))
        raise UnsupportedError(
            "the checkpoint wants to run its own code, which mcpc never does", where=str(root),
            got=f"auto_map in config.json, files: {', '.join(files) or 'none'}",
            hint="use a checkpoint whose architecture is part of transformers",
        )  # fmt: skip


def _tensor_files(root: Path) -> tuple[tuple[str, ...], dict[str, str] | None, tuple[str, ...]]:
    """Return the files, the index's {tensor: file} (None without an index), and notes."""
    index_path = root / INDEX
    present = sorted(path.name for path in root.glob("*.safetensors"))
    if index_path.is_file():
        listed = read_json(index_path, "").get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise BadInputError("the index has no weight_map", where=str(index_path))
        files = tuple(sorted({str(name) for name in listed.values()}))
        outside = [name for name in files if Path(name).name != name]
        if outside:
            raise BadInputError("the index names a file outside the folder", where=str(index_path), got=outside[0])
        missing = [
            Problem("the index names a shard that is missing", name) for name in files if not (root / name).is_file()
        ]
        if missing:
            raise BadInputError(
                f"missing shards: {', '.join(p.where for p in missing)}",
                where=str(root),
                problems=missing,
                hint="download the checkpoint again",
            )
        extra = [name for name in present if name not in files]
        notes = (f"ignored, not in the index: {', '.join(extra)}",) if extra else ()
        return files, {str(key): str(value) for key, value in listed.items()}, notes
    if (root / SINGLE).is_file():
        extra = [name for name in present if name != SINGLE]
        return (SINGLE,), None, ((f"ignored beside {SINGLE}: {', '.join(extra)}",) if extra else ())
    if len(present) == 1:
        return (present[0],), None, ()
    if present:
        raise BadInputError("several shards but no index", where=str(root), expected=INDEX, got=", ".join(present))
    pickles = sorted(path.name for pattern in _PICKLES for path in root.glob(pattern))
    if pickles:
        raise UnsupportedError(
            "only pickled weights, which mcpc never loads", where=str(root), got=", ".join(pickles),
            hint="save it as safetensors on a trusted machine: model.save_pretrained(DIR)",
        )  # fmt: skip
    raise BadInputError("no weights", where=str(root), expected="model.safetensors, or shards with an index")


def _read_tensors(root: Path, files: tuple[str, ...], listed: dict[str, str] | None) -> dict[str, Entry]:
    tensors: dict[str, Entry] = {}
    problems: list[Problem] = []
    hint = "download the checkpoint again"
    for name in files:
        try:
            entries = read_header(root / name)
        except BadInputError as error:
            problems.append(Problem(error.message, name, error.expected, error.got))
            hint = error.hint or hint
            continue
        for key, entry in entries.items():
            if listed is not None and listed.get(key) not in (None, name):
                continue  # the index gives this tensor to another shard
            if key in tensors:
                problems.append(Problem("the tensor is in two shards", key, tensors[key].file.name, name))
            tensors[key] = entry
    if not problems and listed is not None:
        problems = [
            Problem("the index names a tensor that its shard lacks", key, listed[key])
            for key in sorted(set(listed) - set(tensors))
        ]
    if problems:
        raise BadInputError(
            f"damaged checkpoint: {problems[0]}",
            where=str(root),
            problems=problems,
            hint=hint,
        )
    return tensors
