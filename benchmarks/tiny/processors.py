"""Processor files of tiny checkpoints, by the keys of preprocessor_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Files = Mapping[str, Mapping[str, Any]]


def clip_images(size: int) -> Files:
    """CLIP's image processor: shortest edge, centre crop."""
    config = {
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": size},
        "crop_size": {"height": size, "width": size},
    }  # fmt: skip
    return {"preprocessor_config.json": config}


def images_of(processor: str, size: int) -> Files:
    """An image processor that resizes to an exact size."""
    config = {"image_processor_type": processor, "size": {"height": size, "width": size}}
    return {"preprocessor_config.json": config}


def siglip_images(size: int) -> Files:
    """SigLIP's image processor: exact size."""
    return images_of("SiglipImageProcessor", size)


def audio_of(extractor: str) -> Files:
    """A feature extractor with its own defaults."""
    return {"preprocessor_config.json": {"feature_extractor_type": extractor}}


def whisper_audio(mel_bins: int, chunk_s: int) -> Files:
    """Whisper's log-mel features of a fixed length."""
    config = {
        "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": mel_bins, "chunk_length": chunk_s,
        "hop_length": 160, "n_fft": 400, "sampling_rate": 16000,
    }  # fmt: skip
    return {"preprocessor_config.json": config}
