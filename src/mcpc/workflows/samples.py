"""Real inputs for verification: files that ship with mcpc, or the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mcpc.errors import UsageError
from mcpc.inference.cache import token_types
from mcpc.package import Manifest
from mcpc.processing.audio import load_audio
from mcpc.processing.images import load_images
from mcpc.processing.text import TextProcessor
from mcpc.resources import templates_dir
from mcpc.verify.cases import Sample

_IMAGES = (".png", ".jpg", ".jpeg")
_AUDIO = (".wav",)
_PROMPTS = ("What is this?", "Describe the image.")
_TEXTS = ("a photo of a bag", "a photo of a dress", "a photo of an ankle boot", "a black photo")


def load_samples(root: Path, manifest: Manifest, paths: Sequence[Path]) -> tuple[Sample, ...]:
    """Return real requests for a package's kind, by its own preprocessing.

    Args:
        root: The package's folder.
        manifest: Its manifest.
        paths: The user's files; the shipped ones when empty.

    Raises:
        UsageError: A file is of a modality that the package does not take.
    """
    modality = "audio" if manifest.kind in ("speech-seq2seq", "audio-language") else "image"
    described = manifest.modalities.get(modality)
    if not paths and (described is None or described.preprocess is None):
        return ()  # verification draws whole requests from a seed instead
    suffixes = _AUDIO if modality == "audio" else _IMAGES
    files = list(paths) or sorted(
        path for path in templates_dir("samples").iterdir() if path.suffix.lower() in suffixes
    )
    wrong = [path for path in files if path.suffix.lower() not in suffixes]
    if wrong:
        raise UsageError(f"the package takes {modality} samples", where=str(wrong[0]), expected=", ".join(suffixes))
    if modality == "audio":
        return tuple(_clip(manifest, path) for path in files)
    if manifest.kind == "image-seq2seq":
        image = manifest.modalities["image"]
        return tuple(Sample(path.name, {"pixel_values": load_images([path], image)}) for path in files)
    text = TextProcessor.open(root, manifest)
    if manifest.kind == "dual-encoder":
        ids, mask = text.batch(_TEXTS)
        feeds = {"pixel_values": load_images(files, manifest.modalities["image"]), "input_ids": ids}
        if "attention_mask" in manifest.modalities["text"].inputs:
            feeds["attention_mask"] = mask
        return (Sample(f"{len(files)} images x {len(_TEXTS)} texts", feeds),)
    return tuple(_question(manifest, text, path, _PROMPTS[number % len(_PROMPTS)]) for number, path in enumerate(files))


def _question(manifest: Manifest, text: TextProcessor, path: Path, prompt: str) -> Sample:
    ids = np.array([text.prompt_ids(prompt, images=1)], np.int64)
    pixels = load_images([path], manifest.modalities["image"])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "pixel_values": pixels}
    if manifest.binding and manifest.binding.token_types:
        feeds["token_type_ids"] = token_types(manifest, ids)
    return Sample(f"{path.name}: {prompt}", feeds)


def _clip(manifest: Manifest, path: Path) -> Sample:
    modality = manifest.modalities["audio"]
    return Sample(path.name, {"input_features": load_audio(path, modality)})
