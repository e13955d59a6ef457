"""Directories that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mcpc.errors import StorageError, UsageError

_HINTS = {
    errno.ENOSPC: "free some disk space, or choose another -o",
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EACCES: "check the permissions of the folder",
    errno.EROFS: "the file system is read-only: choose another -o",
}


def check_output(output: Path, force: bool) -> None:
    """Refuse an output that exists and is not empty, unless `force`.

    Raises:
        UsageError: The output exists.
    """
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise UsageError("the output exists and is not a folder", where=str(output), hint="choose another -o")
    if output.is_dir() and any(output.iterdir()) and not force:
        raise UsageError(
            "the output folder exists and is not empty", where=str(output), hint="choose another -o, or pass --force"
        )


@contextlib.contextmanager
def staged_directory(output: Path, force: bool = False) -> Iterator[Path]:
    """Yield a hidden folder beside `output` that becomes `output` when the block succeeds.

    On any exception, an interrupt included, the staging folder is removed and `output` is as it was.

    Raises:
        UsageError: `output` exists and is not empty.
        StorageError: Disk full, permission denied, or another file system error inside the block.
    """
    check_output(output, force)
    staging: Path | None = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent))
        yield staging
        staging.chmod(0o755)
        _sync(staging)
        _swap(staging, output)
    except OSError as error:
        raise storage_error(error, output) from error
    finally:
        if staging is not None and staging.exists():
            shutil.rmtree(staging, ignore_errors=True)


def storage_error(error: OSError, where: Path) -> StorageError:
    """Return the error of the file system as one line with a hint."""
    place = str(error.filename or where)
    return StorageError(error.strerror or str(error), where=place, hint=_HINTS.get(error.errno or 0, ""))


def _sync(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _swap(staging: Path, output: Path) -> None:
    if not output.exists():
        os.rename(staging, output)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".old", dir=output.parent))
    os.rename(output, old / "was")
    try:
        os.rename(staging, output)
    except OSError:
        os.rename(old / "was", output)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)
