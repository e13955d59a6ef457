"""Prompts, padded texts and streamed text, with the example models' own tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manifests import manifest

from mcpc.errors import BadInputError, UnsupportedError
from mcpc.package.manifest import Manifest
from mcpc.processing.text import TextProcessor, load_tokenizer
from mcpc.processing.truncation import proportional

IMAGE, EOS, PAD = 4, 2, 0
BINDING: dict[str, Any] = {
    "placeholders": {"image": {"token": "<image>", "token_id": IMAGE}},
    "max_tokens": 64,
    "truncation": {"policy": "refuse"},
    "prompt": "USER: {image}\n{text} ASSISTANT:",
}


def bound(**fields: Any) -> Manifest:
    return manifest(binding=BINDING | fields)


def processor(folder: Path, declared: Manifest) -> TextProcessor:
    return TextProcessor(load_tokenizer(folder / "tokenizer.json"), declared)


def test_a_prompt_equals_the_model_processor(fashion_llava: Path) -> None:
    """The reference is transformers' rule: encode the whole text, then repeat the placeholder once per feature row."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(fashion_llava)
    text = "USER: <image>\nWhat is this? ASSISTANT:".replace("<image>", "<image>" * 16)
    assert processor(fashion_llava, bound()).prompt_ids("What is this?", 1) == tokenizer(text)["input_ids"]


def test_images_stand_on_lines_of_their_own(fashion_llava: Path) -> None:
    text = processor(fashion_llava, bound())
    whole = processor(fashion_llava, bound(prompt=None))
    two = whole.prompt_ids("USER: <image>\n<image>\nhi ASSISTANT:", 2)
    assert text.prompt_ids("hi", 2) == two
    assert two.count(IMAGE) == 32
    assert text.prompt_ids("hi", 0) == whole.prompt_ids("USER: hi ASSISTANT:", 0)


def test_placeholders_must_match_images(fashion_llava: Path) -> None:
    with pytest.raises(BadInputError, match="placeholders") as caught:
        processor(fashion_llava, bound()).prompt_ids("a <image> b", 1)
    assert caught.value.expected == "1 x <image>"
    assert caught.value.got == "2"
    with pytest.raises(BadInputError, match="placeholders"):
        processor(fashion_llava, bound(prompt=None)).prompt_ids("no image here", 1)


def test_a_long_prompt_is_refused_at_the_limit(fashion_llava: Path) -> None:
    length = len(processor(fashion_llava, bound()).prompt_ids("What is this?", 1))
    assert processor(fashion_llava, bound(max_tokens=length)).prompt_ids("What is this?", 1)
    with pytest.raises(BadInputError, match="too long"):
        processor(fashion_llava, bound(max_tokens=length - 1)).prompt_ids("What is this?", 1)


def test_ids_beyond_the_embedding_rows_are_refused(fashion_llava: Path) -> None:
    ids = processor(fashion_llava, bound()).prompt_ids("What is this?", 1)
    for rows, refused in ((max(ids) + 1, False), (max(ids), True)):
        declared = manifest(
            binding=BINDING,
            modalities={
                "text": {"inputs": ["input_ids"], "vocabulary": rows},
                "image": {"inputs": [], "rows_per_item": 16},
            },
        )
        if refused:
            with pytest.raises(BadInputError, match="no embedding row"):
                processor(fashion_llava, declared).prompt_ids("What is this?", 1)
        else:
            assert processor(fashion_llava, declared).prompt_ids("What is this?", 1) == ids


def test_texts_are_padded_on_the_right(fashion_clip: Path) -> None:
    text = processor(fashion_clip, bound(suffix_token_ids=(EOS,), pad_token_id=PAD))
    ids, mask = text.batch(["a bag", "a photo of a dress"])
    single, _ = text.batch(["a bag"])
    length = single.shape[1]
    assert ids.dtype == mask.dtype == np.int64
    assert single[0, -1] == EOS
    assert ids[1, -1] == EOS
    np.testing.assert_array_equal(ids[0, :length], single[0])
    assert (ids[0, length:] == PAD).all()
    np.testing.assert_array_equal(mask.sum(axis=1), [length, ids.shape[1]])


def test_the_suffix_is_not_put_twice(fashion_clip: Path) -> None:
    text = processor(fashion_clip, bound(suffix_token_ids=(EOS,)))
    np.testing.assert_array_equal(text.batch(["a bag"])[0], text.batch(["a bag</s>"])[0])


