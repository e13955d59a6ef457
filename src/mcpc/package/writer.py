"""Write a package in a staging folder; it appears under its name only when it is whole."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mcpc.package.manifest import Manifest
from mcpc.storage.copying import Watch, copy_tensor_file
from mcpc.storage.digests import digest_of_files, sha256_of_file
from mcpc.storage.directories import staged_directory
from mcpc.storage.references import REFERENCE
from mcpc.storage.safetensors import Entry

MANIFEST = "manifest.json"
INTEGRITY = "integrity.json"
REPORT = "report.json"
VERIFICATION = "verification.json"
#: Written beside the package's content, outside its digest: times, memory, environment and places differ between
#: runs.
OUTSIDE_DIGEST = frozenset({INTEGRITY, REPORT, REFERENCE})


def pretty_json(value: Any) -> str:
    """Return indented JSON with sorted keys and a final newline."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def files_in_digest(root: Path) -> list[str]:
    """Return the relative paths, sorted, of the files that make up the package digest."""
    paths = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return sorted(path for path in paths if path not in OUTSIDE_DIGEST)


class PackageWriter:
    """Fills the staging folder `root` of one package."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[str, str] = {}

    def path(self, relative: str) -> Path:
        """Return the path of a file in the staging folder; its parent exists."""
        path = self.root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def copy(self, source: Path, relative: str) -> None:
        """Copy a file's bytes at disk speed (a real file, never a link)."""
        target = self.path(relative)
        shutil.copyfile(source, target)  # copy_file_range / sendfile underneath
        os.chmod(target, 0o644)

    def copy_tensors(self, source: Path, relative: str, entries: Sequence[Entry], watch: Watch) -> str:
        """Copy a tensor file, show its tensors to `watch`, and return the hex SHA-256, all in one read."""
        target = self.path(relative)
        self._known[relative] = copy_tensor_file(source, target, entries, watch)
        os.chmod(target, 0o644)
        return self._known[relative]

    def write_text(self, relative: str, text: str) -> None:
        """Write a UTF-8 text file."""
        self.path(relative).write_text(text, encoding="utf-8", newline="\n")

    def write_json(self, relative: str, value: Any) -> None:
        """Write pretty JSON."""
        self.write_text(relative, pretty_json(value))

    def write_manifest(self, manifest: Manifest) -> None:
        """Write `manifest.json`."""
        self.write_json(MANIFEST, manifest.model_dump(mode="json", exclude_defaults=False, exclude_none=True))

    def seal(self) -> str:
        """Write `integrity.json` and return the package digest."""
        files = {}
        for relative in files_in_digest(self.root):
            path = self.root / relative
            files[relative] = {
                "sha256": self._known.get(relative) or sha256_of_file(path),
                "bytes": path.stat().st_size,
            }
        digest = digest_of_files({relative: str(entry["sha256"]) for relative, entry in files.items()})
        self.write_json(INTEGRITY, {"digest": digest, "files": files})
        return digest


@contextlib.contextmanager
def package_writer(output: Path, force: bool = False) -> Iterator[PackageWriter]:
    """Yield a writer whose package appears at `output` when the block succeeds, sealed."""
    with staged_directory(output, force) as staging:
        writer = PackageWriter(staging)
        yield writer
        writer.seal()
