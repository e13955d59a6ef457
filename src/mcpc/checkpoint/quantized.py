"""Checkpoints that are stored quantized: block-scaled FP8 and symmetric four bits are read, others refused by name.

Source: https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/README_WEIGHTS.md (`weight_scale_inv`, one per block of
`weight_block_size`; a matrix is the FP8 values times the scale of their block, edge blocks are smaller).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mcpc.checkpoint.packed import METHODS, PackedInt4, packed_matrices
from mcpc.core.runner import Array
from mcpc.errors import BadInputError, Problem, UnsupportedError
from mcpc.storage.safetensors import Entry

FP8 = "float8_e4m3fn"
_SCALE = "_scale_inv"
_SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
_PIECE_ELEMENTS = 1 << 22
#: Tensors of quantized layouts that are no weights of the model: scales, zero points, codebooks, permutations.
_EXTRA = re.compile(
    r"\.(qzeros|scales|g_idx|perm|absmax|quant_map|nested_absmax|nested_quant_map|SCB|weight_format|weight_scale"
    r"|weight_scale_inv|weight_scale_2|weight_zero_point|weight_shape|weight_g_idx|input_scale|activation_scale"
    r"|quant_state\..*)$"
)


@dataclass(frozen=True)
class BlockScale:
    """The scales of a block-scaled matrix.

    Attributes:
        entry: Where they lie, [ceil(rows / block rows), ceil(columns / block columns)].
        block: Rows and columns that share one scale.
    """

    entry: Entry
    block: tuple[int, int]

    def dequantized(self, weight: Entry) -> Iterator[Array]:
        """Yield the matrix in float32, some rows at a time: each product is rounded once, to float32."""
        values, scales = weight.read(), self.entry.read().astype(np.float32)
        rows, columns = weight.shape
        step = self.block[0] * max(1, _PIECE_ELEMENTS // (self.block[0] * columns))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            by_row = np.arange(start, stop) // self.block[0]
            by_column = np.arange(columns) // self.block[1]
            yield values[start:stop].astype(np.float32) * scales[by_row][:, by_column]


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the `quantization_config` of a config, or of its language model's."""
    for owner in (config, config.get("text_config")):
        found = owner.get("quantization_config") if isinstance(owner, Mapping) else None
        if isinstance(found, Mapping):
            return dict(found)
    return None


@dataclass(frozen=True)
class Weights:
    """The tensors of a checkpoint that are weights of the model.

    Attributes:
        tensors: Name -> where it lies.
        scales: Name of an FP8 matrix -> its scales.
        packed: Name of a four-bit matrix's codes -> what they mean.
    """

    tensors: Mapping[str, Entry]
    scales: Mapping[str, BlockScale] = field(default_factory=dict)
    packed: Mapping[str, PackedInt4] = field(default_factory=dict)


def weights_of(root: Path, config: Mapping[str, Any], tensors: Mapping[str, Entry]) -> Weights:
    """Tell the weights of a checkpoint from what only describes them.

    Raises:
        UnsupportedError: A method or layout that is not read, with the size of the checkpoint in 16 bits.
        BadInputError: A matrix has no scale or a scale no matrix; all of them are listed.
    """
    settings = quantization_of(config)
    if settings is None:
        narrow = sorted(name for name, entry in tensors.items() if entry.dtype.startswith("float8"))
        if narrow:
            raise BadInputError(
                f"FP8 tensors, but config.json has no quantization_config: {narrow[0]}", where=str(root),
                problems=[Problem("FP8 without a scale to go by", name) for name in narrow],
            )  # fmt: skip
        return Weights(dict(tensors))
    if settings.get("quant_method") in METHODS and _bits(settings) == 4:
        packed, parts, problems = packed_matrices(settings, tensors)
        if problems:
            raise _refusal(root, settings, tensors, problems)
        rest = {name: entry for name, entry in tensors.items() if name not in parts}
        return Weights({**rest, **{name: matrix.entry() for name, matrix in packed.items()}}, packed=packed)
    if settings.get("quant_method") != "fp8" or settings.get("activation_scheme", "dynamic") != "dynamic":
        raise _refusal(root, settings, tensors)
    return Weights(*_with_block_scales(root, settings, tensors))


