"""Limits on media files, enforced before anything is decoded."""

from __future__ import annotations

from pathlib import Path

from mcpc.errors import BadInputError
from mcpc.package.manifest import Modality

_MAGIC: tuple[tuple[str, int, bytes], ...] = (
    ("image/png", 0, b"\x89PNG\r\n\x1a\n"),
    ("image/jpeg", 0, b"\xff\xd8\xff"),
    ("image/gif", 0, b"GIF8"),
    ("image/bmp", 0, b"BM"),
    ("image/tiff", 0, b"II*\0"),
    ("image/tiff", 0, b"MM\0*"),
    ("image/webp", 8, b"WEBP"),
    ("audio/wav", 8, b"WAVE"),
    ("audio/flac", 0, b"fLaC"),
    ("audio/ogg", 0, b"OggS"),
    ("audio/mpeg", 0, b"ID3"),
    ("video/mp4", 4, b"ftyp"),
)


def sniff(data: bytes) -> str:
    """Return the MIME type that the first bytes of a file show, or "unknown"; the file's name says nothing."""
    for mime, offset, magic in _MAGIC:
        if data[offset : offset + len(magic)] == magic:
            return mime
    return "unknown"


def read_media(path: Path, modality: Modality) -> bytes:
    """Return the bytes of a media file that keeps the modality's size and type limits.

    Raises:
        BadInputError: The file is missing, empty, too large, or of a type the modality does not declare.
    """
    try:
        with path.open("rb") as file:
            limit = modality.max_bytes
            # One byte more than allowed tells that there is more, whatever the file system says about the size.
            data = file.read() if limit is None else file.read(limit + 1)
    except OSError as error:
        raise BadInputError(f"cannot read the file: {error.strerror}", where=str(path)) from None
    if limit is not None and len(data) > limit:
        raise BadInputError("the file is too large", where=str(path), expected=f"at most {limit} bytes",
                            got=f"{path.stat().st_size} bytes")  # fmt: skip
    mime = sniff(data)
    if mime not in modality.mime_types:
        raise BadInputError("the package does not accept this type of file", where=str(path),
                            expected=", ".join(modality.mime_types), got=mime if data else "an empty file")  # fmt: skip
    return data
