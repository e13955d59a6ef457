"""The checkpoint's tensors for PyTorch: floats widened to float32, under the names that transformers looks for."""

from __future__ import annotations

import numpy as np
import torch

from mcpc.checkpoint import Checkpoint
from mcpc.checkpoint.packed import AWQ_ORDER, PackedInt4
from mcpc.core.tensors import FLOAT_DTYPES
from mcpc.export.skeleton import TORCH_DTYPES
from mcpc.storage.safetensors import Entry

_PIECE_BYTES = 16 << 20


def torch_tensor(entry: Entry) -> torch.Tensor:
    """Return a private copy of an entry's tensor, in its own dtype."""
    dtype = TORCH_DTYPES[entry.dtype]
    if entry.length == 0:
        return torch.zeros(entry.shape, dtype=dtype)
    raw = np.array(entry.read().reshape(-1).view(np.uint8))  # torch refuses the mapped bytes: they are read-only
    return torch.from_numpy(raw).view(dtype).reshape(entry.shape)


def float32_tensor(checkpoint: Checkpoint, key: str) -> torch.Tensor:
    """Return one tensor of the checkpoint; floats widened to float32, block-scaled ones multiplied out."""
    if key in checkpoint.made:
        flat = np.concatenate([piece.astype(np.float32) for piece in checkpoint.pieces(key)])
        return torch.from_numpy(flat).reshape(checkpoint.shape_of(key))
    if key in checkpoint.packed:
        return _multiplied_out(checkpoint.packed[key])
    entry = checkpoint.tensors[key]
    if key in checkpoint.scales:
        scale = checkpoint.scales[key]
        factors = torch_tensor(scale.entry).to(torch.float32)
        for dim, step in enumerate(scale.block):
            factors = factors.repeat_interleave(step, dim).narrow(dim, 0, entry.shape[dim])
        return torch_tensor(entry).to(torch.float32) * factors
    return _widened(entry) if entry.dtype in FLOAT_DTYPES else torch_tensor(entry)


def _widened(entry: Entry) -> torch.Tensor:
    """Return a float tensor as float32; of its narrow form only a piece is in memory."""
    if not entry.shape or entry.length <= _PIECE_BYTES:
        return torch_tensor(entry).to(torch.float32)
    result = torch.empty(entry.shape, dtype=torch.float32)
    step = max(1, _PIECE_BYTES * entry.shape[0] // entry.length)
    for start in range(0, entry.shape[0], step):
        result[start : start + step] = torch_tensor(entry.rows(start, start + step))
    return result


def float32_rows(checkpoint: Checkpoint, key: str, start: int, stop: int) -> torch.Tensor:
    """Return some rows of a tensor for which `has_rows` is true, widened to float32."""
    return torch_tensor(checkpoint.tensors[key].rows(start, stop)).to(torch.float32)


def has_rows(checkpoint: Checkpoint, key: str) -> bool:
    """Return True for a float matrix that is stored as it is, so that some of its rows can be read alone."""
    if checkpoint.is_computed(key):
        return False
    entry = checkpoint.tensors[key]
    return len(entry.shape) == 2 and entry.length > 0 and entry.dtype in FLOAT_DTYPES


def _multiplied_out(matrix: PackedInt4) -> torch.Tensor:
    """Return a four-bit matrix in float32 [N,K]."""
    words = torch_tensor(matrix.codes)
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    if matrix.method == "gptq":
        codes = (words.unsqueeze(1) >> shifts.view(1, 8, 1)).reshape(matrix.depth, matrix.columns)
    else:
        codes = torch.empty(*words.shape, 8, dtype=torch.int32)
        for nibble, column in enumerate(AWQ_ORDER):
            codes[:, :, column] = words >> (4 * nibble)
        codes = codes.reshape(matrix.depth, matrix.columns)
    centred = (codes & 15).to(torch.float32) - 8
    scales = torch_tensor(matrix.scales).to(torch.float32).repeat_interleave(matrix.group, 0)
    return (centred * scales).T.contiguous()


def state_dict(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return every tensor of the checkpoint under the name that transformers looks for."""
    return {checkpoint.model_key(key): float32_tensor(checkpoint, key) for key in checkpoint.tensors}
