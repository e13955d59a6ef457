"""Open a package and check that it is what it says."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mcpc.errors import BadInputError, Problem, UsageError
from mcpc.package.manifest import Manifest
from mcpc.package.writer import INTEGRITY, MANIFEST, VERIFICATION, files_in_digest
from mcpc.storage.digests import digest_of_files, sha256_of_file


class Package:
    """An immutable package on disk."""

    def __init__(self, root: Path, manifest: Manifest, integrity: dict[str, Any]) -> None:
        self.root = root
        self.manifest = manifest
        self._integrity = integrity

    @classmethod
    def open(cls, root: Path, *, allow_unverified: bool = True, check_bytes: bool = False) -> Package:
        """Open a package; sizes are always checked, every byte when `check_bytes`.

        Raises:
            BadInputError: Not a package, or its files are not those that were sealed.
            UsageError: It is marked unverified and `allow_unverified` is False.
        """
        manifest_path = root / MANIFEST
        if not manifest_path.is_file():
            raise BadInputError(
                "not a package: manifest.json is missing",
                where=str(root),
                hint="mcpc convert CHECKPOINT -o DIR makes one",
            )
        manifest = _parse(manifest_path)
        integrity = _read_integrity(root / INTEGRITY)
        package = cls(root, manifest, integrity)
        package.check_files(check_bytes)
        if manifest.verification.checked == "none" and not allow_unverified:
            raise UsageError(
                "the package is unverified",
                where=str(root),
                hint="pass --allow-unverified, or convert it again without --verify none",
            )
        return package

    @property
    def digest(self) -> str:
        """Return the package digest that was sealed."""
        return str(self._integrity["digest"])

    @cached_property
    def verification(self) -> dict[str, Any]:
        """Return `verification.json`.

        Raises:
            BadInputError: It is not a JSON object.
        """
        path = self.root / VERIFICATION
        result = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(result, dict):
            raise BadInputError(f"malformed {VERIFICATION}", where=str(path), expected="a JSON object")
        return result

    def component_path(self, name: str) -> Path:
        """Return the path of a component's ONNX file."""
        return self.root / self.manifest.component(name).file

    def file_bytes(self) -> dict[str, int]:
        """Return {relative path: size in bytes} of the sealed files."""
        return {path: int(entry["bytes"]) for path, entry in self._integrity["files"].items()}

    def check_files(self, check_bytes: bool) -> None:
        """Compare the files with `integrity.json`: names and sizes, and SHA-256 when `check_bytes`.

        Raises:
            BadInputError: Lists every missing, added, resized or changed file.
        """
        sealed = self._integrity["files"]
        present = set(files_in_digest(self.root))
        problems = [Problem("missing", path) for path in sorted(set(sealed) - present)]
        problems += [Problem("not part of the package", path) for path in sorted(present - set(sealed))]
        for path in sorted(present & set(sealed)):
            size = (self.root / path).stat().st_size
            if size != sealed[path]["bytes"]:
                problems.append(Problem("wrong size", path, f"{sealed[path]['bytes']} bytes", f"{size} bytes"))
            elif check_bytes and sha256_of_file(self.root / path) != sealed[path]["sha256"]:
                problems.append(Problem("bytes changed", path, "the sealed SHA-256", "another"))
        recorded = digest_of_files({path: str(entry["sha256"]) for path, entry in sealed.items()})
        if recorded != self._integrity["digest"]:
            problems.append(Problem("the digest does not match its file list", INTEGRITY))
        if problems:
            raise BadInputError(
                f"the package is damaged: {problems[0]}", where=str(self.root), problems=problems,
                hint="make it again, or restore it from a trusted copy",
            )  # fmt: skip


def _parse(path: Path) -> Manifest:
    try:
        return Manifest.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        problems = [Problem(str(item["msg"]), ".".join(str(part) for part in item["loc"])) for item in error.errors()]
        raise BadInputError(f"malformed manifest: {problems[0]}", where=str(path), problems=problems) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise BadInputError("malformed manifest", where=str(path), got=str(error)) from None


def _read_integrity(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        digest, files = value["digest"], value["files"]
        if not isinstance(digest, str) or not all({"sha256", "bytes"} == set(entry) for entry in files.values()):
            raise ValueError("unexpected fields")
    except FileNotFoundError:
        raise BadInputError("the package is damaged: integrity.json is missing", where=str(path.parent)) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInputError("malformed integrity.json", where=str(path), got=str(error)) from None
    return dict(value)
