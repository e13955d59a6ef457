"""GPTQ and AWQ matrices that stay in four bits: symmetric, in groups along K, no reordering of K.

    W[n, k] = scales[k // group, n] * (code[k, n] - 8)        code in 0..15

GPTQ packs eight k into an int32 (`qweight` int32 [K/8, N], lowest nibble first), AWQ eight n (`qweight` int32 [K, N/8],
nibble i holds column `AWQ_ORDER[i]` of the eight). Both are [K,N] already, as the canonical INT4 form is.

Source: AutoGPTQ `qlinear_cuda_old.py` (`pack`; zero points are stored less one); AutoAWQ `utils/packing_utils.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mcpc.core.runner import Array
from mcpc.errors import Problem
from mcpc.storage.safetensors import Entry

#: Group sizes that ONNX Runtime's MatMulNBits and TensorRT both take.
GROUPS = (32, 64, 128)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
METHODS = ("gptq", "awq")
_CODES = "qweight"
_PER_WORD = 8
_MIDDLE = 8
_PIECE_WORDS = 1 << 19


@dataclass(frozen=True)
class PackedInt4:
    """One matrix in four bits.

    Attributes:
        method: `gptq` or `awq`.
        codes: Where the packed codes lie.
        scales: Where the scales lie, [K / group, N].
        group: Elements of K that share a scale.
        depth: K.
        columns: N.
    """

    method: str
    codes: Entry
    scales: Entry
    group: int
    depth: int
    columns: int

    def entry(self) -> Entry:
        """Return the matrix as a tensor of the model: int4 [N,K] over the bytes of the codes."""
        codes = self.codes
        return Entry(codes.name, "int4", (self.columns, self.depth), codes.file, codes.offset, codes.length)

    def packed(self) -> Iterator[Array]:
        """Yield the matrix [K,N] as ONNX packs signed four-bit integers, uint8, some rows at a time."""
        words = self.codes.read().view(np.uint32)
        step = max(1, _PIECE_WORDS // words.shape[1])
        shifts = np.arange(0, 4 * _PER_WORD, 4, dtype=np.uint32)
        for start in range(0, words.shape[0], step):
            piece = words[start : start + step]
            if self.method == "gptq":
                codes = (piece[:, None, :] >> shifts[None, :, None]).reshape(-1, self.columns)
            else:
                by_nibble = piece[:, :, None] >> shifts
                codes = by_nibble[:, :, np.argsort(AWQ_ORDER)].reshape(-1, self.columns)
            # Code - 8 in two's complement is the code with its highest bit flipped.
            nibbles = ((codes & 0xF) ^ 0x8).astype(np.uint8).reshape(-1)
            yield nibbles[0::2] | (nibbles[1::2] << 4)

    def scale_values(self) -> Array:
        """Return the scales in float32 [K / group, N]."""
        return self.scales.read().astype(np.float32)


def packed_matrices(
    settings: Mapping[str, Any], tensors: Mapping[str, Entry]
) -> tuple[dict[str, PackedInt4], set[str], list[Problem]]:
    """Return the four-bit matrices by the name of their codes, the names that belong to them, and what does not fit."""
    found: dict[str, PackedInt4] = {}
    parts: set[str] = set()
    problems: list[Problem] = []
    for name in sorted(tensors):
        if name.rpartition(".")[2] != _CODES:
            continue
        base = name.removesuffix(_CODES)
        own = {part: tensors.get(base + part) for part in (_CODES, "scales", "qzeros", "g_idx")}
        parts |= {base + part for part, entry in own.items() if entry is not None}
        try:
            found[name] = _matrix(settings, own)
        except _DoesNotFitError as error:
            problems.append(Problem(error.args[0], name, *error.args[1:]))
    return found, parts, problems


class _DoesNotFitError(Exception):
    """Arguments: what, expected, got."""


def _matrix(settings: Mapping[str, Any], own: Mapping[str, Entry | None]) -> PackedInt4:
    method = str(settings["quant_method"])
    codes, scales, zeros, order = own[_CODES], own["scales"], own["qzeros"], own["g_idx"]
    if codes is None or scales is None or zeros is None:
        raise _DoesNotFitError("its scales or zero points are missing", "scales and qzeros", "not both")
    if len(codes.shape) != 2 or codes.dtype != "int32" or len(scales.shape) != 2 or 0 in (*codes.shape, *scales.shape):
        raise _DoesNotFitError("not a packed matrix", "int32 of two dimensions", f"{codes.dtype}{list(codes.shape)}")
    rows, columns = codes.shape
    depth, width = (rows * _PER_WORD, columns) if method == "gptq" else (rows, columns * _PER_WORD)
    group = depth // scales.shape[0]
    if scales.shape != (depth // group, width) or depth % group:
        raise _DoesNotFitError(
            "the scales do not fit", f"[K / group, {width}] for K = {depth}", str(list(scales.shape))
        )
    if group not in GROUPS:
        raise _DoesNotFitError("a group size that runtimes do not take", " or ".join(map(str, GROUPS)), str(group))
    stored = _MIDDLE - 1 if method == "gptq" and settings.get("checkpoint_format", "gptq") == "gptq" else _MIDDLE
    word = np.uint32(int(f"{stored:x}" * _PER_WORD, 16))
    if not (zeros.read().view(np.uint32) == word).all():
        raise _DoesNotFitError("its zero points are not symmetric", f"all {_MIDDLE}", "others")
    if order is not None and not np.array_equal(order.read(), np.arange(depth) // group):
        raise _DoesNotFitError("K is reordered (desc_act)", "groups in the order of K", "another order in g_idx")
    return PackedInt4(method, codes, scales, group, depth, width)
