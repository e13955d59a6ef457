"""A PyTorch model whose large weights are in memory only while the module that owns them runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import transformers
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from mcpc.checkpoint import Checkpoint
from mcpc.export.convert import COMPUTE_DTYPE
from mcpc.export.keys import map_keys
from mcpc.export.skeleton import build_skeleton
from mcpc.export.state import float32_rows, float32_tensor, has_rows

#: Modules with fewer bytes of own weights keep them: norms, biases, scalars that other modules read.
_KEPT_BYTES = 1 << 18
#: Matrices of more bytes as float32 are read by rows, where the module is one that can.
_WHOLE_BYTES = 256 << 20


def streaming_model(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """Return the model of a checkpoint with its weights on disk.

    A module with large weights of its own reads them before each of its calls and drops them after. The names come
    from mcpc's key map, which transformers' own renames make.

    Args:
        checkpoint: Where the weights are.
        dtype: Float dtype of the computation.
    """
    model = build_skeleton(checkpoint.root, checkpoint.architecture, COMPUTE_DTYPE)
    keys = map_keys(model, checkpoint)
    source = {**keys.source, **checkpoint.merged}
    checkpoint = replace(checkpoint, made={**checkpoint.made, **keys.made})
    for path, module in model.named_modules():
        own = {
            name: source[f"{path}.{name}" if path else name]
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]
            if tensor is not None and (f"{path}.{name}" if path else name) in source
        }
        _Weights(checkpoint, own, dtype).attach(module)
    if dtype != torch.float32:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)
    return model


class _Weights:
    """The tensors that one module owns, by the names of the checkpoint."""

    def __init__(self, checkpoint: Checkpoint, own: Mapping[str, str], dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._own = own
        self._dtype = dtype

    def attach(self, module: torch.nn.Module) -> None:
        """Load small weights now; large ones around each call."""
        elements = sum(tensor.numel() for name in self._own if (tensor := _slot(module, name).get(name)) is not None)
        # PyTorch's own attention reads this linear layer's weights without calling it.
        if 4 * elements < _KEPT_BYTES or isinstance(module, NonDynamicallyQuantizableLinear):
            self._load(module, ())
            return
        if self._in_rows(module, elements):
            return
        empty = {name: _slot(module, name)[name] for name in self._own}

        def drop(module: torch.nn.Module, args: object, output: object) -> None:
            for name, tensor in empty.items():
                _slot(module, name)[name] = tensor

        module.register_forward_pre_hook(self._load)
        module.register_forward_hook(drop, always_call=True)

    def _in_rows(self, module: torch.nn.Module, elements: int) -> bool:
        """Let a module with a matrix too large for memory read the rows that it needs; False when it cannot."""
        key = self._own.get("weight")
        if 4 * elements <= _WHOLE_BYTES or key is None or not has_rows(self._checkpoint, key):
            return False
        rows = _Rows(self._checkpoint, key, self._dtype)
        if type(module) is torch.nn.Linear:
            self._keep_bias(module)
            module.forward = lambda x: rows.linear(x, module.bias)  # type: ignore[method-assign, assignment]
        elif isinstance(module, torch.nn.Embedding):
            empty = module._parameters["weight"]
            module.register_forward_pre_hook(rows.fill)
            module.register_forward_hook(lambda *_: module._parameters.update(weight=empty), always_call=True)
        else:
            return False
        return True

    def _keep_bias(self, module: torch.nn.Linear) -> None:
        if (key := self._own.get("bias")) is not None:
            bias = float32_tensor(self._checkpoint, key).to(self._dtype)
            module.bias = torch.nn.Parameter(bias, requires_grad=False)

    def _load(self, module: torch.nn.Module, args: object) -> None:
        for name, key in self._own.items():
            tensor = float32_tensor(self._checkpoint, key)
            if tensor.is_floating_point():
                tensor = tensor.to(self._dtype)
            slot = _slot(module, name)
            slot[name] = torch.nn.Parameter(tensor, requires_grad=False) if slot is module._parameters else tensor


class _Rows:
    """A stored matrix [rows, columns] of which some rows are in memory at a time."""

    def __init__(self, checkpoint: Checkpoint, key: str, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._key = key
        self._dtype = dtype
        self._shape = checkpoint.shape_of(key)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return `x @ matrix.T + bias`, computed for some rows at a time."""
        step = max(1, _WHOLE_BYTES // (4 * self._shape[1]))
        parts = [
            torch.nn.functional.linear(x, self._read(start, start + step)) for start in range(0, self._shape[0], step)
        ]
        whole = torch.cat(parts, dim=-1)
        return whole if bias is None else whole + bias

    def fill(self, module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        """Give an embedding a matrix whose rows for these tokens are there; the others take no memory until written."""
        matrix = torch.empty(self._shape, dtype=self._dtype)
        for row in args[0].unique().tolist():
            matrix[row] = self._read(row, row + 1)[0]
        module._parameters["weight"] = torch.nn.Parameter(matrix, requires_grad=False)

    def _read(self, start: int, stop: int) -> torch.Tensor:
        return float32_rows(self._checkpoint, self._key, start, stop).to(self._dtype)


def _slot(module: torch.nn.Module, name: str) -> dict[str, torch.Tensor | None]:
    """Return the dict of a module that holds a parameter or buffer."""
    slots: dict[str, torch.Tensor | None] = (
        module._parameters if name in module._parameters else module._buffers  # type: ignore[assignment]
    )
    return slots
