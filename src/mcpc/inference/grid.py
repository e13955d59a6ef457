"""Rotary positions of three axes (time, row, column), for models that read images of any size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mcpc.core.runner import Array
from mcpc.errors import BadInputError


def grid_positions(
    input_ids: Array, attention_mask: Array, grids: Array, placeholder: int | None, merge: int
) -> tuple[Array, Array]:
    """Return position ids int64 [3, batch, sequence] of prompts, and how far the next token is shifted [batch, 1].

    A text token stands at the same place on all axes; the rows of an image spread over its grid, and the text after
    it goes on behind the longer side.

    Args:
        input_ids: [batch, sequence], each image placeholder repeated once per feature row.
        attention_mask: [batch, sequence], 0 on padding, whose positions are 0.
        grids: int64 [images, 3], frames, rows and columns of patches of the images of all prompts in order.
        placeholder: Token id of an image's row; None for a package that binds none.
        merge: Patches along each side of one feature row.

    Raises:
        BadInputError: An image has several frames, or the placeholders do not fit the images.

    Source: transformers `Qwen2VLModel.get_rope_index`.
    """
    if (grids[:, 0] != 1).any():
        raise BadInputError("an image has one frame", where="image_grid_thw", expected="1", got=f"{grids[:, 0].max()}")
    result = np.zeros((3, *input_ids.shape), np.int64)
    shift = np.zeros((len(input_ids), 1), np.int64)
    remaining = iter(grids)
    for number, (ids, shown) in enumerate(zip(input_ids, attention_mask.astype(bool), strict=True)):
        pieces, place, index = [], 0, 0
        tokens = ids[shown]
        while index < len(tokens):
            if tokens[index] != placeholder:
                pieces.append(np.full((3, 1), place))
                place, index = place + 1, index + 1
                continue
            rows, columns = _next(remaining) // merge
            count = rows * columns
            image = tokens[index : index + count]
            if len(image) < count or (image != placeholder).any():
                raise BadInputError("the placeholders do not match the image", expected=f"{count} in a row")
            pieces.append(place + np.stack([np.zeros(count, np.int64), *np.divmod(np.arange(count), columns)]))
            place, index = place + max(rows, columns), index + count
        result[:, number, shown] = np.concatenate(pieces, axis=1)
        shift[number] = place - len(tokens)
    if next(remaining, None) is not None:
        raise BadInputError("there are more images than image placeholders", where="image_grid_thw")
    return result, shift


def _next(grids: Iterator[Array]) -> Array:
    found = next(grids, None)
    if found is None:
        raise BadInputError("there are more image placeholders than images", where="input_ids")
    return found[1:]
