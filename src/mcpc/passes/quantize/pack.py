"""Four-bit integers, two to a byte.

Source: ONNX IR specification, "4 bit integer types": pairs in row-major order, the first element in the low nibble,
the last byte padded with zero when the count is odd.
"""

from __future__ import annotations

import numpy as np

from mcpc.core.runner import Array


def pack_int4(values: Array) -> Array:
    """Return uint8 [ceil(count / 2)] for int8 values of any shape, each in [-8, 7]."""
    flat = values.reshape(-1)
    packed = (flat[0::2] & 0x0F).view(np.uint8)
    packed[: flat.size // 2] |= flat[1::2].view(np.uint8) << 4
    return packed


def unpack_int4(packed: Array, count: int) -> Array:
    """Return int8 [count] in [-8, 7] for the packed bytes uint8 [ceil(count / 2)]."""
    nibbles = np.empty(packed.size * 2, np.int8)
    nibbles[0::2] = (packed << 4).view(np.int8) >> 4  # an arithmetic shift carries the sign down
    nibbles[1::2] = packed.view(np.int8) >> 4
    return nibbles[:count]
