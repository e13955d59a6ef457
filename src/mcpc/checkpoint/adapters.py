"""A LoRA adapter on disk: which modules it updates, and by what. No base weight is needed to open one."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mcpc.checkpoint.adapter_config import CONFIG, AdapterConfig, read_config
from mcpc.checkpoint.finite import FiniteCheck
from mcpc.core.tensors import FLOAT_DTYPES
from mcpc.errors import BadInputError, Problem, UnsupportedError, UsageError
from mcpc.storage.digests import digest_of_files, sha256_of_file
from mcpc.storage.safetensors import Entry, read_header

TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
#: Ends of tensor names that make up a module's update -> what they are.
_PARTS = {
    "lora_A.weight": "a", "lora_B.weight": "b", "lora_embedding_A": "a", "lora_embedding_B": "b",
    "lora_magnitude_vector": "magnitude", "lora_magnitude_vector.weight": "magnitude", "lora_B.bias": "bias",
}  # fmt: skip
_PART = re.compile(rf"^(?P<module>.+)\.(?P<part>{'|'.join(map(re.escape, _PARTS))})$")


@dataclass(frozen=True)
class Update:
    """What an adapter does to one module.

    Attributes:
        a: [rank, in], for a convolution [rank, in, ...], for an embedding [rank, rows].
        b: [out, rank], for a convolution [out, rank, 1, ...].
        scaling: Factor of b @ a, the adapter's weight included.
        magnitude: Lengths that DoRA gives the merged weight's rows, or an embedding's columns.
        bias: [out], added to the module's bias by the same factor.
    """

    a: Entry
    b: Entry
    scaling: float
    magnitude: Entry | None = None
    bias: Entry | None = None

    @property
    def entries(self) -> list[Entry]:
        """Return the tensors that it is made of."""
        return [entry for entry in (self.a, self.b, self.magnitude, self.bias) if entry is not None]


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter.

    Attributes:
        root: Its folder.
        weight: How much of it is merged.
        digest: Of its config and tensors.
        updates: Module path -> its update.
        replaced: Parameter -> the tensor that takes its place (`modules_to_save`, trained biases).
        saved: Ends of the paths of modules that its config says were trained whole.
    """

    root: Path
    weight: float
    digest: str
    updates: Mapping[str, Update]
    replaced: Mapping[str, Entry]
    saved: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of its folder."""
        return self.root.resolve().name

    @classmethod
    def open(cls, root: Path, weight: float = 1.0) -> Adapter:
        """Open an adapter's folder; its tensors are checked, and none is kept in memory.

        Raises:
            UsageError: The weight is zero or not finite.
            BadInputError: Something is missing, damaged, not finite or of another rank than the config says.
            UnsupportedError: It is not plain LoRA or DoRA, or it is pickled.
        """
        if not math.isfinite(weight) or weight == 0.0:
            raise UsageError("an adapter's weight is a number other than 0", where=f"--adapter {root}", got=f"{weight}")
        if not root.is_dir():
            raise BadInputError("no such adapter folder", where=str(root))
        config = read_config(root)
        path = root / TENSORS
        if not path.is_file() and (root / "adapter_model.bin").exists():
            raise UnsupportedError(
                "the adapter is pickled, and mcpc loads no pickle", where=str(root / "adapter_model.bin"),
                expected=TENSORS, hint="save it again with peft: save_pretrained(..., safe_serialization=True)",
            )  # fmt: skip
        if not path.is_file():
            raise BadInputError("the adapter has no tensors", where=str(root), expected=TENSORS)
        entries = read_header(path)
        _require_finite(root, entries)
        updates, replaced = _sorted(root, entries, config, weight)
        digest = digest_of_files({name: sha256_of_file(root / name) for name in (CONFIG, TENSORS)})
        return cls(root, weight, digest, updates, replaced, config.saved)


def _require_finite(root: Path, entries: Mapping[str, Entry]) -> None:
    check = FiniteCheck()
    for entry in entries.values():
        if entry.dtype not in FLOAT_DTYPES:
            raise UnsupportedError("an adapter's tensor is no float", where=f"{root}: {entry.name}", got=entry.dtype)
        for piece in entry.pieces():
            check.see(entry, piece)
    check.require_finite(root)


def _sorted(
    root: Path, entries: Mapping[str, Entry], config: AdapterConfig, weight: float
) -> tuple[dict[str, Update], dict[str, Entry]]:
    """Return the updates by module, and the tensors that replace parameters."""
    parts: dict[str, dict[str, Entry]] = {}
    replaced: dict[str, Entry] = {}
    trained: list[str] = []
    problems: list[Problem] = []
    for key, entry in entries.items():
        name = key.removeprefix(_PREFIX)
        found = _PART.match(name)
        if found:
            parts.setdefault(found["module"], {})[_PARTS[found["part"]]] = entry
        else:
            # peft saves an embedding's own table, as it was, beside its update.
            trained += [] if name.endswith(".base_layer.weight") else [name]
            parameter = name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
            if parameter in replaced:
                problems.append(Problem(f"takes the place of a parameter that {replaced[parameter].name} takes", key))
            replaced[parameter] = entry
    problems += [problem for module, found in sorted(parts.items()) for problem in _faults(module, found, config)]
    if not parts and not replaced:
        problems.append(Problem("the adapter holds no tensor"))
    if problems:
        raise BadInputError(
            f"the adapter is damaged, or its config is of another one: {problems[0]}",
            where=str(root), problems=problems,
        )  # fmt: skip
    if trained and weight != 1.0:
        raise UsageError(
            "an adapter that replaces whole tensors can only have the weight 1", where=f"--adapter {root}={weight:g}",
            problems=[Problem("replaces", name) for name in sorted(trained)],
        )  # fmt: skip
    updates = {
        module: Update(
            found["a"], found["b"], weight * config.scaling_of(module), found.get("magnitude"), found.get("bias")
        )
        for module, found in parts.items()
    }
    return updates, replaced


def _faults(module: str, parts: Mapping[str, Entry], config: AdapterConfig) -> list[Problem]:
    """Return what is wrong with the tensors of one module."""
    wanted = {"a", "b"} | ({"magnitude"} if config.dora else set())
    if missing := sorted(wanted - parts.keys()):
        return [Problem(f"missing: {', '.join(missing)} of the update", module)]
    if not config.dora and "magnitude" in parts:
        return [Problem("a magnitude, although use_dora is off", module)]
    rank = config.rank_of(module)
    a, b = parts["a"], parts["b"]
    if a.shape[:1] != (rank,) or b.shape[1:2] != (rank,):
        return [Problem("another rank than the config says", module, f"{rank}", f"{list(a.shape)} and {list(b.shape)}")]
    return []
