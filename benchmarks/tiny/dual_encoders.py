"""Tiny models with an image or video tower and a text tower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transformers as hf

from tiny.build import END, PAD, START, VOCABULARY, Tiny
from tiny.processors import Files, clip_images, images_of, siglip_images

TEXT: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 40, "pad_token_id": PAD, "bos_token_id": START,
    "eos_token_id": END,
}  # fmt: skip
VISION: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip


def _clip_like(config_class: type[Any], files: Files, **text: object) -> Callable[[], Tiny]:
    """Return the maker of a model whose config holds two towers and `projection_dim`."""

    def make() -> Tiny:
        return Tiny(config_class(text_config={**TEXT, **text}, vision_config=VISION, projection_dim=24), files=files)

    return make


def align() -> Tiny:
    """ALIGN: two kinds of EfficientNet block, with and without a residual."""
    vision = {
        "image_size": 32, "in_channels": [32, 16, 24], "out_channels": [16, 24, 40], "kernel_sizes": [3, 5, 3],
        "strides": [1, 2, 2], "expand_ratios": [1, 6, 6], "num_block_repeats": [1, 2, 2], "depthwise_padding": [],
        "hidden_dim": 72, "width_coefficient": 1.0, "depth_coefficient": 1.0,
    }  # fmt: skip
    text = {**TEXT, "type_vocab_size": 2}
    return Tiny(hf.AlignConfig(text_config=text, vision_config=vision, projection_dim=40),
                files=images_of("EfficientNetImageProcessor", 32))  # fmt: skip


def siglip() -> Tiny:
    """SigLIP: both towers end in one width."""
    text = {**TEXT, "hidden_size": 32, "projection_size": 32}
    return Tiny(hf.SiglipConfig(text_config=text, vision_config=VISION), files=siglip_images(28))


def siglip2() -> Tiny:
    """SigLIP 2 NaFlex: sixteen learned positions, resized to the shape of each image."""
    text = {**TEXT, "hidden_size": 32, "projection_size": 32}
    vision = {name: value for name, value in VISION.items() if name != "image_size"} | {"num_patches": 16}
    return Tiny(hf.Siglip2Config(text_config=text, vision_config=vision), files=images_of("Siglip2ImageProcessor", 28))


def tipsv2() -> Tiny:
    """TIPSv2."""
    vision = {name: value for name, value in VISION.items() if name != "intermediate_size"}
    text = {**TEXT, "hidden_size": 32}
    return Tiny(hf.Tipsv2Config(text_config=text, vision_config=vision), files=images_of("Tipsv2ImageProcessor", 28))


def videoprism() -> Tiny:
    """VideoPrism: spatial, temporal and auxiliary layers."""
    vision = {name: value for name, value in VISION.items() if name not in ("patch_size", "num_hidden_layers")} | {
        "num_frames": 5, "tubelet_size": [1, 7, 7], "num_spatial_layers": 3, "num_temporal_layers": 2,
        "num_auxiliary_layers": 2,
    }  # fmt: skip
    return Tiny(hf.VideoPrismConfig(text_config={**TEXT, "hidden_size": 32}, vision_config=vision),
                files=images_of("LlavaOnevisionVideoProcessor", 28))  # fmt: skip


def blip2_retrieval() -> Tiny:
    """BLIP-2 for retrieval: a Q-Former whose every second layer reads the image."""
    qformer = {**TEXT, "hidden_size": 40, "encoder_hidden_size": 32, "cross_attention_frequency": 2,
               "num_hidden_layers": 4, "use_qformer_text_input": True}  # fmt: skip
    config = hf.Blip2Config(
        vision_config=VISION, qformer_config=qformer, text_config={"model_type": "opt", "hidden_size": 16,
        "num_hidden_layers": 1, "ffn_dim": 16, "num_attention_heads": 1, "vocab_size": 8, "word_embed_proj_dim": 16},
        num_query_tokens=5, image_text_hidden_size=24,
    )  # fmt: skip
    return Tiny(config, files=images_of("BlipImageProcessor", 28))


_ROBERTA = {"type_vocab_size": 1, "project_dim": 24, "pad_token_id": 1, "bos_token_id": PAD}

CHECKPOINTS: Mapping[tuple[str, str], Callable[[], Tiny]] = {
    ("align", "AlignModel"): align,
    ("altclip", "AltCLIPModel"): _clip_like(hf.AltCLIPConfig, clip_images(28), **_ROBERTA),
    ("blip", "BlipModel"): _clip_like(hf.BlipConfig, images_of("BlipImageProcessor", 28), encoder_hidden_size=32),
    ("blip-2", "Blip2ForImageTextRetrieval"): blip2_retrieval,
    ("chinese_clip", "ChineseCLIPModel"): _clip_like(hf.ChineseCLIPConfig, clip_images(28)),
    ("clip", "CLIPModel"): _clip_like(hf.CLIPConfig, clip_images(28)),
    ("clipseg", "CLIPSegModel"): _clip_like(hf.CLIPSegConfig, images_of("ViTImageProcessor", 28)),
    ("metaclip_2", "MetaClip2Model"): _clip_like(hf.MetaClip2Config, clip_images(28)),
    ("siglip", "SiglipModel"): siglip,
    ("siglip2", "Siglip2Model"): siglip2,
    ("tipsv2", "Tipsv2Model"): tipsv2,
    ("videoprism", "VideoPrismClipModel"): videoprism,
}
