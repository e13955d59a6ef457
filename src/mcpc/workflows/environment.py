"""Facts of this process for `report.json`: peak memory and tool versions. They stay outside the package digest."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import sys

from mcpc import __version__

_TOOLS = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "numpy")


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def tool_versions() -> dict[str, str]:
    """Return the versions of what made a package."""
    versions = {"mcpc": __version__, "python": platform.python_version()}
    for name in _TOOLS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
