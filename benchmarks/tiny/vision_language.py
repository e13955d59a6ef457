"""Tiny models whose language model reads image or audio rows between its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import transformers as hf

from tiny.build import END, PAD, START, VOCABULARY, Tiny
from tiny.processors import clip_images, images_of, siglip_images

IMAGE = 300
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip
GENERATION = {"eos_token_id": END, "pad_token_id": PAD, "bos_token_id": START}


def llava() -> Tiny:
    """LLaVA 1.5: CLIP's tower, a Llama."""
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION), text_config=hf.LlamaConfig(**TEXT), image_token_index=IMAGE,
        vision_feature_layer=-2, vision_feature_select_strategy="default",
    )  # fmt: skip
    return Tiny(config, {"<image>": IMAGE}, clip_images(28), GENERATION)


PLACEHOLDER = {"<image>": IMAGE}
SLIDING = {"sliding_window": 6, "num_hidden_layers": 4}
SIGLIP = {**VISION, "num_hidden_layers": 2, "vision_use_head": False}


def _text(kind: type[hf.PretrainedConfig], **changes: object) -> hf.PretrainedConfig:
    """Return a text config of a kind; a change to None leaves the key out."""
    return kind(**{key: value for key, value in {**TEXT, **changes}.items() if value is not None})


def vipllava() -> Tiny:
    """VipLLaVA: features of several layers, concatenated."""
    config = hf.VipLlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION), text_config=_text(hf.LlamaConfig), image_token_index=IMAGE,
        vision_feature_layers=[-2, -3, 1],
    )  # fmt: skip
    return Tiny(config, PLACEHOLDER, clip_images(28), GENERATION)


def aya_vision() -> Tiny:
    """Aya Vision: SigLIP, pixel shuffle, Cohere 2."""
    config = hf.AyaVisionConfig(
        vision_config=hf.SiglipVisionConfig(**SIGLIP), text_config=_text(hf.Cohere2Config, **SLIDING),
        image_token_index=IMAGE, downsample_factor=2, alignment_intermediate_size=40,
    )  # fmt: skip
    return Tiny(config, PLACEHOLDER, images_of("GotOcr2ImageProcessor", 28), GENERATION)


def cohere2_vision() -> Tiny:
    """Command A Vision: SigLIP, pixel shuffle, Cohere 2."""
    config = hf.Cohere2VisionConfig(
        vision_config=hf.SiglipVisionConfig(**SIGLIP), text_config=_text(hf.Cohere2Config, **SLIDING),
        image_token_id=IMAGE, downsample_factor=2, alignment_intermediate_size=40,
    )  # fmt: skip
    return Tiny(config, PLACEHOLDER, images_of("Cohere2VisionImageProcessorFast", 28), GENERATION)


def _internvl(kind: type[hf.PretrainedConfig], text: hf.PretrainedConfig) -> Tiny:
    vision = {
        **VISION,
        "num_hidden_layers": 2,
        "image_size": [28, 28],
        "patch_size": [7, 7],
        "layer_scale_init_value": 0.9,
    }
    config = kind(
        vision_config=vision, text_config=text, image_token_id=IMAGE, image_seq_length=4, downsample_ratio=0.5
    )
    return Tiny(config, PLACEHOLDER, images_of("GotOcr2ImageProcessor", 28), GENERATION)


def internvl() -> Tiny:
    """InternVL 3: its own tower, pixel shuffle, Qwen 2."""
    return _internvl(hf.InternVLConfig, _text(hf.Qwen2Config, head_dim=None))


def qianfan_ocr() -> Tiny:
    """Qianfan OCR: InternVL's tower, Qwen 3."""
    return _internvl(hf.QianfanOCRConfig, _text(hf.Qwen3Config))


def janus() -> Tiny:
    """Janus: SigLIP-like tower, aligner, Llama; its image generator stays out."""
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28, "patch_size": 7,
              "projection_dim": 48, "depth": 2, "num_image_tokens": 16, "mlp_ratio": 2.25}  # fmt: skip
    vq = {"embed_dim": 8, "num_embeddings": 40, "latent_channels": 32, "base_channels": 32,
          "channel_multiplier": [1, 1], "num_res_blocks": 1, "num_patches": 4,
          "projection_dim": 48, "image_token_embed_dim": 48}  # fmt: skip
    config = hf.JanusConfig(text_config=_text(hf.LlamaConfig), vision_config=vision, vq_config=vq, image_token_id=IMAGE)
    return Tiny(config, PLACEHOLDER, images_of("JanusImageProcessor", 28), GENERATION)


def deepseek_vl() -> Tiny:
    """DeepSeek-VL: SigLIP, aligner, Llama."""
    config = hf.DeepseekVLConfig(
        text_config=_text(hf.LlamaConfig), vision_config=hf.SiglipVisionConfig(**SIGLIP), image_token_id=IMAGE
    )
    return Tiny(config, PLACEHOLDER, images_of("DeepseekVLImageProcessor", 28), GENERATION)


