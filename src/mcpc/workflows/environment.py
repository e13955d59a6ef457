"""Facts of this process for `report.json`: peak memory and tool versions. They stay outside the package digest."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import platform
import resource
import sys
from pathlib import Path

from mcpc import __version__

_M_MMAP_THRESHOLD = -3
_TOOLS = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "numpy")


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process so far, in bytes.

    Linux carries `ru_maxrss` over from the process that started this one, however large that was; the high-water mark
    of this program's own memory is `VmHWM`. Source: proc(5), getrusage(2).
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def give_back_large_blocks() -> None:
    """Make this process return memory blocks of 2 MB and more to the system as soon as they are freed.

    The C library keeps freed blocks of up to 32 MB otherwise, between others that are still in use: with weights that
    come and go, half a gigabyte of a 1B model. Where the C library has no such setting, nothing changes.

    Source: mallopt(3), M_MMAP_THRESHOLD; malloc_trim(3).
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, 2 << 20)
        library.malloc_trim(0)


def tool_versions() -> dict[str, str]:
    """Return the versions of what made a package."""
    versions = {"mcpc": __version__, "python": platform.python_version()}
    for name in _TOOLS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
