"""Time of one decoding step: a float package and quantized ones, taken in turns in one run.

    python benchmarks/decode_step.py FLOAT_PACKAGE QUANTIZED_PACKAGE ... [--steps 300] [--past 64] [--threads 2]

The decoder of each package runs one new token over a cache of `--past` tokens, at ONNX Runtime's default accuracy level
(what a user of the package gets), and at level 1 (what the verification uses). Printed are medians in milliseconds and
the ratio to the first package; exit code 1 when a quantized package is slower than the float one at the default level.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from mcpc.backends.ort import OrtRunner, open_model
from mcpc.core.runner import Array
from mcpc.package import Manifest, Package

WARM_UP_STEPS = 20
#: Steps that one package runs before the next has its turn: load of the machine then meets all alike.
TURN_STEPS = 10


def feeds_of(manifest: Manifest, past: int) -> dict[str, Array]:
    """Return seeded inputs of the decoder: one token after `past` cached ones."""
    generator = np.random.default_rng(0)
    sizes = {"batch": 1, "sequence": 1, "past": past}
    feeds: dict[str, Array] = {}
    for tensor in manifest.by_role("decoder").inputs:
        shape = tensor.spec().concrete(sizes)
        if tensor.name == "position_ids":
            feeds[tensor.name] = np.full(shape, past, np.int64)
        elif tensor.dtype.startswith("int"):
            feeds[tensor.name] = np.ones(shape, tensor.dtype)  # a mask that hides nothing, or a token
        else:
            feeds[tensor.name] = generator.standard_normal(shape).astype(np.float32)
    return feeds


def time_in_turns(runners: list[OrtRunner], feeds: list[dict[str, Array]], steps: int) -> list[float]:
    """Return the median milliseconds of a step for each runner."""
    times_ms: list[list[float]] = [[] for _ in runners]
    for runner, feed in zip(runners, feeds, strict=True):
        for _ in range(WARM_UP_STEPS):
            runner.run(feed)
    while len(times_ms[0]) < steps:
        for runner, feed, taken in zip(runners, feeds, times_ms, strict=True):
            for _ in range(TURN_STEPS):
                begun = time.perf_counter()
                runner.run(feed)
                taken.append((time.perf_counter() - begun) * 1e3)
    return [statistics.median(taken) for taken in times_ms]


def main() -> int:
    """Time the packages of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("packages", nargs="+", type=Path, help="the float package first")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--past", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    packages = [Package.open(path) for path in arguments.packages]
    feeds = [feeds_of(package.manifest, arguments.past) for package in packages]
    slower = False
    for level in (None, 1):
        runners = [
            open_model(
                package.component_path(package.manifest.by_role("decoder").name),
                accuracy_level=level,
                threads=arguments.threads,
            )
            for package in packages
        ]
        medians = time_in_turns(runners, feeds, arguments.steps)
        print(f"accuracy level {'default' if level is None else level}")
        for path, median in zip(arguments.packages, medians, strict=True):
            print(f"  {median:8.3f} ms  {median / medians[0]:5.2f} x  {path.name}")
        slower |= level is None and any(median > medians[0] for median in medians[1:])
    if slower:
        print("a quantized package is slower than its float parent", file=sys.stderr)
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
