"""Wrappers that a family needs beside the general ones of `export/components.py`: a literal table."""

from __future__ import annotations

from collections.abc import Mapping

from mcpc.export.families import (
    audio_language,
    deepstack,
    dual_encoder,
    experts,
    packed_vision,
    seq2seq,
    tiled_vision,
    vision_language,
)
from mcpc.export.wrapper import Wrapper

FAMILY_WRAPPERS: Mapping[str, type[Wrapper]] = {
    "similarity": dual_encoder.Similarity,
    "video-similarity": dual_encoder.VideoSimilarity,
    "blip2-images": dual_encoder.Blip2Images,
    "blip2-texts": dual_encoder.Blip2Texts,
    "blip-encoder": seq2seq.BlipEncoder,
    "blip-decoder": seq2seq.BlipDecoder,
    "moonshine-encoder": seq2seq.MoonshineEncoder,
    "seq2seq-encoder": seq2seq.Seq2SeqEncoder,
    "seq2seq-decoder": seq2seq.Seq2SeqDecoder,
    "aria-images": experts.AriaImages,
    "packed-images": packed_vision.PackedImages,
    "glm-images": packed_vision.GlmImages,
    "deepstack-decoder": packed_vision.DeepstackDecoder,
    "paddle-images": packed_vision.PaddleImages,
    "fun-asr-nano": audio_language.FunAsrNano,
    "glm-asr": audio_language.GlmAsr,
    "granite-speech": audio_language.GraniteSpeech,
    "moss": audio_language.Moss,
    "omni-asr": audio_language.OmniAsr,
    "qwen2-audio": audio_language.Qwen2Audio,
    "qwen3-asr": audio_language.Qwen3Asr,
    "chameleon-images": tiled_vision.ChameleonImages,
    "docling-images": deepstack.DoclingImages,
    "granite-embed": deepstack.GraniteEmbed,
    "granite-images": deepstack.GraniteImages,
    "tapped-decoder": deepstack.TappedDecoder,
    "ovis2-embed": tiled_vision.Ovis2Embed,
    "lfm2-images": tiled_vision.Lfm2Images,
    "pixtral": tiled_vision.Pixtral,
    "any-resolution": tiled_vision.AnyResolution,
    "tiles": vision_language.Tiles,
    "prefix-decoder": vision_language.PrefixDecoder,
    "language-model": vision_language.LanguageModel,
}
