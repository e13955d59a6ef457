"""Fit LoRA adapters onto a model's parameters: every tensor of an adapter has its place, or the adapter is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import transformers
from transformers.pytorch_utils import Conv1D

from mcpc.checkpoint import Checkpoint
from mcpc.checkpoint.adapters import Adapter, Update
from mcpc.checkpoint.lora import Drift, LowRank, Merge, Rows, matrix_rows
from mcpc.checkpoint.made import Flow, Made
from mcpc.core.runner import Array
from mcpc.errors import BadInputError, Problem, UnsupportedError
from mcpc.export.keys import Names
from mcpc.storage.safetensors import Entry

_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


@dataclass
class _Change:
    """What happens to one parameter."""

    replaced: Entry | None = None
    updates: list[tuple[LowRank, Drift]] = field(default_factory=list)
    adapters: list[Adapter] = field(default_factory=list)

    def add(self, adapter: Adapter) -> None:
        if adapter not in self.adapters:
            self.adapters.append(adapter)


def adapt(
    model: transformers.PreTrainedModel,
    checkpoint: Checkpoint,
    source: Mapping[str, str],
    adapters: Sequence[Adapter],
) -> tuple[dict[str, Made], list[Drift]]:
    """Return {parameter: its merged weight}, and the drift of each adapter, known once the weights were computed.

    Args:
        model: Has shapes and no bytes.
        checkpoint: Where the base weights lie.
        source: Parameter -> tensor of the checkpoint, or one that is made of others.
        adapters: In the order in which they are merged.

    Raises:
        BadInputError: A tensor of an adapter fits no module, or a shape differs; everything is listed.
        UnsupportedError: A weight that cannot be merged: tied, in four bits, made of several experts.
    """
    names = Names(model)
    changes: dict[str, _Change] = {}
    drifts = [Drift() for _ in adapters]
    for adapter, drift in zip(adapters, drifts, strict=True):
        _fit(model, names, adapter, drift, changes)
    _refuse_unmergeable(model, names.state, checkpoint, source, changes)
    return {name: _made(name, change, checkpoint, source[name]) for name, change in sorted(changes.items())}, drifts


def _fit(
    model: transformers.PreTrainedModel, names: Names, adapter: Adapter, drift: Drift, changes: dict[str, _Change]
) -> None:
    """Find the parameter of every tensor of an adapter."""
    unknown: list[Problem] = []
    wrong: list[Problem] = []
    for key, entry in sorted(adapter.replaced.items()):
        name = _parameter(names, key)
        if name is None:
            unknown.append(Problem("the model has no such parameter", key))
        elif tuple(names.state[name].shape) != entry.shape:
            wrong.append(Problem("wrong shape", key, str(list(names.state[name].shape)), str(list(entry.shape))))
        else:
            change = changes.setdefault(name, _Change())
            change.replaced = entry
            change.add(adapter)
    for path, update in sorted(adapter.updates.items()):
        name = _parameter(names, f"{path}.weight")
        if name is None:
            unknown.append(Problem("the model has no such module", path))
            continue
        module = model.get_submodule(name.removesuffix(".weight"))
        shape = tuple(names.state[name].shape)
        if problem := _misfit(path, module, shape, update):
            wrong.append(problem)
            continue
        change = changes.setdefault(name, _Change())
        change.updates.append((_low_rank(module, update), drift))
        change.add(adapter)
        if update.bias is not None:
            bias = name.removesuffix("weight") + "bias"
            if bias not in names.state:
                wrong.append(Problem("the update has a bias, and the module has none", path))
                continue
            change = changes.setdefault(bias, _Change())
            change.updates.append((_bias(update), drift))
            change.add(adapter)
    total = len(adapter.replaced) + len(adapter.updates)
    if unknown or wrong:
        applied = total - len(unknown) - len(wrong)
        raise BadInputError(
            f"the adapter does not fit the model: {applied} of {total} applied", where=str(adapter.root),
            problems=[*unknown, *wrong],
            hint="the adapter was trained on another model" if not applied else "the adapter and the model differ",
        )  # fmt: skip


def _parameter(names: Names, key: str) -> str | None:
    """Return the parameter of that name in the model as it was trained, or as it is called now."""
    if key in names.state:
        return key
    name, pattern = names.parameter(key)
    return name if pattern is None and name in names.state else None


def _misfit(path: str, module: torch.nn.Module, shape: tuple[int, ...], update: Update) -> Problem | None:
    """Return what is wrong between an update and the module that it is for, None when it fits."""
    a, b = update.a.shape, update.b.shape
    if isinstance(module, (torch.nn.Linear, *_CONVOLUTIONS)):
        if getattr(module, "groups", 1) != 1:
            return Problem("a convolution of several groups, which mcpc does not merge", path)
        fits = (b[0], *a[1:]) == shape and math.prod(b[2:]) == 1
    elif isinstance(module, (torch.nn.Embedding, Conv1D)):
        turned = (b[0], a[1]) if isinstance(module, torch.nn.Embedding) else (a[1], b[0])
        fits = (a[1], b[0]) == shape and len(a) == len(b) == len(turned)
    else:
        return Problem(f"a module of a kind that mcpc does not merge: {type(module).__name__}", path)
    rows = shape[1] if isinstance(module, (torch.nn.Embedding, Conv1D)) else shape[0]
    if update.magnitude is not None and math.prod(update.magnitude.shape) != rows:
        return Problem("wrong magnitude", path, str(rows), str(list(update.magnitude.shape)))
    if not fits:
        return Problem("the update does not fit the weight", path, str(list(shape)), f"{list(a)} and {list(b)}")
    return None


def _low_rank(module: torch.nn.Module, update: Update) -> LowRank:
    """Return an update as a product of matrices, in the orientation in which the module stores its weight."""
    a, b = _matrix(update.a), _matrix(update.b)
    magnitude = None if update.magnitude is None else _matrix(update.magnitude)
    if isinstance(module, (torch.nn.Embedding, Conv1D)):  # stored as [in, out]
        return LowRank(lambda: a().T, lambda: b().T, update.scaling, magnitude, by_columns=True)
    return LowRank(b, a, update.scaling, magnitude)


def _bias(update: Update) -> LowRank:
    if update.bias is None:
        raise ValueError("the update has no bias")
    return LowRank(lambda: np.ones((1, 1), np.float32), _matrix(update.bias, row=True), update.scaling)


def _matrix(entry: Entry, row: bool = False) -> Callable[[], Array]:
    """Return how a small tensor is read in float32, as the matrix [first axis, the others]."""

    def read() -> Array:
        array = entry.read()
        flat: Array = array.reshape(1 if row else len(array), -1).astype(np.float32)
        return flat

    return read


def _refuse_unmergeable(
    model: transformers.PreTrainedModel,
    state: Mapping[str, torch.Tensor],
    checkpoint: Checkpoint,
    source: Mapping[str, str],
    changes: Mapping[str, _Change],
) -> None:
    """Refuse what would be merged into more than was trained, or cannot be merged exactly."""
    sharing: dict[str, list[str]] = {}
    for name in state:
        sharing.setdefault(source[name], []).append(name)
    problems = []
    for name, change in changes.items():
        others = [other for other in sharing[source[name]] if other not in changes]
        if others:
            problems.append(Problem(f"tied to {others[0]}, which the adapter leaves alone", name))
        if source[name] in checkpoint.packed:
            problems.append(Problem("stored in four bits", name))
        dora = any(update.magnitude is not None for update, _ in change.updates)
        if dora and len(change.updates) > 1:
            problems.append(Problem("DoRA together with another adapter on the same weight", name))
    if problems:
        raise UnsupportedError(
            f"the adapter cannot be merged exactly: {problems[0]}", where=type(model).__name__, problems=problems,
            hint="merge it with peft into a float checkpoint whose ties are off, and convert that",
        )  # fmt: skip


def _made(parameter: str, change: _Change, checkpoint: Checkpoint, key: str) -> Made:
    """Return a merged weight as a tensor that is made of the base's."""
    shape, dtype = checkpoint.shape_of(key), checkpoint.dtype_of(key)
    base = _base(checkpoint, key, shape) if change.replaced is None else matrix_rows(change.replaced)
    merge = Merge(parameter, shape, dtype, base, change.updates)
    made = checkpoint.made.get(key)
    steps = [made.transform] if made else []
    steps += [f"{'lora' if change.updates else 'replace'}({item.name}, {item.weight:g})" for item in change.adapters]
    origin, sources = (made.origin, made.sources) if made else (key, (key,))
    return Made(parameter, origin, ", ".join(steps), sources, dtype, Flow(shape, merge.rows))


def _base(checkpoint: Checkpoint, key: str, shape: tuple[int, ...]) -> Rows:
    """Return how the rows of a base weight are read; one that is computed is computed whole."""
    if not checkpoint.is_computed(key):
        return matrix_rows(checkpoint.tensors[key])

    def read(step: int) -> Iterator[Array]:
        flat = np.concatenate([piece.astype(np.float32) for piece in checkpoint.pieces(key)])
        matrix = flat.reshape(shape[0] if len(shape) > 1 else 1, -1)
        yield from (matrix[start : start + step] for start in range(0, len(matrix), step))

    return read
