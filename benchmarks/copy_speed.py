"""Speed of bringing weights into a package: a copy that hashes, looks for NaN and gathers statistics, beside `cp`.

    python benchmarks/copy_speed.py [--gigabytes 3] [--folder DIR] [--output docs/figures/copy_speed.json]

Takes turns, three each, on one file of random float16; every turn writes a new file and syncs it, so that the disk is
part of it for all alike. `cp` only copies. `three reads` is what one read replaces: look for NaN, copy, hash the copy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mcpc.checkpoint.finite import FiniteCheck
from mcpc.checkpoint.statistics import Statistics
from mcpc.core.runner import Array
from mcpc.storage.copying import copy_tensor_file
from mcpc.storage.digests import sha256_of_file
from mcpc.storage.safetensors import Entry, Plan, read_header, write_stream

TURNS = 3
_SHAPE = (1 << 14, 1 << 12)  # 128 MB of float16


def one_read(source: Path, target: Path) -> None:
    """Copy as convert does."""
    check, figures = FiniteCheck(), Statistics()

    def watch(entry: Entry, piece: Array) -> None:
        check.see(entry, piece)
        figures.see(entry.name, piece)

    copy_tensor_file(source, target, list(read_header(source).values()), watch)


def three_reads(source: Path, target: Path) -> None:
    """Look for NaN, copy, and hash the copy, one after the other."""
    check = FiniteCheck()
    for entry in read_header(source).values():
        for piece in entry.pieces():
            check.see(entry, piece)
    cp(source, target)
    sha256_of_file(target)


def cp(source: Path, target: Path) -> None:
    """Copy with the system's own tool."""
    subprocess.run(["cp", "--reflink=never", str(source), str(target)], check=True)


WAYS: dict[str, Callable[[Path, Path], None]] = {"cp": cp, "one read": one_read, "three reads": three_reads}


def timed(way: Callable[[Path, Path], None], source: Path, target: Path) -> float:
    """Return the seconds of one copy, on the disk."""
    os.sync()
    begun = time.perf_counter()
    way(source, target)
    descriptor = os.open(target, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    taken = time.perf_counter() - begun
    target.unlink()
    return taken


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    count = max(1, round(options.gigabytes * 1e9 / (2 * _SHAPE[0] * _SHAPE[1])))
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source = Path(folder) / "model.safetensors"
        with source.open("wb") as file:
            arrays = (random.standard_normal(_SHAPE, np.float32).astype(np.float16) for _ in range(count))
            write_stream(file, [Plan(f"{number}", "float16", _SHAPE) for number in range(count)], arrays)
        taken: dict[str, list[float]] = {name: [] for name in WAYS}
        for turn in range(TURNS):
            for name, way in WAYS.items():
                taken[name].append(timed(way, source, Path(folder) / f"{turn}"))
        size = source.stat().st_size
    rates = {name: size / 1e6 / statistics.median(times) for name, times in taken.items()}
    figures = {
        "bytes": size,
        "mb_per_s": {name: round(rate) for name, rate in rates.items()},
        "share_of_cp": {name: round(rate / rates["cp"], 2) for name, rate in rates.items()},
    }
    print(json.dumps(figures))
    if options.output:
        options.output.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
