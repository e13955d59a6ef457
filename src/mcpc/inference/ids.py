"""Token ids against the rows of the embedding table: beyond them a runtime fails, or reads other memory."""

from __future__ import annotations

from mcpc.core.runner import Array
from mcpc.errors import BadInputError
from mcpc.package.manifest import Manifest


def check_ids(manifest: Manifest, ids: Array) -> None:
    """Refuse ids that have no row in the embedding table.

    Args:
        manifest: Of the package; one without a table size accepts every id.
        ids: int64, any shape.

    Raises:
        BadInputError: Names the largest or the negative id.
    """
    rows = manifest.vocabulary.embedding_rows if manifest.vocabulary is not None else None
    if rows is None or ids.size == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= rows:
        raise BadInputError(
            "a token has no embedding row", where="input_ids", expected=f"ids from 0 to {rows - 1}",
            got=str(high if high >= rows else low),
        )  # fmt: skip
