"""Tiny models whose language model reads rows of sound between its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transformers as hf

from tiny.build import END, PAD, START, VOCABULARY, Tiny
from tiny.processors import audio_of

AUDIO = 300
GENERATION = {"eos_token_id": END, "pad_token_id": PAD, "bos_token_id": START}
TEXT: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END,
}  # fmt: skip
WHISPER: Mapping[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 72, "num_mel_bins": 16,
    "max_source_positions": 60,
}  # fmt: skip
TOWER: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_mel_bins": 16,
}  # fmt: skip


def _tiny(config: hf.PretrainedConfig, extractor: str) -> Tiny:
    return Tiny(config, {"<|audio|>": AUDIO}, audio_of(extractor), GENERATION)


def qwen2_audio() -> Tiny:
    """Qwen2-Audio: Whisper's encoder with pooling, Qwen 2."""
    config = hf.Qwen2AudioConfig(audio_config=WHISPER, text_config=hf.Qwen2Config(**TEXT), audio_token_index=AUDIO)
    return _tiny(config, "WhisperFeatureExtractor")


def voxtral() -> Tiny:
    """Voxtral: Whisper's encoder, four rows in one, Llama."""
    config = hf.VoxtralConfig(
        audio_config={**TOWER, "max_source_positions": 60}, text_config=hf.LlamaConfig(**TEXT, head_dim=8),
        audio_token_id=AUDIO,
    )  # fmt: skip
    return _tiny(config, "WhisperFeatureExtractor")


def glmasr() -> Tiny:
    """GLM-ASR: rotary encoder, four rows in one, Llama."""
    config = hf.GlmAsrConfig(
        audio_config={**TOWER, "num_key_value_heads": 4, "max_position_embeddings": 100},
        text_config=hf.LlamaConfig(**TEXT), audio_token_id=AUDIO,
    )  # fmt: skip
    return _tiny(config, "WhisperFeatureExtractor")


def fun_asr_nano() -> Tiny:
    """Fun-ASR-Nano: SAN-M encoder, adaptor, Qwen 3."""
    encoder = {
        "num_mel_bins": 16, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 72,
        "num_hidden_layers": 5, "num_stacked_frames": 3, "num_timestamp_prediction_layers": 2, "fsmn_kernel_size": 5,
        "max_position_embeddings": 100,
    }  # fmt: skip
    adaptor = {
        "hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 12, "num_hidden_layers": 2,
        "projector_hidden_size": 56,
    }  # fmt: skip
    config = hf.FunAsrNanoConfig(
        audio_config=encoder, adaptor_config=adaptor, text_config=hf.Qwen3Config(**TEXT, head_dim=8),
        audio_token_id=AUDIO,
    )  # fmt: skip
    return _tiny(config, "FunAsrNanoFeatureExtractor")


def moss_transcribe_diarize() -> Tiny:
    """MOSS-Transcribe-Diarize: Whisper's encoder, four rows in one, Qwen 3."""
    config = hf.MossTranscribeDiarizeConfig(
        audio_config={**TOWER, "intermediate_size": 72, "max_source_positions": 60},
        text_config=hf.Qwen3Config(**TEXT, head_dim=8), audio_token_id=AUDIO,
    )  # fmt: skip
    return _tiny(config, "MossTranscribeDiarizeFeatureExtractor")


def _granite_speech(kind: type[Any], **encoder: Any) -> Callable[[], Tiny]:
    def make() -> Tiny:
        conformer = {
            "hidden_dim": 32, "num_layers": 3, "num_heads": 4, "dim_head": 8, "input_dim": 16, "output_dim": 20,
            "context_size": 20, "max_pos_emb": 30, "feedforward_mult": 2, "conv_kernel_size": 5, **encoder,
        }  # fmt: skip
        width = 32 * (1 + len(encoder.get("cat_hidden_layers", ())))
        projector = hf.Blip2QFormerConfig(
            hidden_size=40, num_hidden_layers=2, num_attention_heads=5, intermediate_size=64,
            encoder_hidden_size=width, vocab_size=8,
        )  # fmt: skip
        text = hf.GraniteConfig(
            **TEXT, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.7, attention_multiplier=0.3
        )
        config = kind(
            encoder_config=conformer, projector_config=projector, text_config=text, audio_token_index=AUDIO,
            has_lora_adapter=False, downsample_rate=5, window_size=15,
        )  # fmt: skip
        return _tiny(config, "GraniteSpeechFeatureExtractor")

    return make


def omniasr() -> Tiny:
    """OmniASR: seven convolutions become three, Llama."""
    audio = {
        "hidden_size": 32, "conv_dim": [16, 20, 24], "conv_kernel": [10, 3, 2], "conv_stride": [5, 2, 2],
        "num_attention_heads": 4, "num_hidden_layers": 2, "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4, "intermediate_size": 72,
    }  # fmt: skip
    config = hf.OmniASRConfig(
        audio_config=audio, text_config=hf.LlamaConfig(**TEXT), audio_token_id=AUDIO, bos_token_id=START,
        pad_token_id=PAD, eos_token_id=END,
    )  # fmt: skip
    return _tiny(config, "OmniASRFeatureExtractor")


def qwen3_asr() -> Tiny:
    """Qwen3-ASR: chunks of a hundred frames, windows of two chunks, Qwen 3."""
    config = hf.Qwen3ASRConfig(
        audio_config={**WHISPER, "n_window_infer": 200, "output_dim": 48, "downsample_hidden_size": 12,
                      "max_position_embeddings": 13},
        text_config=hf.Qwen3Config(**TEXT, head_dim=8), audio_token_id=AUDIO, pad_token_id=PAD, eos_token_id=END,
    )  # fmt: skip
    return _tiny(config, "WhisperFeatureExtractor")


CHECKPOINTS: Mapping[tuple[str, str], Callable[[], Tiny]] = {
    ("fun_asr_nano", "FunAsrNanoForConditionalGeneration"): fun_asr_nano,
    ("glmasr", "GlmAsrForConditionalGeneration"): glmasr,
    ("granite_speech", "GraniteSpeechForConditionalGeneration"): _granite_speech(hf.GraniteSpeechConfig),
    ("granite_speech_plus", "GraniteSpeechPlusForConditionalGeneration"): _granite_speech(
        hf.GraniteSpeechPlusConfig, cat_hidden_layers=[1]
    ),
    ("moss_transcribe_diarize", "MossTranscribeDiarizeForConditionalGeneration"): moss_transcribe_diarize,
    ("omniasr", "OmniASRForConditionalGeneration"): omniasr,
    ("qwen2_audio", "Qwen2AudioForConditionalGeneration"): qwen2_audio,
    ("qwen3_asr", "Qwen3ASRForConditionalGeneration"): qwen3_asr,
    ("voxtral", "VoxtralForConditionalGeneration"): voxtral,
}
