"""SHA-256 over files and canonical JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

_CHUNK_BYTES = 1 << 20


def sha256_of_file(path: Path) -> str:
    """Return the hex SHA-256 of a file, read in 1 MiB chunks."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def canonical_json(value: object) -> bytes:
    """Return the one JSON text of a value: sorted keys, no spaces, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_of(value: object) -> str:
    """Return `sha256:<hex>` of the canonical JSON of a value."""
    return "sha256:" + hashlib.sha256(canonical_json(value)).hexdigest()


def digest_of_files(files: Mapping[str, str]) -> str:
    """Return one digest for {relative path: hex SHA-256}."""
    return digest_of(sorted(files.items()))


def fnv1a64(data: bytes) -> str:
    """Return `fnv1a64:<hex>` of the bytes, for short compatibility hashes (not for integrity).

    Source: Fowler, Noll, Vo; offset basis 14695981039346656037, prime 1099511628211.
    """
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"fnv1a64:{value:016x}"
