"""Image preprocessing equals transformers' own Pillow processors, bit for bit; bad images are refused in time."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mcpc.errors import BadInputError, UnsupportedError
from mcpc.package.manifest import ImagePreprocess, Modality, Resample
from mcpc.processing.configs import image_preprocess_from_config
from mcpc.processing.images import decode_image, load_images, preprocess_image
from mcpc.processing.media import sniff

CLIP = {"image_processor_type": "CLIPImageProcessor"}
SMALL = {
    **CLIP,
    "size": {"height": 32, "width": 32},
    "do_center_crop": False,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "clip defaults": CLIP,
    "exact size": SMALL,
    "shortest edge, odd crop": {
        **CLIP,
        "size": {"shortest_edge": 50},
        "crop_size": {"height": 33, "width": 41},
        "resample": 2,
    },
    "crop pads": {**CLIP, "size": {"shortest_edge": 20}, "crop_size": {"height": 45, "width": 28}, "resample": 1},
    "crop pads by an odd row": {**CLIP, "do_resize": False, "crop_size": 120},
    "no normalize": {**SMALL, "do_normalize": False, "resample": 0},
    "no rescale": {**SMALL, "do_rescale": False, "resample": 4},
    "integer sizes": {**CLIP, "size": 40, "crop_size": 40, "resample": 5},
    "siglip": {"image_processor_type": "SiglipImageProcessorFast"},
    "llava": {"image_processor_type": "LlavaImageProcessor", "size": {"shortest_edge": 64}, "crop_size": 64},
}
MODES = ("RGB", "L", "RGBA", "LA", "P", "1", "I;16")


def modality(**limits: Any) -> Modality:
    fields: dict[str, Any] = {"inputs": ("pixel_values",), "mime_types": ("image/png", "image/jpeg"),
                              "preprocess": image_preprocess_from_config(SMALL)}  # fmt: skip
    return Modality(**(fields | limits))


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 65536, (height, width), np.uint16))
    base = Image.fromarray(rng.integers(0, 256, (height, width, 4), np.uint8), "RGBA")
    if mode == "P":
        palette = base.convert("RGB").quantize(16)
        palette.info["transparency"] = 3
        return palette
    return base if mode == "RGBA" else base.convert(mode)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def reference(config: dict[str, Any], image: Image.Image) -> Any:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    name = config["image_processor_type"].removesuffix("Fast")
    kinds = {"CLIPImageProcessor": CLIPImageProcessorPil, "LlavaImageProcessor": LlavaImageProcessorPil,
             "SiglipImageProcessor": SiglipImageProcessorPil}  # fmt: skip
    processor = kinds[name](**{key: value for key, value in config.items() if key != "image_processor_type"})
    return processor(images=[image], return_tensors="np")["pixel_values"][0]


@pytest.mark.parametrize("size", [(28, 28), (97, 61), (61, 97), (300, 200)], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_equals_transformers(config: dict[str, Any], size: tuple[int, int]) -> None:
    pytest.importorskip("transformers")
    image = picture(*size)
    actual = preprocess_image(image, image_preprocess_from_config(config))
    expected = reference(config, image)
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(actual, expected.astype(np.float32))


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_a_png_equal_transformers(mode: str) -> None:
    pytest.importorskip("transformers")
    data = png(picture(40, 30, mode))
    actual = preprocess_image(decode_image(data, modality(), "x"), image_preprocess_from_config(SMALL))
    np.testing.assert_array_equal(actual, reference(SMALL, Image.open(io.BytesIO(data))))


def test_a_cmyk_jpeg_equals_transformers() -> None:
    pytest.importorskip("transformers")
    buffer = io.BytesIO()
    picture(40, 30, "CMYK").save(buffer, "JPEG")
    actual = preprocess_image(decode_image(buffer.getvalue(), modality(), "x"), image_preprocess_from_config(SMALL))
    np.testing.assert_array_equal(actual, reference(SMALL, Image.open(io.BytesIO(buffer.getvalue()))))


def test_transparency_is_laid_over_white() -> None:
    image = decode_image(png(Image.new("RGBA", (2, 2), (10, 20, 30, 0))), modality(), "x")
    assert image.getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"image_processor_type": "PixtralImageProcessor"}, "PixtralImageProcessor"),
        ({"do_pad": True, "image_processor_type": "LlavaImageProcessor"}, "do_pad"),
        ({"do_flip": True}, "do_flip"),
        ({"do_convert_rgb": False}, "do_convert_rgb"),
        ({"size": {"longest_edge": 300}}, "longest_edge"),
        ({"data_format": "channels_last"}, "data_format"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_unknown_step_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        image_preprocess_from_config(SMALL | change)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [{"image_mean": [0.5, 0.5]}, {"resample": 9}, {"rescale_factor": "much"}, {"size": {"height": 3.7, "width": 1}}],
)
def test_a_malformed_setting_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadInputError):
        image_preprocess_from_config(SMALL | change)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_limits_are_kept(tmp_path: Path) -> None:
    data = png(picture(40, 30))
    good = write(tmp_path / "good.png", data)
    assert load_images([good, good], modality()).shape == (2, 3, 32, 32)
    with pytest.raises(BadInputError, match="too large"):
        load_images([good], modality(max_bytes=len(data) - 1))
    assert load_images([good], modality(max_bytes=len(data))).shape == (1, 3, 32, 32)
    with pytest.raises(BadInputError, match="too many pixels"):
        load_images([good], modality(max_pixels=40 * 30 - 1))
    with pytest.raises(BadInputError, match="does not accept"):
        load_images([write(tmp_path / "not.png", b"GIF89a" + bytes(50))], modality())
    with pytest.raises(BadInputError, match="an empty file"):
        load_images([write(tmp_path / "empty.png", b"")], modality())
    with pytest.raises(BadInputError, match="No such file"):
        load_images([tmp_path / "absent.png"], modality())


def test_images_of_different_final_sizes_are_refused(tmp_path: Path) -> None:
    steps = ImagePreprocess(resize=Resample(shortest_edge=20, filter="bilinear"))
    paths = [write(tmp_path / f"{width}.png", png(picture(width, 30))) for width in (30, 60)]
    with pytest.raises(BadInputError, match="one size"):
        load_images(paths, modality(preprocess=steps))


def test_a_thin_image_cannot_grow_without_limit() -> None:
    steps = ImagePreprocess(resize=Resample(shortest_edge=224, filter="bicubic"))
    with pytest.raises(BadInputError, match="too many pixels"):
        preprocess_image(Image.new("RGB", (100_000, 1)), steps, max_pixels=1_000_000)


@pytest.mark.parametrize("cut", [9, 30, 60, -60, -200])
def test_a_truncated_image_is_refused(cut: int) -> None:
    with pytest.raises(BadInputError, match="damaged"):
        decode_image(png(picture(40, 30))[:cut], modality(), "x")


def test_a_flipped_bit_in_the_pixels_is_refused() -> None:
    data = bytearray(png(picture(40, 30)))
    data[len(data) // 2] ^= 16
    with pytest.raises(BadInputError, match="damaged"):
        decode_image(bytes(data), modality(), "x")


@pytest.mark.parametrize("limit", [67_108_864, None], ids=["manifest limit", "Pillow's limit"])
def test_a_decompression_bomb_is_refused_by_its_header(limit: int | None) -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0)
    bomb = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )
    with pytest.raises(BadInputError, match="too many pixels"):
        decode_image(bomb, modality(max_pixels=limit), "x")


def test_the_type_comes_from_the_bytes() -> None:
    assert sniff(png(picture(4, 4))) == "image/png"
    assert sniff(b"RIFF\0\0\0\0WAVEfmt ") == "audio/wav"
    assert sniff(b"hello") == "unknown"
