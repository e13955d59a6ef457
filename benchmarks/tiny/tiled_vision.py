"""Tiny models whose images become as many rows as they need, by a host function."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import transformers as hf

from tiny.build import PAD, Tiny
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


GRANITE = {
    "head_dim": None, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
}  # fmt: skip


def granite_docling() -> Tiny:
    """Granite Docling: two taps of the tower, by the coarse route."""
    vision = {"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4,
              "image_size": 28, "patch_size": 7, "scale_factor": 2, "out_hidden_size": 48,
              "deepstack_visual_indexes": [0, 2], "use_fine_route": True}  # fmt: skip
    config = hf.GraniteDoclingConfig(
        text_config=_text(hf.GraniteDoclingTextConfig, num_hidden_layers=4, **GRANITE), vision_config=vision,
        image_token_id=IMAGE, pad_token_id=PAD,
    )  # fmt: skip
    return _tiny(config, "GraniteDoclingImageProcessor")


def granite4_vision() -> Tiny:
    """Granite 4 Vision: two taps of the tower and four spatial ones, into six layers."""
    former = {"model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 56,
              "cross_attention_frequency": 1, "max_position_embeddings": 64,
              "use_qformer_text_input": False}  # fmt: skip
    config = hf.Granite4VisionConfig(
        vision_config=hf.SiglipVisionConfig(**{**SIGLIP, "hidden_size": 64}), qformer_config=former,
        text_config=_text(hf.Granite4VisionTextConfig, num_hidden_layers=6, **GRANITE), image_token_index=IMAGE,
        image_grid_pinpoints=RESOLUTIONS, downsample_rate="1/2", deepstack_layer_map=[[1, 0], [-1, 5]],
        spatial_vision_layer=-2, spatial_target_layers=[1, 2, 3, 4], vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )  # fmt: skip
    return _tiny(config, "LlavaNextImageProcessor")


def lfm2_vl() -> Tiny:
    """LFM2-VL: SigLIP 2, convolutions beside attention."""
    text = _text(
        hf.Lfm2Config, head_dim=None, num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2,
        block_auto_adjust_ff_dim=False,
    )  # fmt: skip
    vision = hf.Siglip2VisionConfig(
        hidden_size=32, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4, num_patches=16, patch_size=4,
        vision_use_head=False,
    )  # fmt: skip
    config = hf.Lfm2VlConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE, downsample_factor=2, projector_hidden_size=40
    )
    return _tiny(config, "Lfm2VlImageProcessor")


CHECKPOINTS: Mapping[tuple[str, str], Callable[[], Tiny]] = {
    ("granite4_vision", "Granite4VisionForConditionalGeneration"): granite4_vision,
    ("granite_docling", "GraniteDoclingForConditionalGeneration"): granite_docling,
    ("lfm2_vl", "Lfm2VlForConditionalGeneration"): lfm2_vl,
    ("lighton_ocr", "LightOnOcrForConditionalGeneration"): lighton_ocr,
    ("llava_next", "LlavaNextForConditionalGeneration"): llava_next,
    ("llava_next_video", "LlavaNextVideoForConditionalGeneration"): llava_next_video,
    ("llava_onevision", "LlavaOnevisionForConditionalGeneration"): llava_onevision,
    ("mistral3", "Mistral3ForConditionalGeneration"): mistral3,
}
