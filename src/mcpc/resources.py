"""Find the data that ships with mcpc: `templates/`, `schemas/` and the coverage table, in a source tree or a wheel."""

from __future__ import annotations

from pathlib import Path

from mcpc.errors import InternalError

_HERE = Path(__file__).resolve().parent
_ROOTS = (_HERE / "_data", _HERE.parent.parent)  # wheel, source tree


def _find(name: str) -> Path:
    for root in _ROOTS:
        if (root / name).is_dir():
            return root / name
    raise InternalError(f"the shipped folder {name!r} is missing", where=str(_HERE), hint="reinstall mcpc")


def templates_dir(kind: str = "") -> Path:
    """Return the folder of shipped templates, or its sub-folder `kind` (models, recipes, targets, ...)."""
    return _find("templates") / kind


def schemas_dir() -> Path:
    """Return the folder of the generated JSON Schemas."""
    return _find("schemas")


def coverage_file() -> Path:
    """Return the table of what was measured for each model type."""
    return _find("docs") / "coverage.json"


def source_root() -> Path | None:
    """Return the root of the source tree, or None when mcpc runs from an installed wheel."""
    root = _ROOTS[1]
    return root if (root / "pyproject.toml").is_file() and (root / "src" / "mcpc").is_dir() else None