def test_texts_are_padded_to_a_fixed_length(fashion_clip: Path) -> None:
    ids, mask = processor(fashion_clip, bound(pad_to=32, pad_token_id=7)).batch(["a bag"])
    assert ids.shape == mask.shape == (1, 32)
    assert (ids[mask == 0] == 7).all()


def test_streamed_text_is_whole_characters(assets: Path) -> None:
    """Whisper's byte-level tokenizer splits these characters over several tokens."""
    tokenizer = load_tokenizer(assets / "checkpoints" / "whisper-tiny.en" / "tokenizer.json")
    text = " naïve 日本語 🎉🏽 œuvre"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    stream = TextProcessor(tokenizer, bound()).stream()
    pieces = [stream.add(token) for token in ids]
    assert len(ids) > len([piece for piece in pieces if piece]) > 5  # some tokens complete no character
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == text


def test_bytes_that_never_become_a_character_come_last(assets: Path) -> None:
    tokenizer = load_tokenizer(assets / "checkpoints" / "whisper-tiny.en" / "tokenizer.json")
    ids = tokenizer.encode("ab 🎉", add_special_tokens=False).ids[:-1]
    stream = TextProcessor(tokenizer, bound()).stream()
    assert "\ufffd" not in "".join(stream.add(token) for token in ids)
    assert "\ufffd" in stream.finish()


def test_special_tokens_are_not_text(fashion_llava: Path) -> None:
    text = processor(fashion_llava, bound())
    stream = text.stream()
    ids = [*text.prompt_ids("hi", 0), EOS]
    assert "".join(stream.add(token) for token in ids) + stream.finish() == text.decode(ids) == "USER: hi ASSISTANT:"


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff\xfe", b'{"model": {"type": "None"}}'])
def test_a_damaged_tokenizer_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInputError, match="tokenizer") as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)


def test_a_package_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    declared = manifest(modalities={"text": {"inputs": ["input_ids"]}})
    with pytest.raises(BadInputError, match="no tokenizer"):
        TextProcessor.open(tmp_path, declared)


@pytest.mark.parametrize(
    ("text", "items", "rows", "limit", "expected"),
    [
        (40, 2, 10, 70, (40, 2)),  # fits
        (100, 10, 20, 160, (50, 5)),  # both lose half
        (100, 3, 50, 130, (70, 1)),  # of 1.4 images' room, one whole image; the text has the rest
        (1000, 1, 30, 40, (0, 0)),  # one word and one image do not fit: refused
        (1000, 1, 30, 45, (5, 1)),
        (2, 5, 30, 80, (2, 2)),  # what the text does not use goes to images
        (50, 0, 0, 30, (20, 0)),
    ],
)
def test_text_and_images_lose_the_same_share(
    text: int, items: int, rows: int, limit: int, expected: tuple[int, int]
) -> None:
    frame = 10
    if expected == (0, 0):
        with pytest.raises(BadInputError, match="does not fit even when it is cut"):
            proportional(text, items, rows, frame, limit)
        return
    share = proportional(text, items, rows, frame, limit)
    assert (share.text, share.items) == expected
    assert frame + share.text + rows * share.items <= limit


def test_a_prompt_is_cut_to_its_limit_and_keeps_its_placeholders(fashion_llava: Path) -> None:
    text = processor(fashion_llava, bound(max_tokens=2000))
    prompt = "What is this, and what is that? " * 12
    whole = text.prompt_ids(prompt, 3)
    assert text.cut(prompt, 3, len(whole)) == (prompt, 3)
    for limit in range(40, len(whole), 7):
        part, images = text.cut(prompt, 3, limit)
        ids = text.prompt_ids(part, images)
        assert len(ids) <= limit
        assert prompt.startswith(part) and 1 <= images <= 3
        assert ids.count(IMAGE) == 16 * images, "placeholders and feature rows differ"
        assert ids[-2:] == whole[-2:] and ids[:3] == whole[:3], "the format was cut"
        # Not a token fewer than has to be: one more word would be too long.
        longer = prompt[: len(part) + 12]
        assert len(text.prompt_ids(longer, images)) > limit or longer == prompt
    with pytest.raises(BadInputError, match="does not fit"):
        text.cut(prompt, 3, 20)
    with pytest.raises(UnsupportedError, match="cannot be cut"):
        processor(fashion_llava, bound(prompt=None)).cut("<image> a b c d e f", 1, 18)
