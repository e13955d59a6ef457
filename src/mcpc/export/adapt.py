"""Fit LoRA adapters onto a model's parameters: every tensor of an adapter has its place, or the adapter is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import transformers
from transformers.pytorch_utils import Conv1D

from mcpc.checkpoint import Checkpoint
from mcpc.checkpoint.adapters import Adapter, Update
from mcpc.checkpoint.lora import Drift, LowRank, Merge, matrix_rows
from mcpc.checkpoint.made import Flow, Made
from mcpc.core.runner import Array
from mcpc.errors import BadInputError, Problem, UnsupportedError
from mcpc.export.changes import HINT, Change, base_rows, refuse_inexact
from mcpc.export.conversions import Conversion
from mcpc.export.keys import Names
from mcpc.storage.safetensors import Entry

_CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


@dataclass
class _Findings:
    """Why tensors of an adapter have no place."""

    wrong: list[Problem] = field(default_factory=list)
    unsupported: list[Problem] = field(default_factory=list)

    def refuse(self, adapter: Adapter) -> None:
        """Raise when there is any."""
        problems = [*self.wrong, *self.unsupported]
        if not problems:
            return
        total = len(adapter.replaced) + len(adapter.updates)
        applied = total - len(problems)
        if not self.wrong:
            raise UnsupportedError(
                f"the adapter cannot be merged: {problems[0]}", where=str(adapter.root), problems=problems, hint=HINT
            )
        raise BadInputError(
            f"the adapter does not fit the model: {applied} of {total} applied", where=str(adapter.root),
            problems=problems,
            hint="the adapter was trained on another model" if not applied else "the adapter and the model differ",
        )  # fmt: skip


def adapt(
    model: transformers.PreTrainedModel,
    checkpoint: Checkpoint,
    source: Mapping[str, str],
    adapters: Sequence[Adapter],
    dtype: str = "keep",
) -> tuple[dict[str, Made], list[Drift]]:
    """Return {parameter: its merged weight}, and the drift of each adapter, known once the weights were computed.

    Args:
        model: Has shapes and no bytes.
        checkpoint: Where the base weights lie.
        source: Parameter -> tensor of the checkpoint, or one that is made of others.
        adapters: In the order in which they are merged.
        dtype: Float dtype of the package, or `keep`. A weight that is stored in another one than its base is merged in
            float32, and rounded only when it is stored.

    Raises:
        BadInputError: A tensor of an adapter fits no module, or a shape differs; everything is listed.
        UnsupportedError: A weight that cannot be merged: tied, in four bits, made of several experts.
    """
    names = Names(model)
    changes: dict[str, Change] = {}
    drifts = [Drift() for _ in adapters]
    for adapter, drift in zip(adapters, drifts, strict=True):
        _fit(model, names, adapter, drift, changes)
    refuse_inexact(type(model).__name__, names.state, checkpoint, source, changes)
    made: dict[str, Made] = {}
    of_base: dict[str, Made] = {}  # parameters that are tied stay one: what happens to them is the same
    for name, change in sorted(changes.items()):
        key = source[name]
        of_base[key] = made[name] = of_base.get(key) or _made(name, change, checkpoint, key, dtype)
    return made, drifts


def _fit(
    model: transformers.PreTrainedModel, names: Names, adapter: Adapter, drift: Drift, changes: dict[str, Change]
) -> None:
    """Find the parameter of every tensor of an adapter."""
    found = _Findings()
    whole: set[str] = set()
    for key, entry in sorted(adapter.replaced.items()):
        name = _parameter(names, key, key, found)
        if name is None:
            continue
        if tuple(names.state[name].shape) != entry.shape:
            expected, got = list(names.state[name].shape), list(entry.shape)
            found.wrong.append(Problem("wrong shape", key, str(expected), str(got)))
            continue
        whole.add(name)
        changes.setdefault(name, Change()).by(adapter).replaced.append((adapter, entry))
    for path, update in sorted(adapter.updates.items()):
        name = _parameter(names, f"{path}.weight", path, found)
        if name is None or not _fits(model, names, name, path, update, found):
            continue
        module = model.get_submodule(name.removesuffix(".weight"))
        changes.setdefault(name, Change()).by(adapter).updates.append((_low_rank(module, update), drift))
        if update.bias is not None:
            bias = name.removesuffix("weight") + "bias"
            changes.setdefault(bias, Change()).by(adapter).updates.append((_bias(update), drift))
    found.refuse(adapter)
    if lacking := _lacking(model, adapter, whole):
        raise BadInputError(
            f"the adapter lacks what modules_to_save names: {lacking[0]}", where=str(adapter.root), problems=lacking,
            hint="save the adapter again with peft",
        )  # fmt: skip


def _parameter(names: Names, key: str, where: str, found: _Findings) -> str | None:
    """Return the parameter of that name in the model as it was trained, or as it is called now."""
    if key in names.state:
        return key
    name, pattern = names.parameter(key)
    if name is not None and pattern is not None:
        targets = [target for target in Conversion(names.converters[pattern], name).targets if target in names.state]
        if targets:
            found.unsupported.append(Problem(f"one of several tensors that make up {targets[0]}", where))
            return None
    if name is None or pattern is not None:
        kind = "parameter" if key == where else "module"
        found.wrong.append(Problem(f"the model has no such {kind}", where))
        return None
    return name


def _fits(
    model: transformers.PreTrainedModel, names: Names, name: str, path: str, update: Update, found: _Findings
) -> bool:
    """Return whether an update fits its parameter; note why when it does not."""
    module, shape = model.get_submodule(name.rpartition(".")[0]), tuple(names.state[name].shape)
    kinds = (torch.nn.Linear, torch.nn.Embedding, Conv1D, *_CONVOLUTIONS)
    if not name.endswith(".weight") or not isinstance(module, kinds):
        kind = type(module).__name__
        found.unsupported.append(Problem(f"a module of a kind that mcpc does not merge: {kind}", path))
        return False
    if getattr(module, "groups", 1) != 1:
        found.unsupported.append(Problem("a convolution of several groups, which mcpc does not merge", path))
        return False
    problem = _misfit(path, module, shape, update)
    if problem is None and update.bias is not None:
        bias = names.state.get(name.removesuffix("weight") + "bias")
        if bias is None:
            problem = Problem("the update has a bias, and the module has none", path)
        elif tuple(bias.shape) != update.bias.shape:
            problem = Problem("wrong bias", path, str(list(bias.shape)), str(list(update.bias.shape)))
    if problem is not None:
        found.wrong.append(problem)
    return problem is None


def _misfit(path: str, module: torch.nn.Module, shape: tuple[int, ...], update: Update) -> Problem | None:
    """Return what is wrong with the shapes of an update, None when they fit."""
    a, b = update.a.shape, update.b.shape
    if isinstance(module, (torch.nn.Embedding, Conv1D)):
        fits = (a[1:], b[:1]) == (shape[:1], shape[1:]) and len(b) == 2  # stored as [in, out]
        lengths = shape[1]
    else:
        fits = (b[0], *a[1:]) == shape and math.prod(b[2:]) == 1
        lengths = shape[0]
    if not fits:
        return Problem("the update does not fit the weight", path, str(list(shape)), f"{list(a)} and {list(b)}")
    if update.magnitude is not None and math.prod(update.magnitude.shape) != lengths:
        return Problem("wrong magnitude", path, str(lengths), str(list(update.magnitude.shape)))
    return None


def _lacking(model: transformers.PreTrainedModel, adapter: Adapter, whole: set[str]) -> list[Problem]:
    """Return what `modules_to_save` names and the adapter does not hold.

    Source: peft `_set_trainable`, which takes every module whose path ends so.
    """
    problems = []
    for end in adapter.saved:
        paths = [path for path, _ in model.named_modules() if path.endswith(end)]
        held = any(f".{key}".find(f"{end}.") > 0 for key in adapter.replaced)
        if not paths and not held:
            problems.append(Problem("the adapter holds no tensor of it", end))
        problems += [
            Problem(f"of {end}, and the adapter does not hold it", f"{path}.{name}")
            for path in paths
            for name, _ in model.get_submodule(path).named_parameters()
            if f"{path}.{name}" not in whole
        ]
    return problems


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


def _made(parameter: str, change: Change, checkpoint: Checkpoint, key: str, wanted: str) -> Made:
    """Return a merged weight as a tensor that is made of the base's."""
    shape, own = checkpoint.shape_of(key), checkpoint.dtype_of(key)
    dtype = own if wanted in ("keep", own) else "float32"
    base = matrix_rows(change.replaced[0][1]) if change.replaced else base_rows(checkpoint, key, shape)
    merge = Merge(parameter, shape, dtype, base, change.updates)
    made = checkpoint.made.get(key)
    steps = [made.transform] if made else []
    steps += [f"{'lora' if change.updates else 'replace'}({item.name}, {item.weight:g})" for item in change.adapters]
    origin, sources = (made.origin, made.sources) if made else (key, (key,))
    return Made(parameter, origin, ", ".join(steps), sources, dtype, Flow(shape, merge.rows))