def _with_block_scales(
    root: Path, settings: Mapping[str, Any], tensors: Mapping[str, Entry]
) -> tuple[dict[str, Entry], dict[str, BlockScale]]:
    problems: list[Problem] = []
    scales: dict[str, BlockScale] = {}
    for name, entry in sorted(tensors.items()):
        if name.endswith(_SCALE):
            owner = tensors.get(name.removesuffix(_SCALE))
            if owner is None or owner.dtype != FP8:
                got = "no such tensor" if owner is None else owner.dtype
                problems.append(Problem("a scale without its FP8 matrix", name, name.removesuffix(_SCALE), got))
        elif entry.dtype == FP8:
            scale = tensors.get(name + _SCALE)
            if scale is None:
                problems.append(Problem("an FP8 matrix without its scale", name, name + _SCALE, "no such tensor"))
                continue
            block = _block(settings, entry)
            expected = tuple(-(-size // step) for size, step in zip(entry.shape, block, strict=False))
            if len(entry.shape) != 2 or scale.shape != expected or scale.dtype not in _SCALE_DTYPES:
                got = f"{scale.dtype}{list(scale.shape)} for {list(entry.shape)}"
                problems.append(Problem("the scale does not fit its matrix", scale.name, str(list(expected)), got))
            scales[name] = BlockScale(scale, block)
    if problems:
        raise BadInputError(f"block-scaled FP8: {problems[0]}", where=str(root), problems=problems)
    return {name: entry for name, entry in tensors.items() if not name.endswith(_SCALE)}, scales


def _block(settings: Mapping[str, Any], weight: Entry) -> tuple[int, int]:
    """Return the rows and columns of a block; without a block size the matrix is one block."""
    size = settings.get("weight_block_size")
    if size is None:
        return (max(weight.shape, default=1), max(weight.shape, default=1))
    if not (isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)):
        raise BadInputError(
            "not a block size", where="config.json: quantization_config.weight_block_size",
            expected="[rows, columns]", got=repr(size),
        )  # fmt: skip
    return (size[0], size[1])


def _refusal(
    root: Path, settings: Mapping[str, Any], tensors: Mapping[str, Entry], problems: Sequence[Problem] = ()
) -> UnsupportedError:
    method = str(settings.get("quant_method") or "an unnamed method")
    size = widened_bytes(settings, tensors)
    if method == "fp8":
        method += f" with {settings.get('activation_scheme')} activations"
    what = f"in a layout that does not stay in four bits: {problems[0]}" if problems else "which mcpc does not read"
    return UnsupportedError(
        f"the weights are quantized by {method}, {what}",
        where=f"{root}: config.json: quantization_config",
        expected="float weights, block-scaled fp8, or symmetric four bits of gptq or awq",
        got=f"{sum(entry.length for entry in tensors.values()):,} bytes; in 16 bits they would be {size:,} bytes",
        hint="convert the float checkpoint that it was made from, then `mcpc quantize PACKAGE -o DIR --recipe int4`",
        problems=problems,
        details={"method": method, "widened_bytes": size},
    )


def widened_bytes(settings: Mapping[str, Any], tensors: Mapping[str, Entry]) -> int:
    """Return the bytes that the weights of a quantized checkpoint would have in 16 bits, from the headers alone."""
    bits = _bits(settings)
    elements = 0
    for name, entry in tensors.items():
        if _EXTRA.search(name):
            continue
        count = math.prod(entry.shape)
        packed = name.endswith((".qweight", ".weight_packed")) or (bits < 8 and entry.dtype == "uint8")
        elements += count * (8 * entry.length // max(count, 1)) // bits if packed else count
    return 2 * elements


def _bits(settings: Mapping[str, Any]) -> int:
    """Return the bits of one packed weight, by the keys that GPTQ, AWQ, bitsandbytes and compressed-tensors use."""
    if settings.get("load_in_4bit") or settings.get("_load_in_4bit"):
        return 4
    if settings.get("load_in_8bit") or settings.get("_load_in_8bit"):
        return 8
    groups = settings.get("config_groups")
    nested = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, Mapping) else []
    for owner in (settings, *nested):
        for key in ("bits", "w_bit", "num_bits"):
            if isinstance(owner.get(key), int) and owner[key] > 0:
                return int(owner[key])
    return 4