def gemma3() -> Tiny:
    """Gemma 3: sliding and full attention, scaled embeddings, image rows that see each other."""
    text = _text(hf.Gemma3TextConfig, num_hidden_layers=4, sliding_window=8, query_pre_attn_scalar=8,
                 layer_types=["sliding_attention", "full_attention"] * 2)  # fmt: skip
    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(**SIGLIP), text_config=text, image_token_index=IMAGE, mm_tokens_per_image=4,
        boi_token_index=301, eoi_token_index=302,
    )  # fmt: skip
    return Tiny(config, PLACEHOLDER, images_of("Gemma3ImageProcessor", 28), GENERATION)


def _got_ocr2(kind: type[hf.PretrainedConfig]) -> Tiny:
    """Return a model of GOT-OCR 2's shape: a tower of windows with relative positions, Qwen 2."""
    vision = {"hidden_size": 32, "output_channels": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
              "image_size": 64, "patch_size": 8, "window_size": 3, "global_attn_indexes": [1],
              "mlp_dim": 56}  # fmt: skip
    config = kind(
        vision_config=vision,
        text_config=_text(hf.Qwen2Config, head_dim=None),
        image_token_index=IMAGE,
        image_seq_length=4,
    )
    return Tiny(config, PLACEHOLDER, images_of("GotOcr2ImageProcessor", 64), GENERATION)


def got_ocr2() -> Tiny:
    """GOT-OCR 2."""
    return _got_ocr2(hf.GotOcr2Config)


def pp_chart2table() -> Tiny:
    """PP-Chart2Table: GOT-OCR 2 under another config."""
    return _got_ocr2(hf.PPChart2TableConfig)


def instructblip() -> Tiny:
    """InstructBLIP over Llama."""
    base = blip2().config
    config = hf.InstructBlipConfig(
        vision_config=base.vision_config.to_dict(), qformer_config=base.qformer_config.to_dict(),
        text_config=_text(hf.LlamaConfig), num_query_tokens=7, image_token_index=IMAGE,
    )  # fmt: skip
    return Tiny(config, PLACEHOLDER, images_of("BlipImageProcessor", 28), GENERATION)


def paligemma() -> Tiny:
    """PaliGemma: Gemma with a prefix that sees itself."""
    config = hf.PaliGemmaConfig(
        vision_config=hf.SiglipVisionConfig(**SIGLIP, projection_dim=48), text_config=_text(hf.GemmaConfig),
        image_token_index=IMAGE, projection_dim=48, hidden_size=48,
    )  # fmt: skip
    return Tiny(config, PLACEHOLDER, siglip_images(28), GENERATION)


def _idefics3(kind: type[hf.PretrainedConfig], processor: str) -> Tiny:
    vision = {**VISION, "num_hidden_layers": 2}
    config = kind(vision_config=vision, text_config=_text(hf.LlamaConfig), scale_factor=2, image_token_id=IMAGE)
    return Tiny(config, PLACEHOLDER, images_of(processor, 28), GENERATION)


def idefics3() -> Tiny:
    """Idefics 3."""
    return _idefics3(hf.Idefics3Config, "Idefics3ImageProcessor")


def smolvlm() -> Tiny:
    """SmolVLM."""
    return _idefics3(hf.SmolVLMConfig, "SmolVLMImageProcessor")


def idefics2() -> Tiny:
    """Idefics 2: perceiver resampler, Mistral with a sliding window."""
    perceiver = {"hidden_size": 48, "resampler_n_latents": 5, "resampler_depth": 2, "resampler_n_heads": 6,
                 "resampler_head_dim": 8, "num_key_value_heads": 2}  # fmt: skip
    config = hf.Idefics2Config(
        vision_config={**VISION, "num_hidden_layers": 2}, perceiver_config=perceiver,
        text_config=_text(hf.MistralConfig, sliding_window=9), image_token_id=IMAGE,
    )  # fmt: skip
    return Tiny(config, PLACEHOLDER, images_of("Idefics2ImageProcessor", 28), GENERATION)


def blip2() -> Tiny:
    """BLIP-2 over OPT."""
    vision = {**VISION, "num_hidden_layers": 2}
    qformer = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
               "intermediate_size": 56, "encoder_hidden_size": 32}  # fmt: skip
    text = hf.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=2, ffn_dim=88, num_attention_heads=6,
        max_position_embeddings=256, word_embed_proj_dim=48, pad_token_id=PAD, bos_token_id=START, eos_token_id=END,
    )  # fmt: skip
    config = hf.Blip2Config(
        vision_config=vision, qformer_config=qformer, text_config=text, num_query_tokens=7, image_token_index=IMAGE
    )
    return Tiny(config, PLACEHOLDER, images_of("BlipImageProcessor", 28), GENERATION)


