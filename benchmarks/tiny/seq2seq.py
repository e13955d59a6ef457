"""Tiny encoder-decoder models that read images, and combinations of a foreign encoder with a foreign decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transformers as hf

from tiny.build import END, PAD, START, VOCABULARY, Tiny
from tiny.dual_encoders import TEXT, VISION
from tiny.processors import audio_of, images_of

BEGIN = 3
GENERATION = {"eos_token_id": END, "pad_token_id": PAD, "bos_token_id": START, "decoder_start_token_id": BEGIN}
SPECIAL = {"<|start|>": BEGIN}
DECODER: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 48, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 72,
    "max_position_embeddings": 64, "pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END,
    "decoder_start_token_id": BEGIN,
}  # fmt: skip


def blip() -> Tiny:
    """BLIP for captions."""
    text = {**TEXT, "encoder_hidden_size": 32, "sep_token_id": END, "is_decoder": True}
    config = hf.BlipConfig(text_config=text, vision_config=VISION, projection_dim=24)
    return Tiny(config, files=images_of("BlipImageProcessor", 28), generation=GENERATION)


def pix2struct() -> Tiny:
    """Pix2Struct: patches of seven by seven pixels."""
    vision = {
        "hidden_size": 36, "patch_embed_hidden_size": 147, "d_ff": 56, "d_kv": 9, "num_hidden_layers": 2,
        "num_attention_heads": 4, "seq_len": 64,
    }  # fmt: skip
    text = {
        "vocab_size": VOCABULARY, "hidden_size": 36, "d_kv": 12, "d_ff": 72, "num_layers": 3, "num_heads": 3,
        "pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": BEGIN,
    }  # fmt: skip
    config = hf.Pix2StructConfig(text_config=text, vision_config=vision)
    return Tiny(config, SPECIAL, images_of("Pix2StructImageProcessor", 28), GENERATION)


def pp_formulanet() -> Tiny:
    """PP-FormulaNet: windowed and global layers, two strided convolutions."""
    vision = {
        "hidden_size": 32, "output_channels": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 64,
        "patch_size": 4, "window_size": 3, "global_attn_indexes": [1, 3], "mlp_dim": 56, "post_conv_in_channels": 24,
        "post_conv_mid_channels": 28, "post_conv_out_channels": 36, "decoder_hidden_size": 48,
    }  # fmt: skip
    config = hf.PPFormulaNetConfig(text_config=dict(DECODER), vision_config=vision)
    return Tiny(config, SPECIAL, images_of("PPFormulaNetImageProcessor", 64), GENERATION)


def vision_encoder_decoder() -> Tiny:
    """TrOCR: a ViT and a decoder of another width."""
    encoder = hf.ViTConfig(**VISION)
    decoder = hf.TrOCRConfig(**DECODER, cross_attention_hidden_size=32, is_decoder=True, add_cross_attention=True)
    config = hf.VisionEncoderDecoderConfig(
        encoder=encoder.to_dict(), decoder=decoder.to_dict(), decoder_start_token_id=BEGIN, pad_token_id=PAD,
        eos_token_id=END,
    )  # fmt: skip
    return Tiny(config, SPECIAL, images_of("ViTImageProcessor", 28), GENERATION)


def speech_encoder_decoder() -> Tiny:
    """wav2vec 2.0 and mBART's decoder, with a projection between them."""
    encoder = hf.Wav2Vec2Config(
        hidden_size=40, num_hidden_layers=2, num_attention_heads=4, intermediate_size=56, conv_dim=[16, 20, 24],
        conv_stride=[10, 4, 4], conv_kernel=[20, 8, 8], num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        feat_extract_norm="layer", do_stable_layer_norm=True,
    )  # fmt: skip
    decoder = hf.MBartConfig(**DECODER, is_decoder=True, add_cross_attention=True)
    config = hf.SpeechEncoderDecoderConfig(
        encoder=encoder.to_dict(), decoder=decoder.to_dict(), decoder_start_token_id=BEGIN, pad_token_id=PAD,
        eos_token_id=END,
    )  # fmt: skip
    return Tiny(config, SPECIAL, audio_of("Wav2Vec2FeatureExtractor"), GENERATION)


CHECKPOINTS: Mapping[tuple[str, str], Callable[[], Tiny]] = {
    ("blip", "BlipForConditionalGeneration"): blip,
    ("pix2struct", "Pix2StructForConditionalGeneration"): pix2struct,
    ("pp_formulanet", "PPFormulaNetForConditionalGeneration"): pp_formulanet,
    ("speech-encoder-decoder", "SpeechEncoderDecoderModel"): speech_encoder_decoder,
    ("vision-encoder-decoder", "VisionEncoderDecoderModel"): vision_encoder_decoder,
}
