"""Prepare the worker's process, then become the worker: fixed addresses, and an end with its parent.

Both are inherited over `exec`. A step of its own, because code between fork and exec is unsafe beside threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

#: Source: sys/personality.h and sys/prctl.h.
ADDRESS_RANDOMIZATION_OFF = 0x0040000
QUERY = 0xFFFFFFFF
_PARENT_DEATH_SIGNAL = 1


def personality(flags: int) -> int:
    """Set the execution domain of this process, or ask for it with `QUERY`; -1 where that is not possible."""
    function = getattr(ctypes.CDLL(None), "personality", None)
    return int(function(ctypes.c_ulong(flags))) if function is not None else -1


def main() -> None:
    """Switch address randomization off and replace this process by the worker."""
    current = personality(QUERY)
    if current >= 0:  # a sandbox may forbid it: the plan is the same but for its bytes
        personality(current | ADDRESS_RANDOMIZATION_OFF)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    os.execv(sys.executable, [sys.executable, "-m", "mcpc.backends.trt.worker"])


if __name__ == "__main__":
    main()
