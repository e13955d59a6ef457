"""What a config ties against what the checkpoint holds: the bytes decide.

A config may say that embedding and head are one matrix while the checkpoint holds two different ones. They stay two,
as they do when transformers loads them. A matrix that is written out twice is stored once.

Source: transformers `PreTrainedModel.tie_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import transformers

from mcpc.checkpoint import Checkpoint
from mcpc.storage.safetensors import Entry

_PIECE_BYTES = 1 << 24


def settle_ties(
    model: transformers.PreTrainedModel, checkpoint: Checkpoint, source: dict[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Untie parameters whose two tensors differ, and let both names of a tied one lead to one tensor.

    Args:
        model: The model without weights; parameters that differ become two.
        checkpoint: Where the tensors lie.
        source: Parameter -> checkpoint tensor; changed in place.

    Returns:
        {tensor that is not needed: the tensor with the same bytes}, and the parameters that were untied.
    """
    copies: dict[str, str] = {}
    untied: list[str] = []
    tied: Mapping[str, str] = dict(getattr(model, "all_tied_weights_keys", None) or {})
    for target, twin in sorted(tied.items()):
        if target not in source or twin not in source or source[target] == source[twin]:
            continue
        if _equal(checkpoint, source[target], source[twin]):
            copies[source[target]] = source[twin]
            source[target] = source[twin]
        else:
            _untie(model, target)
            untied.append(target)
    return copies, tuple(untied)


def _equal(checkpoint: Checkpoint, one: str, other: str) -> bool:
    """Compare two tensors; one that is made of others is taken to differ, which is never wrong."""
    if one in checkpoint.made or other in checkpoint.made:
        return False
    return same_bytes(checkpoint.tensors[one], checkpoint.tensors[other])


def same_bytes(one: Entry, other: Entry) -> bool:
    """Compare two tensors, a piece at a time."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if (one.file, one.offset) == (other.file, other.offset):
        return True
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.offset)
        second.seek(other.offset)
        for start in range(0, one.length, _PIECE_BYTES):
            size = min(_PIECE_BYTES, one.length - start)
            if first.read(size) != second.read(size):
                return False
    return True


def _untie(model: transformers.PreTrainedModel, name: str) -> None:
    """Give a parameter that shares its tensor one of its own."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    shared = model.get_parameter(name)
    setattr(module, leaf, torch.nn.Parameter(torch.empty_like(shared), requires_grad=False))
    model.all_tied_weights_keys.pop(name)
