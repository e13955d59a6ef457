"""Tiny models whose vision tower reads packed patches, with rotary positions of three axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import transformers as hf

from tiny.build import Tiny
from tiny.processors import Files
from tiny.vision_language import GENERATION, IMAGE, PLACEHOLDER, TEXT

TOKENS = {"image_token_id": IMAGE, "video_token_id": 301, "vision_start_token_id": 302, "vision_end_token_id": 303}
VISION = {
    "depth": 3,
    "num_heads": 4,
    "patch_size": 7,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
ROPE = {"rope_type": "default", "mrope_section": [1, 2, 1], "rope_theta": 10000.0}


def processor(kind: str) -> Files:
    """Return a processor that cuts images of any size into patches."""
    return {"preprocessor_config.json": {"image_processor_type": kind, "patch_size": 7, "merge_size": 2}}


def _text(**changes: object) -> dict[str, object]:
    return {**{name: value for name, value in TEXT.items() if name != "head_dim"}, "rope_parameters": ROPE, **changes}


def qwen2_vl() -> Tiny:
    """Qwen2-VL: full attention in the tower."""
    vision = {**VISION, "embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2}
    config = hf.Qwen2VLConfig(text_config=_text(), vision_config=vision, **TOKENS)
    return Tiny(config, PLACEHOLDER, processor("Qwen2VLImageProcessor"), GENERATION)


def qwen2_5_vl() -> Tiny:
    """Qwen2.5-VL: windows in most layers of the tower."""
    vision = {**VISION, "hidden_size": 32, "intermediate_size": 72, "out_hidden_size": 48, "window_size": 28,
              "fullatt_block_indexes": [1]}  # fmt: skip
    config = hf.Qwen2_5_VLConfig(text_config=_text(), vision_config=vision, **TOKENS)
    return Tiny(config, PLACEHOLDER, processor("Qwen2VLImageProcessor"), GENERATION)


def qwen3_vl() -> Tiny:
    """Qwen3-VL: learned positions of any size, rows of two layers of the tower added in the first decoder layers."""
    vision = {**VISION, "depth": 4, "hidden_size": 32, "intermediate_size": 72, "out_hidden_size": 48,
              "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}  # fmt: skip
    text = _text(head_dim=8, rope_parameters={**ROPE, "mrope_interleaved": True}, num_hidden_layers=4)
    config = hf.Qwen3VLConfig(text_config=text, vision_config=vision, **TOKENS)
    return Tiny(config, PLACEHOLDER, processor("Qwen2VLImageProcessor"), GENERATION)


def _glm(kind: type[hf.PretrainedConfig]) -> Callable[[], Tiny]:
    """GLM-4V and its kin: learned positions sampled from a square table."""

    def make() -> Tiny:
        vision = {**VISION, "hidden_size": 32, "intermediate_size": 72, "out_hidden_size": 48, "image_size": 35}
        tokens = {**TOKENS, "image_start_token_id": 304, "image_end_token_id": 305}
        config = kind(text_config=_text(), vision_config=vision, **tokens)
        return Tiny(config, PLACEHOLDER, processor("Glm4vImageProcessor"), GENERATION)

    return make


def exaone4_5() -> Tiny:
    """EXAONE 4.5: windows and grouped heads in the tower, positions of text in the language model."""
    vision = {**VISION, "hidden_size": 32, "intermediate_size": 72, "out_hidden_size": 48, "window_size": 28,
              "fullatt_block_indexes": [1], "num_key_value_heads": 2}  # fmt: skip
    text = {**TEXT, "model_type": "exaone4", "num_hidden_layers": 4, "sliding_window": 6, "sliding_window_pattern": 2}
    tokens = {"image_token_id": IMAGE, "video_token_id": 301}
    config = hf.Exaone4_5_Config(text_config=text, vision_config=vision, **tokens)
    return Tiny(config, PLACEHOLDER, processor("Qwen2VLImageProcessor"), GENERATION)


def paddleocr_vl() -> Tiny:
    """PaddleOCR-VL: the projector joins patches, learned positions of any size."""
    vision = {"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4,
              "image_size": 35, "patch_size": 7, "spatial_merge_size": 2}  # fmt: skip
    config = hf.PaddleOCRVLConfig(text_config=_text(head_dim=8), vision_config=vision, **TOKENS)
    return Tiny(config, PLACEHOLDER, processor("PaddleOCRVLImageProcessor"), GENERATION)


CHECKPOINTS: Mapping[tuple[str, str], Callable[[], Tiny]] = {
    ("exaone4_5", "Exaone4_5_ForConditionalGeneration"): exaone4_5,
    ("glm46v", "Glm46VForConditionalGeneration"): _glm(hf.Glm46VConfig),
    ("glm4v", "Glm4vForConditionalGeneration"): _glm(hf.Glm4vConfig),
    ("glm_ocr", "GlmOcrForConditionalGeneration"): _glm(hf.GlmOcrConfig),
    ("paddleocr_vl", "PaddleOCRVLForConditionalGeneration"): paddleocr_vl,
    ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"): qwen2_5_vl,
    ("qwen2_vl", "Qwen2VLForConditionalGeneration"): qwen2_vl,
    ("qwen3_vl", "Qwen3VLForConditionalGeneration"): qwen3_vl,
}
