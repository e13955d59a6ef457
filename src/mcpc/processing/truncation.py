"""Share a maximum context among the modalities of a prompt that is too long for it."""

from __future__ import annotations

from dataclasses import dataclass

from mcpc.errors import BadInputError


@dataclass(frozen=True)
class Share:
    """What is kept of a prompt.

    Attributes:
        text: Tokens of the user's text.
        items: Images; each keeps all of its feature rows, so that placeholders and rows always agree.
    """

    text: int
    items: int


def proportional(text: int, items: int, rows: int, frame: int, limit: int) -> Share:
    """Return what is kept of a prompt so that it has at most `limit` tokens; everything where it fits.

    Text and images lose the same share of their tokens, as nearly as whole images allow: images get the part of the
    room that is theirs, rounded down to whole ones but to one at least; the text gets the rest; what the text does not
    use goes to further images.

    Args:
        text: Tokens of the user's text.
        items: Images.
        rows: Feature rows, and so tokens, of one image.
        frame: Tokens of the prompt format, which are always kept.
        limit: Largest number of tokens.

    Raises:
        BadInputError: The format, one token of text and one image do not fit.
    """
    room = limit - frame
    if text + items * rows <= room:
        return Share(text, items)
    least = min(text, 1) + min(items, 1) * rows
    if room < least:
        raise BadInputError(
            "the prompt does not fit even when it is cut", where="--truncate",
            expected=f"{frame + least} tokens or more for the prompt format, a word and an image", got=f"{limit}",
        )  # fmt: skip
    kept = 0
    if items:
        fair = room * items * rows // (text + items * rows) // rows
        kept = min(max(1, fair), (room - min(text, 1)) // rows)
    words = min(text, room - kept * rows)
    if items:
        kept += min(items - kept, (room - words - kept * rows) // rows)
    return Share(words, kept)
