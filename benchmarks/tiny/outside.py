"""Tiny models of types that no shipped template fits: what `mcpc templates derive` is tried on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import transformers as hf

from tiny import audio_language
from tiny.audio_language import AUDIO, GENERATION
from tiny.build import Tiny
from tiny.dual_encoders import TEXT, VISION
from tiny.processors import audio_of, images_of


def audio_flamingo() -> Tiny:
    """Audio Flamingo 3: a Whisper encoder with a mask over windows of 120 frames."""
    config = hf.AudioFlamingo3Config(
        audio_config={**audio_language.TOWER, "max_source_positions": 60},
        text_config=hf.Qwen2Config(**audio_language.TEXT), audio_token_id=audio_language.AUDIO,
    )  # fmt: skip
    return Tiny(config, {"<|audio|>": AUDIO}, audio_of("WhisperFeatureExtractor"), GENERATION)


def owlvit() -> Tiny:
    """OWL-ViT: two CLIP towers; the text tower reads the row of the largest id."""
    config = hf.OwlViTConfig(text_config=dict(TEXT), vision_config=dict(VISION), projection_dim=24)
    return Tiny(config, files=images_of("OwlViTImageProcessor", 28))


def vision_text() -> Tiny:
    """Any image tower beside any text tower: a ViT and a BERT."""
    vision, text = hf.ViTConfig(**VISION), hf.BertConfig(**{**TEXT, "type_vocab_size": 2})
    config = hf.VisionTextDualEncoderConfig(
        vision_config=vision.to_dict(), text_config=text.to_dict(), projection_dim=24
    )
    return Tiny(config, files=images_of("ViTImageProcessor", 28))


#: Model type -> architecture, and how its tiny checkpoint is made.
OUTSIDE: Mapping[str, tuple[str, Callable[[], Tiny]]] = {
    "audioflamingo3": ("AudioFlamingo3ForConditionalGeneration", audio_flamingo),
    "owlvit": ("OwlViTModel", owlvit),
    "vision-text-dual-encoder": ("VisionTextDualEncoderModel", vision_text),
}
