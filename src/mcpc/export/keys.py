"""Which checkpoint tensor fills which parameter. Every parameter is filled, every tensor is accounted for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from mcpc.checkpoint import Checkpoint
from mcpc.errors import BadInputError, Problem, UnsupportedError


@dataclass(frozen=True)
class KeyMap:
    """Parameter (or persistent buffer) name -> checkpoint tensor name; and tensors that transformers itself ignores."""

    source: Mapping[str, str]
    ignored: tuple[str, ...]


def map_keys(model: transformers.PreTrainedModel, checkpoint: Checkpoint) -> KeyMap:
    """Match the checkpoint's tensors with the model's parameters by transformers' own renames.

    Raises:
        UnsupportedError: A tensor needs arithmetic (merged experts, permuted heads) before it fits.
        BadInputError: Keys are missing, unexpected or misshapen; all of them are listed.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
    converters = [item for item in transforms if isinstance(item, WeightConverter)]
    state: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
    source: dict[str, str] = {}
    unexpected: list[str] = []
    converted: list[str] = []
    for key in sorted(checkpoint.tensors):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if pattern is not None and any(pattern in converter.source_patterns for converter in converters):
            converted.append(key)
        elif name in state:
            source[name] = key
        else:
            unexpected.append(key)
    if converted:
        raise UnsupportedError(
            "the checkpoint's layout needs tensor arithmetic that mcpc does not do yet",
            where=str(checkpoint.root),
            problems=[Problem("needs a conversion", key) for key in converted],
        )
    _fill_tied(model, state, source)
    ignored = [key for key in unexpected if _ignorable(model, key)]
    _refuse(checkpoint, state, source, [key for key in unexpected if key not in ignored])
    return KeyMap(source, tuple(ignored))


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
) -> None:
    problems = [
        Problem("missing: no tensor of the checkpoint fills this parameter", name)
        for name in sorted(set(state) - set(source))
    ]
    problems += [Problem("unexpected: the model has no such parameter", key) for key in unexpected]
    for name, key in sorted(source.items()):
        expected, got = tuple(state[name].shape), checkpoint.tensors[key].shape
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
            hint="the config and the weights are from different models, or a file is incomplete",
        )
