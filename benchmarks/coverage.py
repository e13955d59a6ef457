"""Coverage as a number: convert a tiny checkpoint of every multimodal model type that transformers lists.

    python benchmarks/coverage.py                  every type; writes docs/coverage.json and docs/coverage.md
    python benchmarks/coverage.py --only clip llava    these types; the other rows stay as they are
    python benchmarks/coverage.py --check [--only ...]  convert again and compare with the committed table (default: ten
                                                        verified or failed rows, other ones each day)

A row is a model type with one of its architectures. Its checkpoint (`benchmarks/tiny/`) is converted by the command
`mcpc convert` in a child process of limited time and memory, which compares every component and the whole model with
PyTorch at three sizes. A type without a tiny checkpoint gets a folder with nothing but its name, to show that it is
refused by name. Exit code 1 when `--check` finds another status than the table has.
"""

from __future__ import annotations

import argparse
import datetime as dt
import fcntl
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny import CHECKPOINTS, child
from tiny.build import write
from tiny.table import render

from mcpc.errors import ExitCode
from mcpc.storage.safetensors import Plan, write_stream
from mcpc.templates.coverage import Row, read_table

DOCS = Path(__file__).resolve().parent.parent / "docs"
TABLE = DOCS / "coverage.json"
TASKS = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ", "ZERO_SHOT_IMAGE_CLASSIFICATION")
TIME_LIMIT_S = 400
MEMORY_LIMIT_BYTES = 12 << 30
ROTATING_ROWS = 10
_STATUS: Mapping[int | None, str] = {ExitCode.DONE: "verified", ExitCode.UNSUPPORTED: "refused"}


def listed_types() -> dict[tuple[str, str], tuple[str, ...]]:
    """Return {(model type, architecture): tasks} as transformers lists them."""
    from transformers.models.auto import modeling_auto

    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for task in TASKS:
        mapping: Mapping[str, str | Sequence[str]] = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        for model_type, names in mapping.items():
            for name in [names] if isinstance(names, str) else names:
                found[model_type, name] = (*found.get((model_type, name), ()), task)
    return dict(sorted(found.items()))


def measure(key: tuple[str, str], tasks: tuple[str, ...], folder: Path) -> Row:
    """Make the checkpoint of one row and convert it."""
    model_type, architecture = key
    shutil.rmtree(folder, ignore_errors=True)
    checkpoint = folder / "checkpoint"
    if key in CHECKPOINTS:
        try:
            write(architecture, CHECKPOINTS[key](), checkpoint)
        except Exception as error:  # noqa: BLE001 (transformers raises many unrelated types)
            traceback.print_exc()
            return Row(model_type, architecture, tasks, "failed", f"no tiny checkpoint: {_line(str(error))}")
    else:
        _write_name_only(model_type, architecture, checkpoint)
    outcome = child.convert(checkpoint, folder / "package", TIME_LIMIT_S, MEMORY_LIMIT_BYTES)
    document = outcome.document
    status = _STATUS.get(outcome.code, "failed")
    if status != "verified":
        words = [str(document[name]) for name in ("message", "got") if document.get(name)] or [outcome.words]
        return Row(model_type, architecture, tasks, status, _line(": ".join(words)))
    return _verified(model_type, architecture, tasks, document)


def _verified(model_type: str, architecture: str, tasks: tuple[str, ...], report: Mapping[str, Any]) -> Row:
    if report["checked"] != "executed":
        raise SystemExit(f"{model_type}: exit code 0, but checked is {report['checked']!r}")
    figures = report["verification"]
    errors = [out["max_abs"] for component in figures["components"] for out in component["outputs"].values()]
    errors.append(figures["chain"]["logits"]["max_abs"])
    judged = sum(len(component["arbitrated"]) for component in figures["components"])
    return Row(model_type, architecture, tasks, "verified", "", report["template"], float(f"{max(errors):.1e}"),
               judged, report["digest"])  # fmt: skip


def _write_name_only(model_type: str, architecture: str, root: Path) -> None:
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": [architecture]}))
    with (root / "model.safetensors").open("wb") as file:
        write_stream(file, [Plan("weight", "float32", (2,))], iter([np.ones(2, np.float32)]))


def _line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:200]


def committed_rows() -> dict[tuple[str, str], Row]:
    """Return the committed rows."""
    rows = read_table(TABLE).rows if TABLE.is_file() else ()
    return {(row.model_type, row.architecture): row for row in rows}


def write_table(rows: Iterable[Row]) -> None:
    """Write docs/coverage.json and docs/coverage.md."""
    from mcpc.workflows.environment import tool_versions

    ordered = [asdict(row) for row in sorted(rows, key=lambda row: (row.model_type, row.architecture))]
    document = {"versions": tool_versions(), "rows": ordered}
    TABLE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    TABLE.with_suffix(".md").write_text(render(document), encoding="utf-8")


def update_table(row: Row, listed: Collection[tuple[str, str]]) -> None:
    """Put one row into the table; other runs may be writing theirs."""
    with (DOCS / ".coverage.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = {key: known for key, known in committed_rows().items() if key in listed}
        write_table((rows | {(row.model_type, row.architecture): row}).values())


def rotating(rows: Mapping[tuple[str, str], Row], day: int) -> list[str]:
    """Return the model types of today: a window over the rows that were converted, moved on each day."""
    types = sorted({row.model_type for row in rows.values() if row.status != "refused"})
    return [types[(day * ROTATING_ROWS + offset) % len(types)] for offset in range(min(ROTATING_ROWS, len(types)))]


def main() -> int:
    """Measure the rows that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="model types; default: all")
    parser.add_argument("--check", action="store_true", help="compare with the committed table, write nothing")
    parser.add_argument("--keep", type=Path, help="keep checkpoints and packages in this folder")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a child forked from a process with threads may hang
    child.warm_up()
    listed, committed = listed_types(), committed_rows()
    only = options.only or (rotating(committed, dt.date.today().toordinal()) if options.check else None)
    chosen = {key: tasks for key, tasks in listed.items() if only is None or key[0] in only}
    if only and (unknown := sorted(set(only) - {key[0] for key in listed})):
        parser.error(f"transformers lists no such type: {', '.join(unknown)}")
    changed = 0
    for key, tasks in chosen.items():
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            row = measure(key, tasks, options.keep / "-".join(key) if options.keep else Path(scratch))
        error = "" if row.largest_error is None else f"{row.largest_error:.0e}"
        seconds = time.perf_counter() - begun
        print(f"{row.model_type:28} {row.status:9} {seconds:5.1f} s  {error} {row.reason}", flush=True)
        if options.check and row.status != (before := committed[key].status if key in committed else "no row"):
            print(f"{row.model_type}: the table says {before}", file=sys.stderr)
            changed += 1
        if not options.check:
            update_table(row, listed)
    return 1 if changed else 0


if __name__ == "__main__":
    raise SystemExit(main())
