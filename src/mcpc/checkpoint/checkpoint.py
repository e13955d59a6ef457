"""Open a checkpoint folder: config, shards, and an index of lazy tensors. No tensor is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mcpc.checkpoint.finite import FiniteCheck
from mcpc.checkpoint.index import find_tensor_files, read_json, read_tensors
from mcpc.checkpoint.made import Made, pieces
from mcpc.checkpoint.packed import PackedInt4
from mcpc.checkpoint.quantized import FP8, BlockScale, weights_of
from mcpc.core.runner import Array
from mcpc.core.tensors import FLOAT_DTYPES
from mcpc.errors import BadInputError, Problem, UnsupportedError, UsageError
from mcpc.storage.digests import digest_of, digest_of_files, sha256_of_file
from mcpc.storage.safetensors import Entry


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder.

    Attributes:
        root: The folder.
        config: `config.json`.
        files: Tensor files, relative to `root`, in the order of the index.
        tensors: Name -> where the tensor lies.
        notes: What a user should know, such as files that were ignored.
        prefix: Leading part of the tensors' names that the model does not know.
        scales: Tensor -> its scales, for matrices that are stored in FP8.
        packed: Tensor -> its layout, for matrices that are stored in four bits.
        made: Tensor that no file holds -> how it is made of others; the model says which it wants.
        merged: Parameter -> the made tensor that adapters turn its weight into.
    """

    root: Path
    config: Mapping[str, Any]
    files: tuple[str, ...]
    tensors: Mapping[str, Entry]
    notes: tuple[str, ...] = ()
    prefix: str = ""
    scales: Mapping[str, BlockScale] = field(default_factory=dict)
    packed: Mapping[str, PackedInt4] = field(default_factory=dict)
    made: Mapping[str, Made] = field(default_factory=dict)
    merged: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, root: Path, strip_prefix: str = "") -> Checkpoint:
        """Open a folder that holds `config.json` and safetensors files.

        Args:
            root: The folder.
            strip_prefix: Taken off the tensors' names before they are matched with the model's parameters; the tensors
                keep their names all the same.

        Raises:
            UsageError: No tensor has the prefix, or two names become one without it.
            BadInputError: Something is missing, truncated or inconsistent; every finding is listed.
            UnsupportedError: The weights are pickled, or the model needs remote code.
        """
        if not root.is_dir():
            raise BadInputError("no such checkpoint folder", where=str(root))
        config = read_json(root / "config.json", _folder_hint(root))
        _refuse_remote_code(root, config)
        files = find_tensor_files(root)
        entries, notes = read_tensors(root, files)
        weights = weights_of(root, config, entries)
        _check_prefix(root, weights.tensors, strip_prefix)
        if weights.scales:
            notes += (f"{len(weights.scales)} FP8 matrices are dequantized by their block scales",)
        if weights.packed:
            notes += (f"{len(weights.packed)} matrices stay in four bits",)
        return cls(
            root,
            config,
            files.names,
            weights.tensors,
            files.notes + notes,
            strip_prefix,
            weights.scales,
            weights.packed,
        )

    def dtype_of(self, name: str) -> str:
        """Return the dtype in which a tensor is read: float32 for a block-scaled one."""
        if name in self.made:
            return self.made[name].dtype
        return "float32" if name in self.scales else self.tensors[name].dtype

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.made[name].value.shape if name in self.made else self.tensors[name].shape

    def is_computed(self, name: str) -> bool:
        """Return True for a tensor whose values are not the bytes of one tensor of a file."""
        return name in self.made or name in self.scales or name in self.packed

    def stored(self, names: Iterable[str]) -> set[str]:
        """Return the tensors of the files that these are, or are made of."""
        return {part for name in names for part in (self.made[name].sources if name in self.made else (name,))}

    def pieces(self, name: str) -> Iterator[Array]:
        """Yield a tensor in flat pieces; a block-scaled one dequantized to float32, a made one made."""
        if name in self.made:
            yield from pieces(self.made[name].value)
        elif name in self.scales:
            for rows in self.scales[name].dequantized(self.tensors[name]):
                yield rows.reshape(-1)
        else:
            yield from self.tensors[name].pieces()

    def model_key(self, name: str) -> str:
        """Return the name by which the model knows a tensor: without the prefix, a matrix and not its codes."""
        known = name.removeprefix(self.prefix)
        return known.removesuffix("qweight") + "weight" if name in self.packed else known

    @cached_property
    def identity(self) -> str:
        """Return the digest of config, headers and sizes: enough for planning, costs no tensor I/O."""
        entries = [
            [entry.name, entry.dtype, list(entry.shape), entry.file.name, entry.offset, entry.length]
            for entry in (
                *self.tensors.values(),
                *(scale.entry for scale in self.scales.values()),
                *(matrix.scales for matrix in self.packed.values()),
            )
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
            if entry.dtype in FLOAT_DTYPES or entry.dtype == FP8:
                counts[entry.dtype] = counts.get(entry.dtype, 0) + entry.length
        return max(sorted(counts), key=lambda name: counts[name]) if counts else "float32"

    def optional_json(self, name: str) -> dict[str, Any] | None:
        """Return a JSON file of the folder, or None when it is not there."""
        path = self.root / name
        return read_json(path, "") if path.is_file() else None

    def check_finite(self, names: Iterable[str]) -> None:
        """Read the named tensors, a piece at a time, and refuse non-finite values.

        Raises:
            BadInputError: Lists every tensor that holds NaN or infinity.
        """
        check = FiniteCheck()
        self.read_for(check, self.stored(names))
        check.require_finite(self.root)

    def read_for(self, check: FiniteCheck, names: Iterable[str]) -> None:
        """Read tensors of the files, and the scales that belong to them, for a check alone."""
        for name in sorted(names):
            entries = [self.tensors[name]]
            if name in self.scales:
                entries.append(self.scales[name].entry)
            if name in self.packed:
                entries.append(self.packed[name].scales)
            for entry in entries:
                for piece in entry.pieces():
                    check.see(entry, piece)


def _check_prefix(root: Path, names: Mapping[str, Entry], prefix: str) -> None:
    if not prefix:
        return
    without = [name for name in names if not name.startswith(prefix)]
    if len(without) == len(names):
        raise UsageError(
            "no tensor has this prefix", where=f"--strip-prefix {prefix}", got=f"{min(names, default='no tensor')}, ..."
        )
    twice = sorted(name for name in without if prefix + name in names)
    if twice:
        raise UsageError(
            "two tensors would have one name", where=f"--strip-prefix {prefix}",
            problems=[Problem(f"would collide with {prefix}{name}", name) for name in twice], hint=f"see {root}",
        )  # fmt: skip


def _folder_hint(root: Path) -> str:
    """Return what to pass instead of a folder without config.json; a repository of a Hugging Face cache says it."""
    snapshots = sorted(path for path in root.glob("snapshots/*/config.json"))
    if snapshots:
        return f"this is a cache folder; pass one of its snapshots: {snapshots[0].parent}"
    return "a checkpoint folder holds config.json and *.safetensors files"


def _refuse_remote_code(root: Path, config: Mapping[str, Any]) -> None:
    if config.get("auto_map"):
        files = sorted(path.name for path in root.glob("*.py"))
        raise UnsupportedError(
            "the checkpoint wants to run its own code, which mcpc never does", where=str(root),
            got=f"auto_map in config.json, files: {', '.join(files) or 'none'}",
            problems=[Problem("would be run", name) for name in files],
            hint="use a checkpoint whose architecture is part of transformers; if this one is by now, remove auto_map "
            "from config.json in a copy of the folder",
        )  # fmt: skip
