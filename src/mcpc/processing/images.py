"""Images to `pixel_values`, exactly as the Pillow image processors of transformers make them.

EXIF orientation is not applied, as those processors do not apply it.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from mcpc.core.runner import Array
from mcpc.errors import BadInputError, UnsupportedError
from mcpc.package.manifest import ImagePreprocess, Modality, Resample
from mcpc.processing.media import read_media, sniff

_FILTERS = {
    "nearest": Image.Resampling.NEAREST, "lanczos": Image.Resampling.LANCZOS, "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC, "box": Image.Resampling.BOX, "hamming": Image.Resampling.HAMMING,
}  # fmt: skip


def load_images(paths: Sequence[Path], modality: Modality) -> Array:
    """Return `pixel_values` [images, 3, Y, X] float32 of image files.

    Raises:
        BadInputError: A file breaks a limit or is damaged, or the images end with different sizes.
    """
    if not isinstance(modality.preprocess, ImagePreprocess):
        raise UnsupportedError(
            modality.preprocess_refused or "the package declares no image preprocessing",
            where="manifest.modalities.image.preprocess",
        )
    arrays = []
    for path in paths:
        image = decode_image(read_media(path, modality), modality, str(path))
        arrays.append(preprocess_image(image, modality.preprocess, modality.max_pixels, str(path)))
    if len({array.shape for array in arrays}) > 1:
        shapes = ", ".join(f"{array.shape[2]}x{array.shape[1]}" for array in arrays)
        raise BadInputError(
            "the images do not end with one size", where="manifest.modalities.image.preprocess", got=shapes
        )
    return np.stack(arrays)


def decode_image(data: bytes, modality: Modality, where: str) -> Image.Image:
    """Decode an image as RGB; transparency is laid over white.

    The number of pixels is read from the header and checked before a pixel is decoded.

    Raises:
        BadInputError: Too many pixels, or damaged data.
    """
    kind = sniff(data).removeprefix("image/").upper()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the manifest's own limit decides
            image = Image.open(io.BytesIO(data), formats=[kind])
            _check_pixels(image.width, image.height, modality.max_pixels, where)
            image.load()
            return _rgb(image)
    except Image.DecompressionBombError as error:
        raise BadInputError("the image has too many pixels", where=where, got=str(error)) from None
    except (OSError, SyntaxError, ValueError, EOFError, KeyError, IndexError, OverflowError, MemoryError) as error:
        raise BadInputError("the image is damaged", where=where, expected=f"a whole {kind} file",
                            got=" ".join(str(error).split()) or type(error).__name__) from None  # fmt: skip


def _check_pixels(width: int, height: int, limit: int | None, where: str) -> None:
    if limit is not None and width * height > limit:
        raise BadInputError(
            "the image has too many pixels",
            where=where,
            expected=f"at most {limit}",
            got=f"{width} x {height} = {width * height}",
        )


def _rgb(image: Image.Image) -> Image.Image:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def preprocess_image(
    image: Image.Image, steps: ImagePreprocess, max_pixels: int | None = None, where: str = "image"
) -> Array:
    """Return [3, Y, X] float32 of an RGB image.

    Args:
        image: RGB.
        steps: What to do, in the order of its fields.
        max_pixels: Limit on the resized image too: a very long, thin image grows when its short edge is fixed.
        where: What to call the image in an error.

    Raises:
        BadInputError: The resized image has too many pixels.

    Source: transformers `PilBackend._preprocess` (5.24): resize, center_crop, rescale, normalize.
    """
    if steps.resize is not None:
        width, height = _resized(image, steps.resize)
        _check_pixels(width, height, max_pixels, f"{where}, resized")
        image = image.resize((width, height), _FILTERS[steps.resize.filter])
    pixels = np.moveaxis(np.asarray(image), -1, 0)
    if steps.center_crop is not None:
        pixels = _center_crop(pixels, *steps.center_crop)
    if steps.rescale is not None:
        pixels = (pixels.astype(np.float64) * steps.rescale).astype(np.float32)
    pixels = pixels.astype(np.float32, copy=False)
    if steps.mean is not None and steps.std is not None:
        mean, std = np.array(steps.mean, np.float32), np.array(steps.std, np.float32)
        pixels = (pixels - mean[:, None, None]) / std[:, None, None]
    return np.ascontiguousarray(pixels)


def _resized(image: Image.Image, resize: Resample) -> tuple[int, int]:
    """Return (width, height) after the resize."""
    if resize.height is not None and resize.width is not None:
        return resize.width, resize.height
    if resize.shortest_edge is None:
        raise BadInputError(
            "the resize gives neither a size nor a shortest edge", where="manifest.modalities.image.preprocess.resize"
        )
    short, long = sorted((image.width, image.height))
    longest = int(resize.shortest_edge * long / short)
    return (resize.shortest_edge, longest) if image.width <= image.height else (longest, resize.shortest_edge)


def _center_crop(pixels: Array, height: int, width: int) -> Array:
    """Return the middle [C, height, width]; an image that is too small is padded with zeros first.

    Source: transformers `image_transforms.center_crop`: the padding rounds up, the crop rounds down.
    """
    _, old_height, old_width = pixels.shape
    new_height, new_width = max(height, old_height), max(width, old_width)
    above, left = math.ceil((new_height - old_height) / 2), math.ceil((new_width - old_width) / 2)
    padded = np.pad(pixels, ((0, 0), (above, new_height - old_height - above), (left, new_width - old_width - left)))
    top, start = (old_height - height) // 2 + above, (old_width - width) // 2 + left
    return padded[:, max(0, top) : top + height, max(0, start) : start + width]
