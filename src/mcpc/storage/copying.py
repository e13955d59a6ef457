"""Copy a tensor file in one read that also hashes it and shows its tensors to whoever watches."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from io import RawIOBase
from pathlib import Path

from mcpc.core.runner import Array
from mcpc.storage.safetensors import PIECE_BYTES, Entry, numpy_dtype, read_bytes

#: Called with each piece of each tensor, flat, in order; never by two threads at a time.
Watch = Callable[[Entry, Array], None]

#: Pieces that are read, but not yet hashed, watched and written.
_IN_FLIGHT = 3


def copy_tensor_file(source: Path, target: Path, entries: Sequence[Entry], watch: Watch) -> str:
    """Copy a safetensors file, and return the hex SHA-256 of its bytes.

    Reading, hashing, watching and writing overlap, so that the copy takes as long as the slowest of them.

    Args:
        source: The file.
        target: Its copy; an existing file is replaced.
        entries: The tensors to be watched, each of this file.
        watch: Sees them.

    Raises:
        OSError: Reading or writing failed.
    """
    digest = hashlib.sha256()
    with ExitStack() as stack:
        read = stack.enter_context(source.open("rb", buffering=0))
        written = stack.enter_context(target.open("wb", buffering=0))
        # One thread for each: they run beside each other, and each sees the pieces in order.
        stages = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(3)]
        waiting: list[list[Future[object]]] = []
        for length, watched in _pieces(entries, source.stat().st_size):
            piece = read_bytes(read, length)
            waiting.append(
                [
                    stages[0].submit(digest.update, piece.data),
                    stages[1].submit(_show, watched, piece, watch),
                    stages[2].submit(_write, written, piece.data),
                ]
            )
            if len(waiting) == _IN_FLIGHT:
                _finish(waiting.pop(0))
        for futures in waiting:
            _finish(futures)
    return digest.hexdigest()


def _pieces(entries: Sequence[Entry], size: int) -> Iterator[tuple[int, list[Entry]]]:
    """Yield the file in pieces that hold whole elements: (bytes, the tensors that lie there; several when tied)."""
    places: dict[tuple[int, int], list[Entry]] = {}
    for entry in entries:
        if entry.length:
            places.setdefault((entry.offset, entry.length), []).append(entry)
    position = 0
    for (offset, length), here in sorted(places.items()):
        yield from ((part, []) for part in _parts(offset - position))
        yield from ((part, here) for part in _parts(length))
        position = offset + length
    yield from ((part, []) for part in _parts(size - position))


def _parts(length: int) -> Iterator[int]:
    for start in range(0, length, PIECE_BYTES):
        yield min(PIECE_BYTES, length - start)


def _write(file: RawIOBase, piece: memoryview) -> None:
    start, done = file.tell(), 0
    while done < len(piece):
        done += file.write(piece[done:]) or 0
    if hasattr(os, "posix_fadvise"):
        # Linux then begins to bring the piece to the disk; otherwise it would begin when the whole file is in memory.
        os.posix_fadvise(file.fileno(), start, len(piece), os.POSIX_FADV_DONTNEED)


def _show(entries: Sequence[Entry], piece: Array, watch: Watch) -> None:
    for entry in entries:
        watch(entry, piece.view(numpy_dtype(entry.dtype)))


def _finish(futures: Sequence[Future[object]]) -> None:
    wait(futures)
    for future in futures:
        future.result()
