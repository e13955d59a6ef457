"""What adapters change of each parameter, and which changes cannot be merged exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from mcpc.checkpoint import Checkpoint
from mcpc.checkpoint.adapters import Adapter
from mcpc.checkpoint.lora import BLOCK_ELEMENTS, Drift, LowRank, Rows, matrix_rows
from mcpc.core.runner import Array
from mcpc.errors import Problem, UnsupportedError
from mcpc.export.ties import same_bytes
from mcpc.storage.safetensors import Entry

HINT = "merge it with peft (merge_and_unload) into a float checkpoint whose ties are off, and convert that"


@dataclass
class Change:
    """What happens to one parameter: the adapters in order, what they replace it by, and what they add."""

    adapters: list[Adapter] = field(default_factory=list)
    replaced: list[tuple[Adapter, Entry]] = field(default_factory=list)
    updates: list[tuple[LowRank, Drift]] = field(default_factory=list)

    def by(self, adapter: Adapter) -> Change:
        """Note that an adapter has a part in it. One that is given twice is two, although they are equal."""
        if not any(known is adapter for known in self.adapters):
            self.adapters.append(adapter)
        return self


def refuse_inexact(
    model: str,
    state: Mapping[str, torch.Tensor],
    checkpoint: Checkpoint,
    source: Mapping[str, str],
    changes: Mapping[str, Change],
) -> None:
    """Refuse what would be merged into more than was trained, or cannot be merged exactly."""
    sharing: dict[str, list[str]] = {}
    for name in state:
        sharing.setdefault(source[name], []).append(name)
    problems = []
    for name, change in sorted(changes.items()):
        key = source[name]
        twins = [twin for twin in sharing[key] if twin != name]
        if alone := [twin for twin in twins if twin not in changes]:
            problems.append(Problem(f"tied to {alone[0]}, which the adapter leaves alone", name))
        elif apart := [twin for twin in twins if twin > name and not _same(change, changes[twin])]:
            problems.append(Problem(f"tied to {apart[0]}, which the adapter changes otherwise", name))
        if key in checkpoint.packed:
            problems.append(Problem("stored in four bits", name))
        else:
            problems += _conflicts(name, change, checkpoint, key)
    if problems:
        raise UnsupportedError(
            f"the adapter cannot be merged exactly: {problems[0]}", where=model, problems=problems, hint=HINT
        )


def _conflicts(name: str, change: Change, checkpoint: Checkpoint, key: str) -> list[Problem]:
    """Return what several adapters do to one parameter that has no meaning together."""
    if len(change.adapters) < 2:
        return []
    if any(update.magnitude is not None for update, _ in change.updates) and len(change.updates) > 1:
        return [Problem("DoRA together with another adapter on the same weight", name)]
    if not change.replaced:
        return []
    (first, kept), *others = change.replaced
    for adapter, entry in others:
        if not same_bytes(kept, entry):
            return [Problem(f"{first.name} and {adapter.name} replace it, by different tensors", name)]
    replacing = [adapter for adapter, _ in change.replaced]
    for adapter in change.adapters:
        if not any(adapter is known for known in replacing) and not _is_base(checkpoint, key, kept):
            return [Problem(f"{first.name} replaces it, and {adapter.name} updates what it was", name)]
    return []


def _same(one: Change, other: Change) -> bool:
    """Return whether two tied parameters become the same weight: by the same tensors, bit by bit."""
    if (len(one.replaced), len(one.updates)) != (len(other.replaced), len(other.updates)):
        return False
    return all(
        first is second and same_bytes(mine, theirs)
        for (first, mine), (second, theirs) in zip(one.replaced, other.replaced, strict=True)
    ) and all(
        drift is twin
        and update.scaling == also.scaling
        and update.magnitude is None
        and also.magnitude is None
        and np.array_equal(update.left(), also.left())
        and np.array_equal(update.right(), also.right())
        for (update, drift), (also, twin) in zip(one.updates, other.updates, strict=True)
    )


def _is_base(checkpoint: Checkpoint, key: str, entry: Entry) -> bool:
    """Return whether a tensor has the values of a base weight; peft saves an embedding's table as it was."""
    step = max(1, BLOCK_ELEMENTS // max(1, math.prod(entry.shape[1:])))
    base = base_rows(checkpoint, key, entry.shape)
    return all(np.array_equal(mine, theirs) for mine, theirs in zip(base(step), matrix_rows(entry)(step), strict=True))


def base_rows(checkpoint: Checkpoint, key: str, shape: tuple[int, ...]) -> Rows:
    """Return how the rows of a base weight are read; one that is computed is computed whole."""
    if not checkpoint.is_computed(key):
        return matrix_rows(checkpoint.tensors[key])

    def read(step: int) -> Iterator[Array]:
        flat = np.concatenate([piece.astype(np.float32) for piece in checkpoint.pieces(key)])
        matrix = flat.reshape(shape[0] if len(shape) > 1 else 1, -1)
        yield from (matrix[start : start + step] for start in range(0, len(matrix), step))

    return read
