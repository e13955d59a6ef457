"""Files that stand for another file: Git LFS pointer texts, and links whose target is gone.

Source: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md (lines `version`, `oid`, `size`).
"""

from __future__ import annotations

import re
from pathlib import Path

from mcpc.errors import Problem

_LFS_PREFIX = b"version https://git-lfs"
_LFS_LIMIT_BYTES = 1024  # of a pointer file, by the specification
_LFS_SIZE = re.compile(rb"^size (\d+)\s*$", re.MULTILINE)


def stand_in(path: Path) -> Problem | None:
    """Return what a file stands for when it is not the content itself, or None.

    Args:
        path: A file, or a link that may lead nowhere.
    """
    if path.is_symlink() and not path.exists():
        return Problem("the link leads nowhere: its download never finished", path.name, "a file", str(path.readlink()))
    if not path.is_file():
        return None
    with path.open("rb") as file:
        head = file.read(_LFS_LIMIT_BYTES)
    if not head.startswith(_LFS_PREFIX):
        return None
    size = _LFS_SIZE.search(head)
    expected = f"a file of {size[1].decode()} bytes" if size else "the file itself"
    return Problem(
        "this is a Git LFS pointer, not the file", path.name, expected, f"{path.stat().st_size} bytes of pointer text"
    )
