"""What an engine folder holds: read from the sidecars, and checked against the engine files. No engine is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcpc.checkpoint.index import read_json
from mcpc.errors import BadInputError, Problem

ENGINES = "engines.json"
SIDECAR_SUFFIX = ".engine.json"


def engines_summary(path: Path) -> dict[str, Any]:
    """Return the facts of an engine folder, or of one `.engine` file and its sidecar.

    Raises:
        BadInputError: A sidecar or an engine file is missing; every finding is listed.
    """
    root, sidecars = _sidecars(path)
    engines, problems = [], []
    for sidecar in sidecars:
        engine = sidecar.with_suffix("")
        if not engine.is_file():
            problems.append(Problem("the engine of this sidecar is missing", sidecar.name, engine.name))
            continue
        engines.append({"file": engine.name, "file_bytes": engine.stat().st_size, **read_json(sidecar, "")})
    lonely = [file for file in root.glob("*.engine") if path.is_dir() and not _sidecar(file).is_file()]
    problems += [Problem("the sidecar of this engine is missing", file.name, _sidecar(file).name) for file in lonely]
    if problems:
        raise BadInputError(f"incomplete engine folder: {problems[0]}", where=str(root), problems=problems,
                            hint="mcpc build-engine PACKAGE -o DIR --target NAME makes it again")  # fmt: skip
    index = read_json(root / ENGINES, "") if (root / ENGINES).is_file() and path.is_dir() else {}
    return {"total_bytes": sum(int(engine["file_bytes"]) for engine in engines), "index": index, "engines": engines}


def _sidecar(engine: Path) -> Path:
    return engine.with_name(engine.name + ".json")


def _sidecars(path: Path) -> tuple[Path, list[Path]]:
    if path.is_dir():
        return path, sorted(path.glob(f"*{SIDECAR_SUFFIX}"))
    sidecar = _sidecar(path)
    if not sidecar.is_file():
        hint = "an engine says nothing without a GPU; mcpc build-engine writes the sidecar beside it"
        raise BadInputError("the sidecar of this engine is missing", str(path), expected=sidecar.name, hint=hint)
    return path.parent, [sidecar]
