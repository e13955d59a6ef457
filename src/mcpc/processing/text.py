"""Text to token ids and back, with the package's own tokenizer and prompt format."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from mcpc.core.runner import Array
from mcpc.errors import BadInputError, UnsupportedError
from mcpc.package.manifest import Binding, Manifest
from mcpc.processing.truncation import proportional
from mcpc.storage.pointers import stand_in

_IMAGE_SLOT = re.compile(r"\{image\}\n?")


class TextProcessor:
    """Prompts and texts of one package."""

    def __init__(self, tokenizer: Tokenizer, manifest: Manifest) -> None:
        if manifest.binding is None:
            raise BadInputError("the package does not say how text is bound", where="manifest.binding")
        self._tokenizer = tokenizer
        self._binding: Binding = manifest.binding
        self._modalities = manifest.modalities
        self._pad_id = manifest.binding.pad_token_id
        text = manifest.modalities.get("text")
        self._vocabulary = text.vocabulary if text else None

    @classmethod
    def open(cls, root: Path, manifest: Manifest) -> TextProcessor:
        """Open the tokenizer that a package declares for text.

        Raises:
            BadInputError: There is none, or it cannot be read.
        """
        text = manifest.modalities.get("text")
        if text is None or text.tokenizer is None:
            raise BadInputError("the package declares no tokenizer", where="manifest.modalities.text.tokenizer")
        return cls(load_tokenizer(root / text.tokenizer), manifest)

    def prompt_ids(self, prompt: str, images: int) -> list[int]:
        """Return the ids of a prompt in the model's format, each image placeholder repeated once per feature row.

        Args:
            prompt: What the user asks. Without a prompt format in the manifest, it holds the placeholders itself.
            images: How many images go with it.

        Raises:
            BadInputError: The placeholders do not match the images, an id has no embedding row, or it is too long.
            UnsupportedError: The package cannot read image files.
        """
        ids = self._expanded(prompt, images)
        self._check(ids, "--prompt")
        return ids

    def cut(self, prompt: str, images: int, limit: int) -> tuple[str, int]:
        """Return the beginning of a prompt and the number of images with which it has at most `limit` tokens.

        Text and images lose the same share of their tokens (see `truncation.proportional`); the first images stay, and
        the prompt format stays whole. A prompt that fits stays as it is.

        Raises:
            BadInputError: Not even a word and an image fit.
            UnsupportedError: The prompt itself places the images, so that none can go.
        """
        if len(self._expanded(prompt, images)) <= limit:
            return prompt, images
        if self._binding.prompt is None:
            raise UnsupportedError("a prompt that places its images itself cannot be cut", where="--truncate")
        frame = len(self._encode(self._formatted("", 0)))
        slot = len(self._encode(self._formatted("", 1))) - frame if images else 0
        per_image = self._rows_per_image() + slot - 1 if images else 0
        ends = [end for _, end in self._tokenizer.encode(prompt, add_special_tokens=False).offsets]
        share = proportional(len(ends), images, per_image, frame, limit)
        # Tokens at the seams may join or part, so that a few more have to go.
        for words in range(share.text, 0, -1):
            part = prompt[: ends[words - 1]]
            if len(self._expanded(part, share.items)) <= limit:
                return part, share.items
        raise BadInputError(
            "the prompt does not fit even when it is cut", where="--truncate", expected=f"{limit} tokens"
        )

    def _expanded(self, prompt: str, images: int) -> list[int]:
        ids = self._encode(self._formatted(prompt, images))
        image = self._binding.placeholders.get("image")
        if image is not None:
            found = ids.count(image.token_id)
            if found != images:
                raise BadInputError(
                    "the image placeholders do not match the images",
                    where="--prompt",
                    expected=f"{images} x {image.token}",
                    got=f"{found}",
                    hint=f"leave {image.token} out of the prompt: the package's prompt format places it"
                    if self._binding.prompt
                    else f"write {image.token} once for each image",
                )
            rows = self._rows_per_image() if images else 0
            ids = [token for token in ids for _ in range(rows if token == image.token_id else 1)]
        return ids

    def _formatted(self, prompt: str, images: int) -> str:
        image = self._binding.placeholders.get("image")
        if self._binding.prompt is None:
            return prompt
        slots = f"{image.token}\n" * images if image else ""
        # Each image stands on its own line where the format gives it one; without images the slot vanishes.
        form = _IMAGE_SLOT.sub(
            lambda slot: slots if slot[0].endswith("\n") else slots.rstrip("\n"), self._binding.prompt
        )
        return form.replace("{text}", prompt)

    def _rows_per_image(self) -> int:
        image = self._modalities["image"]
        rows = image.rows_per_item
        if rows is None and image.preprocess_refused:
            raise UnsupportedError(image.preprocess_refused, where="manifest.modalities.image.preprocess")
        if rows is None:
            raise BadInputError("the rows of an image are not known", where="manifest.modalities.image.rows_per_item")
        return rows

    def batch(self, texts: Sequence[str]) -> tuple[Array, Array]:
        """Return (input_ids, attention_mask), int64 [texts, sequence], for a text encoder; padded on the right.

        The manifest's suffix is appended where the tokenizer has not put it.

        Raises:
            BadInputError: A text is empty or too long, or an id has no embedding row.
        """
        suffix = list(self._binding.suffix_token_ids)
        rows = []
        for text in texts:
            ids = self._encode(text)
            if suffix and ids[-len(suffix) :] != suffix:
                ids += suffix
            self._check(ids, f"--text {text!r}")
            rows.append(ids)
        width = self._binding.pad_to or max(len(ids) for ids in rows)
        input_ids = np.full((len(rows), width), self._padding_id(rows, width), np.int64)
        mask = np.zeros((len(rows), width), np.int64)
        for row, ids in enumerate(rows):
            input_ids[row, : len(ids)] = ids
            mask[row, : len(ids)] = 1
        return input_ids, mask

    def _padding_id(self, rows: Sequence[Sequence[int]], width: int) -> int:
        """Return the id to pad with: the manifest's, else the tokenizer's own."""
        if self._pad_id is not None:
            return self._pad_id
        padding = self._tokenizer.padding
        if padding is not None:
            return int(padding["pad_id"])
        if all(len(ids) == width for ids in rows):
            return 0  # nothing is padded
        raise BadInputError("texts of different lengths need a padding token", where="manifest.binding.pad_token_id")

    def _encode(self, text: str) -> list[int]:
        # `encode_batch` pads as the tokenizer's file says; `encode` of one text does not, except to a fixed length.
        encoding = self._tokenizer.encode(text)
        return [token for token, real in zip(encoding.ids, encoding.attention_mask, strict=True) if real]

    def _check(self, ids: Sequence[int], where: str) -> None:
        if not ids:
            raise BadInputError("the text is empty", where=where)
        if len(ids) > self._binding.max_tokens:
            limit = f"at most {self._binding.max_tokens} tokens"
            raise BadInputError("the text is too long", where=where, expected=limit, got=f"{len(ids)}")
        if self._vocabulary is not None and max(ids) >= self._vocabulary:
            rows = f"ids below the {self._vocabulary} embedding rows"
            raise BadInputError("a token has no embedding row", where=where, expected=rows, got=f"{max(ids)}")

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def stream(self) -> TextStream:
        """Return a detokenizer for one answer."""
        return TextStream(self._tokenizer)


class TextStream:
    """Turns tokens into text as they come; a character is given out when its last byte is there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._given = ""

    def add(self, token: int) -> str:
        """Return the text that `token` completes; "" while a character is incomplete."""
        self._ids.append(token)
        piece = self._stream.step(self._tokenizer, token) or ""
        self._given += piece
        return piece

    def finish(self) -> str:
        """Return what is left: bytes that never became a character, as replacement characters."""
        whole = str(self._tokenizer.decode(self._ids, skip_special_tokens=True))
        return whole[len(self._given) :]


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`; its own truncation is switched off, so that nothing is cut in silence.

    Raises:
        BadInputError: The file is missing, stands for another one, or is malformed.
    """
    if (problem := stand_in(path)) is not None:
        raise BadInputError(problem.message, str(path), problem.expected, problem.got, "git lfs pull")
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"cannot read the tokenizer: {error.strerror}", where=str(path)) from None
    except Exception as error:  # noqa: BLE001 (the library raises bare Exception for every malformed file)
        raise BadInputError("malformed tokenizer", where=str(path), got=" ".join(str(error).split())[:300]) from None
    tokenizer.no_truncation()
    return tokenizer
