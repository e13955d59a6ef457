"""Run `mcpc convert` in a child process of limited time and memory.

The child is forked from a parent that has imported torch and its exporter: that takes longer than converting a tiny
model, and is the same for all of them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Outcome:
    """What the command did.

    Attributes:
        code: Its exit code; negative when a signal ended it, None when it ran out of time.
        document: What it printed with `--json`; {} when it printed nothing.
        words: Last line of its standard error.
    """

    code: int | None
    document: Mapping[str, Any]
    words: str


def warm_up() -> None:
    """Import and initialise what every conversion needs, without starting a thread."""
    import mcpc.cli.app
    import mcpc.export.convert
    import mcpc.export.reference
    import mcpc.workflows.checking
    import mcpc.workflows.convert  # noqa: F401

    torch.onnx.export(torch.nn.Linear(2, 3).eval(), (torch.ones(2, 2),), dynamo=True, verbose=False)


def convert(checkpoint: Path, package: Path, time_limit_s: float, memory_limit_bytes: int) -> Outcome:
    """Convert a checkpoint; the child's output lies beside the package until it is read."""
    out, err = package.with_suffix(".out"), package.with_suffix(".err")
    arguments = ["mcpc", "convert", str(checkpoint), "-o", str(package), "--json"]
    process = multiprocessing.get_context("fork").Process(target=_run, args=(arguments, out, err, memory_limit_bytes))
    process.start()
    process.join(time_limit_s)
    if process.is_alive():
        process.kill()
        process.join()
        return Outcome(None, {}, f"took longer than {time_limit_s:g} s")
    text = out.read_text(encoding="utf-8")
    lines = err.read_text(encoding="utf-8").strip().splitlines()
    return Outcome(
        process.exitcode, json.loads(text) if text.strip() else {}, lines[-1] if lines else f"code {process.exitcode}"
    )


def _run(arguments: list[str], out: Path, err: Path, memory_limit_bytes: int) -> None:
    from mcpc.cli.app import main

    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    for number, path in ((1, out), (2, err)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, number)
    sys.argv = arguments
    main()