def chameleon() -> Tiny:
    """Chameleon: 24 image words, of which a VQ-GAN makes 64 for an image."""
    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    words = {f"IMGIMG{str(number).translate(letters)}Z": 200 + number for number in range(24)}
    vq = {"embed_dim": 8, "num_embeddings": 24, "latent_channels": 8, "resolution": 16, "base_channels": 32,
          "channel_multiplier": [1, 2], "num_res_blocks": 1}  # fmt: skip
    config = hf.ChameleonConfig(**TEXT, vq_config=vq, vocabulary_map={"<image>": IMAGE, **words})
    return Tiny(config, PLACEHOLDER, images_of("ChameleonImageProcessor", 16), GENERATION)


def video_llava() -> Tiny:
    """Video-LLaVA, as it reads images."""
    config = hf.VideoLlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION), text_config=_text(hf.LlamaConfig), image_token_index=IMAGE,
        video_token_index=301, vision_feature_layer=-2,
    )  # fmt: skip
    return Tiny(config, PLACEHOLDER, images_of("VideoLlavaImageProcessor", 28), GENERATION)


def deepseek_vl_hybrid() -> Tiny:
    """DeepSeek-VL with two towers: SigLIP, and SAM's."""
    large = hf.SamVisionConfig(
        hidden_size=32, output_channels=24, num_hidden_layers=3, num_attention_heads=4, image_size=64, patch_size=8,
        window_size=3, global_attn_indexes=[1], mlp_dim=56,
    )  # fmt: skip
    config = hf.DeepseekVLHybridConfig(
        text_config=_text(hf.LlamaConfig), vision_config=hf.SiglipVisionConfig(**SIGLIP), high_res_vision_config=large,
        image_token_id=IMAGE,
    )  # fmt: skip
    return Tiny(config, PLACEHOLDER, images_of("DeepseekVLHybridImageProcessor", 28), GENERATION)


def ovis2() -> Tiny:
    """Ovis 2: a visual vocabulary, five of whose rows surround an image."""
    vision = {"hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4,
              "image_size": 28, "patch_size": 7, "hidden_stride": 2, "vocab_size": 37,
              "num_visual_indicator_tokens": 5}  # fmt: skip
    config = hf.Ovis2Config(
        vision_config=vision, text_config=_text(hf.Qwen2Config, head_dim=None), image_token_id=IMAGE,
        visual_indicator_token_ids=[11, 12, 13, 14, 15], vocab_size=VOCABULARY, hidden_size=48,
    )  # fmt: skip
    return Tiny(config, PLACEHOLDER, images_of("Ovis2ImageProcessor", 28), GENERATION)


def fuyu() -> Tiny:
    """Fuyu: linear patches, Persimmon."""
    text = {name: value for name, value in TEXT.items() if name not in ("num_key_value_heads", "head_dim")}
    config = hf.FuyuConfig(
        **text, image_size=28, patch_size=7, num_channels=3, text_config=hf.PersimmonConfig(**text),
        image_token_id=IMAGE,
    )  # fmt: skip
    return Tiny(config, PLACEHOLDER, images_of("FuyuImageProcessor", 28), GENERATION)


CHECKPOINTS: Mapping[tuple[str, str], Callable[[], Tiny]] = {
    ("aya_vision", "AyaVisionForConditionalGeneration"): aya_vision,
    ("blip-2", "Blip2ForConditionalGeneration"): blip2,
    ("chameleon", "ChameleonForConditionalGeneration"): chameleon,
    ("cohere2_vision", "Cohere2VisionForConditionalGeneration"): cohere2_vision,
    ("deepseek_vl", "DeepseekVLForConditionalGeneration"): deepseek_vl,
    ("deepseek_vl_hybrid", "DeepseekVLHybridForConditionalGeneration"): deepseek_vl_hybrid,
    ("fuyu", "FuyuForCausalLM"): fuyu,
    ("gemma3", "Gemma3ForConditionalGeneration"): gemma3,
    ("got_ocr2", "GotOcr2ForConditionalGeneration"): got_ocr2,
    ("idefics2", "Idefics2ForConditionalGeneration"): idefics2,
    ("idefics3", "Idefics3ForConditionalGeneration"): idefics3,
    ("instructblip", "InstructBlipForConditionalGeneration"): instructblip,
    ("internvl", "InternVLForConditionalGeneration"): internvl,
    ("janus", "JanusForConditionalGeneration"): janus,
    ("llava", "LlavaForConditionalGeneration"): llava,
    ("ovis2", "Ovis2ForConditionalGeneration"): ovis2,
    ("paligemma", "PaliGemmaForConditionalGeneration"): paligemma,
    ("pp_chart2table", "GotOcr2ForConditionalGeneration"): pp_chart2table,
    ("qianfan_ocr", "QianfanOCRForConditionalGeneration"): qianfan_ocr,
    ("smolvlm", "SmolVLMForConditionalGeneration"): smolvlm,
    ("video_llava", "VideoLlavaForConditionalGeneration"): video_llava,
    ("vipllava", "VipLlavaForConditionalGeneration"): vipllava,
}
