"""Weights read in bands of rows, and tensors made piece by piece: memory does not grow with a tensor."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from mcpc.core.runner import Array
from mcpc.errors import BadInputError
from mcpc.graph.widen import WidenedTensor

#: Elements of a band: 1 MiB of float32, so that a band and the temporaries of a kernel stay in the cache.
_BAND_ELEMENTS = 1 << 18
_MAX_THREADS = 8
ResultT = TypeVar("ResultT")


class Source:
    """A 2-D float weight [rows, columns] whose values are read as float32, a band of rows at a time."""

    def __init__(self, tensor: ir.TensorProtocol) -> None:
        self._tensor = tensor.source if isinstance(tensor, WidenedTensor) else tensor
        self.name = str(tensor.name)
        self.shape = tuple(int(size) for size in tensor.shape.numpy())
        self.key = bytes_key(tensor)

    def bands(self, multiple: int = 1) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of bands of rows; every begin is a multiple of `multiple`."""
        rows, columns = self.shape
        step = max(1, _BAND_ELEMENTS // (max(columns, 1) * multiple)) * multiple
        for begin in range(0, rows, step):
            yield begin, min(begin + step, rows)

    def rows(self, begin: int, end: int) -> Array:
        """Return float32 [end - begin, columns].

        Raises:
            BadInputError: A value is not finite.
        """
        columns = self.shape[1]
        if isinstance(self._tensor, ir.ExternalTensor):
            dtype = self._tensor.dtype.numpy()
            offset = (self._tensor.offset or 0) + begin * columns * dtype.itemsize
            # Read, not mapped: the pages of a mapping would count as this process's memory.
            band = np.fromfile(self._tensor.path, dtype, (end - begin) * columns, offset=offset).reshape(-1, columns)
        else:
            band = self._tensor.numpy()[begin:end]
        values = band.astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise BadInputError(
                "the weight holds non-finite values",
                where=self.name,
                hint="repair the checkpoint; such a weight cannot be quantized",
            )
        return values

    def map(self, work: Callable[[Array], ResultT], multiple: int) -> Iterator[tuple[int, int, ResultT]]:
        """Yield (begin, end, work(rows)) of every band in order; a few bands are worked on at a time.

        numpy lets go of the interpreter lock inside its loops, so threads do use several cores.
        """
        threads = min(os.cpu_count() or 1, _MAX_THREADS)
        waiting: deque[Future[tuple[int, int, ResultT]]] = deque()

        def band(begin: int, end: int) -> tuple[int, int, ResultT]:
            return begin, end, work(self.rows(begin, end))

        with ThreadPoolExecutor(threads) as pool:
            for begin, end in self.bands(multiple):
                waiting.append(pool.submit(band, begin, end))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            for future in waiting:
                yield future.result()


def bytes_key(tensor: ir.TensorProtocol) -> Hashable:
    """Return what identifies the bytes of a tensor: tied tensors have equal keys."""
    if isinstance(tensor, WidenedTensor):
        return bytes_key(tensor.source)
    if isinstance(tensor, ir.ExternalTensor):
        return (str(tensor.path), tensor.offset, tensor.length)
    return id(tensor)


class StreamedTensor(ir.LazyTensor):
    """A tensor whose bytes are made piece by piece when it is written.

    Attributes:
        pieces: Returns consecutive pieces of the row-major storage; 4-bit elements are packed.
        key: Equal for tensors of equal bytes, which are then stored once.
    """

    __slots__ = ("key", "pieces")

    def __init__(
        self,
        pieces: Callable[[], Iterator[Array]],
        dtype: ir.DataType,
        shape: tuple[int, ...],
        name: str,
        key: Hashable,
    ) -> None:
        def read() -> ir.TensorProtocol:
            raw = np.concatenate([np.ascontiguousarray(piece).reshape(-1).view(np.uint8) for piece in pieces()])
            if dtype.bitwidth < 8:
                return ir.PackedTensor(raw, dtype, shape=ir.Shape(shape), name=name)
            return ir.Tensor(raw.view(dtype.numpy()).reshape(shape), name=name)

        super().__init__(read, dtype=dtype, shape=ir.Shape(shape), name=name)
        self.pieces = pieces
        self.key = key
