"""Which checkpoint tensor fills which parameter. Every parameter is filled, every tensor is accounted for."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from mcpc.checkpoint import Checkpoint
from mcpc.checkpoint.made import Made
from mcpc.errors import BadInputError, Problem
from mcpc.export.conversions import Conversion
from mcpc.export.ties import settle_ties


@dataclass(frozen=True)
class KeyMap:
    """Which checkpoint tensor fills what.

    Attributes:
        source: Parameter (or persistent buffer) name -> checkpoint tensor name.
        ignored: Tensors that transformers itself does not load.
        copies: Tensor that is not needed -> the tensor with the same bytes, to which the config ties it.
        untied: Parameters that the config ties, and whose tensors differ.
        made: Name in `source` that no file has -> how that tensor is made of others.
    """

    source: Mapping[str, str]
    ignored: tuple[str, ...]
    copies: Mapping[str, str]
    untied: tuple[str, ...]
    made: Mapping[str, Made]


def map_keys(model: transformers.PreTrainedModel, checkpoint: Checkpoint) -> KeyMap:
    """Match the checkpoint's tensors with the model's parameters by transformers' own renames.

    Parameters that the config ties although their tensors differ are untied in `model`.

    Raises:
        UnsupportedError: A tensor needs arithmetic that is not known here before it fits.
        BadInputError: Keys are missing, unexpected or misshapen; all of them are listed.
    """
    names = Names(model)
    source: dict[str, str] = {}
    unexpected: list[str] = []
    conversions: dict[str, Conversion] = {}
    for key in sorted(checkpoint.tensors):
        name, pattern = names.parameter(checkpoint.model_key(key))
        if name is not None and pattern is not None:
            conversions.setdefault(name, Conversion(names.converters[pattern], name)).add(pattern, key)
        elif name is not None:
            source[name] = key
        else:
            unexpected.append(key)
    state = names.state
    made: dict[str, Made] = {}
    lacking: dict[str, Sequence[str]] = {}
    for name, conversion in conversions.items():
        if any(target not in state for target in conversion.targets):
            unexpected += [key for keys in conversion.keys.values() for key in keys]
            continue
        if parts := conversion.missing(state):
            lacking |= {**dict.fromkeys(conversion.targets, ()), name: parts}
            continue
        found = conversion.made(model.config, state, checkpoint)
        made |= {item.name: item for item in found}
        source |= {item.parameter: item.name for item in found}
    checkpoint = replace(checkpoint, made=made)
    _fill_tied(model, state, source)
    ignored = [key for key in unexpected if _ignorable(model, key)]
    unexpected = [key for key in unexpected if key not in ignored]
    hint = _prefix_hint(names, unexpected) or "config and weights are of different models, or a file is incomplete"
    _refuse(checkpoint, state, source, unexpected, lacking, hint)
    copies, untied = settle_ties(model, checkpoint, source)
    return KeyMap(source, tuple(ignored), copies, untied, made)


class Names:
    """The parameters of a model, by the names that a checkpoint may have for them."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        transforms = get_model_conversion_mapping(model)
        self._renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
        self._converters = [item for item in transforms if isinstance(item, WeightConverter)]
        self.converters = {pattern: item for item in self._converters for pattern in item.source_patterns}
        self._prefix = model.base_model_prefix
        self.state: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))

    def parameter(self, key: str) -> tuple[str | None, str | None]:
        """Return the parameter that a tensor of this name fills, and the pattern of a conversion that it needs.

        A converted tensor may have the name of a parameter that the model has not: its conversion says which it has.
        """
        name, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, self.state)
        if name not in self.state and key in self.state:
            name, pattern = key, None
        if pattern is not None and pattern in self.converters:
            return name, pattern
        return (name if name in self.state else None), None


def _prefix_hint(names: Names, unexpected: list[str]) -> str:
    """Return what to do when unexpected names are known ones behind a prefix; "" when they are not."""
    if len(unexpected) < 2:
        return ""
    columns = zip(*(key.split(".") for key in unexpected), strict=False)
    parts = [column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns)]
    for count in range(1, len(parts) + 1):
        prefix = ".".join(parts[:count]) + "."
        known = sum(names.parameter(key.removeprefix(prefix))[0] is not None for key in unexpected)
        if known == len(unexpected):
            return f"without the prefix {prefix!r} every name is known: mcpc convert --strip-prefix {prefix}"
    return ""


def _fill_tied(model: transformers.PreTrainedModel, state: Mapping[str, torch.Tensor], source: dict[str, str]) -> None:
    """Give a tied parameter that the file lacks the tensor of its twin."""
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    twins: dict[int, list[str]] = {}
    for name, tensor in state.items():
        twins.setdefault(id(tensor), []).append(name)
    for name in sorted(set(state) - set(source)):
        candidates = [twin for twin in twins[id(state[name])] if twin in source]
        candidates += [twin for twin in (tied.get(name), *(k for k, v in tied.items() if v == name)) if twin in source]
        if candidates:
            source[name] = source[candidates[0]]


def _ignorable(model: transformers.PreTrainedModel, key: str) -> bool:
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or [])
    patterns += [
        r"\.rotary_emb\.inv_freq$",
        r"\.position_ids$",
    ]  # buffers that older transformers stored; they are computed
    return any(re.search(pattern, key) for pattern in patterns)


def _refuse(
    checkpoint: Checkpoint,
    state: Mapping[str, torch.Tensor],
    source: Mapping[str, str],
    unexpected: list[str],
    lacking: Mapping[str, Sequence[str]],
    hint: str,
) -> None:
    problems = [
        Problem("missing: no tensor of the checkpoint fills this parameter", name)
        for name in sorted(set(state) - set(source) - set(lacking))
    ]
    problems += [Problem(f"missing: a part of {name}", part) for name, parts in lacking.items() for part in parts]
    problems += [Problem("unexpected: the model has no such parameter", key) for key in unexpected]
    for name, key in sorted(source.items()):
        expected, got = tuple(state[name].shape), checkpoint.shape_of(key)
        if expected != got:
            problems.append(Problem("wrong shape", key, str(list(expected)), str(list(got))))
    if problems:
        counts = ", ".join(
            f"{sum(problem.message.startswith(kind) for problem in problems)} {kind}"
            for kind in ("missing", "unexpected", "wrong shape")
        )
        raise BadInputError(
            f"the checkpoint does not fit its config: {counts}",
            where=str(checkpoint.root),
            problems=problems,
            hint=hint,
        )
