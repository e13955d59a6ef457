"""`preprocessor_config.json` to preprocessing as data. What is not understood is refused, never ignored."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from mcpc.errors import BadInputError, Problem, UnsupportedError
from mcpc.package.manifest import AudioPreprocess, ImagePreprocess, Resample

_WHERE = "preprocessor_config.json"
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_CLIP: Mapping[str, Any] = {
    "do_resize": True, "size": {"shortest_edge": 224}, "resample": 3, "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224}, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
    "image_mean": _CLIP_MEAN, "image_std": _CLIP_STD, "do_convert_rgb": True, "do_pad": False,
}  # fmt: skip
_SIGLIP = {
    **_CLIP,
    "size": {"height": 224, "width": 224},
    "do_center_crop": False,
    "image_mean": (0.5,) * 3,
    "image_std": (0.5,) * 3,
}

_BLIP = {**_CLIP, "size": {"height": 384, "width": 384}, "do_center_crop": False}
_VIT = {**_SIGLIP, "resample": 2}

#: What each processor does where its file says nothing. Source: the class attributes in transformers 5.24.
_IMAGE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "CLIPImageProcessor": _CLIP,
    "CLIPFeatureExtractor": _CLIP,
    "LlavaImageProcessor": _CLIP,
    "SiglipImageProcessor": _SIGLIP,
    "BlipImageProcessor": _BLIP,
    "ChineseCLIPImageProcessor": _CLIP,
    "Tipsv2ImageProcessor": {**_VIT, "size": {"height": 448, "width": 448}, "do_normalize": False},
    "ViTImageProcessor": _VIT,
    "ViTFeatureExtractor": _VIT,
}
#: Processors for which one number means a square; for the others it is the shortest edge.
_SQUARE = frozenset({"BlipImageProcessor", "Tipsv2ImageProcessor", "ViTFeatureExtractor", "ViTImageProcessor"})
_FILTERS: tuple[Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"], ...] = (
    "nearest",
    "lanczos",
    "bilinear",
    "bicubic",
    "box",
    "hamming",
)  # in the order of Pillow's numbers

_AUDIO_DEFAULTS: Mapping[str, Any] = {
    "feature_size": 80,
    "sampling_rate": 16000,
    "hop_length": 160,
    "chunk_length": 30,
    "n_fft": 400,
    "padding_value": 0.0,
    "dither": 0.0,
    "return_attention_mask": False,
    "padding_side": "right",
    "do_normalize": False,
}
#: Names of classes, and values that the processors work out themselves or that only concern their call.
_NEUTRAL = frozenset({
    "image_processor_type", "feature_extractor_type", "processor_class", "auto_map", "return_tensors",
    "_valid_processor_keys", "disable_grouping", "device", "default_to_square",
})  # fmt: skip
_AUDIO_DERIVED = frozenset({"n_samples", "nb_max_frames", "mel_filters"})


def image_preprocess_from_config(config: Mapping[str, Any]) -> ImagePreprocess:
    """Return the steps that an image processor of a plain kind takes: resize, centre crop, rescale, normalise.

    Args:
        config: The content of `preprocessor_config.json`.

    Raises:
        UnsupportedError: Another processor, or a step that is not known here; every one is listed.
        BadInputError: A known field holds something else than it should.
    """
    name = str(config.get("image_processor_type") or config.get("feature_extractor_type"))
    name = name.removesuffix("Fast").removesuffix("Pil")
    defaults = _IMAGE_DEFAULTS.get(name)
    if defaults is None:
        raise UnsupportedError(
            "this image processor is not supported", where=_WHERE, expected=", ".join(_IMAGE_DEFAULTS), got=name
        )
    settings = _settings(
        config, defaults, {"data_format": "channels_first", "input_data_format": None, "use_square_size": False}
    )
    _refuse(name, settings, {"do_pad": False, "do_convert_rgb": True})
    if name in _SQUARE and isinstance(settings["size"], int):
        settings["size"] = {"height": settings["size"], "width": settings["size"]}
    try:
        return ImagePreprocess(
            resize=_resize(settings["size"], settings["resample"]) if settings["do_resize"] else None,
            center_crop=_crop(settings["crop_size"]) if settings["do_center_crop"] else None,
            rescale=settings["rescale_factor"] if settings["do_rescale"] else None,
            mean=_three(settings["image_mean"]) if settings["do_normalize"] else None,
            std=_three(settings["image_std"]) if settings["do_normalize"] else None,
        )
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise BadInputError("malformed image processor settings", where=_WHERE, got=_one_line(error)) from None


def audio_preprocess_from_config(config: Mapping[str, Any]) -> AudioPreprocess:
    """Return the log-mel features that a `WhisperFeatureExtractor` makes.

    Args:
        config: The content of `preprocessor_config.json`.

    Raises:
        UnsupportedError: Another feature extractor, or a setting that is not known here; every one is listed.
        BadInputError: A known field holds something else than it should.
    """
    name = str(config.get("feature_extractor_type"))
    if name != "WhisperFeatureExtractor":
        raise UnsupportedError(
            "this feature extractor is not supported", where=_WHERE, expected="WhisperFeatureExtractor", got=name
        )
    # transformers works these three out again, whatever the file says.
    settings = _settings(
        {key: value for key, value in config.items() if key not in _AUDIO_DERIVED}, _AUDIO_DEFAULTS, {}
    )
    _refuse(
        name, settings, {"dither": 0.0, "return_attention_mask": False, "padding_side": "right", "do_normalize": False}
    )
    try:
        return AudioPreprocess(
            kind="whisper-log-mel", sampling_rate_hz=settings["sampling_rate"], n_fft=settings["n_fft"],
            hop_length=settings["hop_length"], mel_bins=settings["feature_size"], chunk_s=settings["chunk_length"],
            padding_value=settings["padding_value"], dither=settings["dither"],
        )  # fmt: skip
    except ValueError as error:
        raise BadInputError("malformed feature extractor settings", where=_WHERE, got=_one_line(error)) from None


def _settings(config: Mapping[str, Any], defaults: Mapping[str, Any], only: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's settings over the defaults; null means the default, `only` gives keys with one good value."""
    given = {key: value for key, value in config.items() if value is not None and key not in _NEUTRAL}
    _refuse("the file", {key: given.pop(key) for key in only if key in given}, only)
    if unknown := sorted(given.keys() - defaults.keys()):
        problems = [Problem("unknown setting", f"{_WHERE}: {key}", got=repr(given[key])[:80]) for key in unknown]
        raise UnsupportedError(f"unknown preprocessing settings: {', '.join(unknown)}", where=_WHERE, problems=problems)
    return {**defaults, **given}


