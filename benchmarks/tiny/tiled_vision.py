"""Tiny models whose images become as many rows as they need, by a host function."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import transformers as hf

from tiny.build import Tiny
from tiny.processors import images_of
from tiny.vision_language import GENERATION, IMAGE, PLACEHOLDER, SIGLIP, TEXT, VISION, _text

VIDEO = 301
RESOLUTIONS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
PIXTRAL = {
    "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 70,
    "patch_size": 7, "head_dim": 8,
}  # fmt: skip


def _tiny(config: hf.PretrainedConfig, processor: str) -> Tiny:
    return Tiny(config, PLACEHOLDER, images_of(processor, 28), GENERATION)


def llava_next() -> Tiny:
    """LLaVA-NeXT over Mistral."""
    config = hf.LlavaNextConfig(
        vision_config=hf.CLIPVisionConfig(**VISION), text_config=_text(hf.MistralConfig, sliding_window=None),
        image_token_index=IMAGE, image_grid_pinpoints=RESOLUTIONS, vision_feature_layer=-2,
    )  # fmt: skip
    return _tiny(config, "LlavaNextImageProcessor")


def llava_next_video() -> Tiny:
    """LLaVA-NeXT-Video, as it reads images."""
    config = hf.LlavaNextVideoConfig(
        vision_config=hf.CLIPVisionConfig(**VISION), text_config=hf.LlamaConfig(**TEXT), image_token_index=IMAGE,
        video_token_index=VIDEO, image_grid_pinpoints=RESOLUTIONS, vision_feature_layer=-2,
    )  # fmt: skip
    return _tiny(config, "LlavaNextImageProcessor")


def llava_onevision() -> Tiny:
    """LLaVA-OneVision; images of more than two tiles are resized."""
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(**SIGLIP), text_config=_text(hf.Qwen2Config, head_dim=None),
        image_token_index=IMAGE, video_token_index=VIDEO, image_grid_pinpoints=RESOLUTIONS, vision_feature_layer=-1,
        vision_aspect_ratio="anyres_max_2", vision_feature_select_strategy="full",
    )  # fmt: skip
    return _tiny(config, "LlavaOnevisionImageProcessor")


def mistral3() -> Tiny:
    """Mistral 3: Pixtral's tower, patches merged by four."""
    config = hf.Mistral3Config(
        vision_config=hf.PixtralVisionConfig(**PIXTRAL), text_config=_text(hf.MistralConfig, sliding_window=None),
        image_token_index=IMAGE, spatial_merge_size=2, vision_feature_layer=-1,
    )  # fmt: skip
    return _tiny(config, "PixtralImageProcessor")


def lighton_ocr() -> Tiny:
    """LightOn OCR: Pixtral's tower, Qwen 3."""
    config = hf.LightOnOcrConfig(
        vision_config=hf.PixtralVisionConfig(**PIXTRAL), text_config=_text(hf.Qwen3Config), image_token_id=IMAGE,
        spatial_merge_size=2,
    )  # fmt: skip
    return _tiny(config, "PixtralImageProcessor")


CHECKPOINTS: Mapping[tuple[str, str], Callable[[], Tiny]] = {
    ("lighton_ocr", "LightOnOcrForConditionalGeneration"): lighton_ocr,
    ("llava_next", "LlavaNextForConditionalGeneration"): llava_next,
    ("llava_next_video", "LlavaNextVideoForConditionalGeneration"): llava_next_video,
    ("llava_onevision", "LlavaOnevisionForConditionalGeneration"): llava_onevision,
    ("mistral3", "Mistral3ForConditionalGeneration"): mistral3,
}
