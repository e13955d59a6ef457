"""A package whose weights stay in the checkpoint: `weights.json` in its folder says where that is.

The file names a place on this machine, so it is outside the package digest. The graphs name the tensor files relative
to the checkpoint's folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mcpc.errors import BadInputError, Problem

REFERENCE = "weights.json"


def write_reference(folder: Path, checkpoint: Path, files: Sequence[str]) -> None:
    """Record where the tensor files lie, and their size and time, by which a changed file is noticed."""
    root = checkpoint.resolve()
    text = json.dumps({"checkpoint": str(root), "files": {name: _state(root / name) for name in files}}, indent=2)
    (folder / REFERENCE).write_text(text + "\n", encoding="utf-8")


def weights_folder(folder: Path) -> Path:
    """Return the folder that external tensors of a graph in `folder` are relative to.

    Raises:
        BadInputError: The referenced files are gone or were changed; all of them are listed.
    """
    path = folder / REFERENCE
    if not path.is_file():
        return folder.resolve()
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        root, files = Path(value["checkpoint"]), dict(value["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"malformed {REFERENCE}", where=str(path), got=str(error)) from None
    problems = []
    for name, state in files.items():
        if not (root / name).is_file():
            problems.append(Problem("the referenced tensor file is gone", str(root / name)))
        elif _state(root / name) != state:
            problems.append(Problem("the referenced tensor file was changed", str(root / name)))
    if problems:
        raise BadInputError(
            str(problems[0]), where=str(folder), problems=problems,
            hint="convert the checkpoint again; without --weights reference the package holds its own copy",
        )  # fmt: skip
    return root


def _state(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