def _refuse(name: str, settings: Mapping[str, Any], accepted: Mapping[str, Any]) -> None:
    problems = [
        Problem(f"{name} takes a step that is not supported", f"{_WHERE}: {key}", str(value), str(settings[key]))
        for key, value in accepted.items()
        if key in settings and settings[key] != value
    ]
    if problems:
        raise UnsupportedError(str(problems[0]), problems=problems)


def _resize(size: int | Mapping[str, int], resample: int) -> Resample:
    filter_name = _FILTERS[resample]
    if isinstance(size, int):  # these processors have default_to_square = False
        return Resample(shortest_edge=size, filter=filter_name)
    _keys(size, ({"height", "width"}, {"shortest_edge"}), "size")
    return Resample(**size, filter=filter_name)


def _crop(size: int | Mapping[str, int]) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    _keys(size, ({"height", "width"},), "crop_size")
    return size["height"], size["width"]


def _keys(size: Mapping[str, int], accepted: Collection[set[str]], name: str) -> None:
    if set(size) not in accepted:
        expected = " or ".join(" and ".join(sorted(keys)) for keys in accepted)
        raise UnsupportedError(
            "this way to give a size is not supported",
            where=f"{_WHERE}: {name}",
            expected=expected,
            got=", ".join(sorted(size)),
        )


def _three(value: float | Collection[float]) -> tuple[float, ...]:
    values = (float(value),) * 3 if isinstance(value, int | float) else tuple(float(item) for item in value)
    if len(values) != 3:
        raise ValueError(f"{len(values)} channels where 3 are expected")
    return values


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
