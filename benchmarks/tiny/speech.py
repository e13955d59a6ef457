"""Tiny models with a speech encoder and a text decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transformers as hf

from tiny.build import END, PAD, START, VOCABULARY, Tiny
from tiny.processors import audio_of, whisper_audio

BEGIN = 3
GENERATION = {"eos_token_id": END, "pad_token_id": PAD, "bos_token_id": START, "decoder_start_token_id": BEGIN}
IDS: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END,
    "decoder_start_token_id": BEGIN,
}  # fmt: skip
BART: Mapping[str, Any] = {
    "d_model": 48, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 88, "decoder_ffn_dim": 72, "max_target_positions": 64,
}  # fmt: skip
CONFORMER: Mapping[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 56,
    "conv_kernel_size": 5, "subsampling_conv_channels": 12, "num_mel_bins": 16, "max_position_embeddings": 200,
}  # fmt: skip
DECODER: Mapping[str, Any] = {
    "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": VOCABULARY,
}  # fmt: skip


def _speech(config: hf.PretrainedConfig, extractor: str) -> Tiny:
    return Tiny(config, {"<|start|>": BEGIN}, audio_of(extractor), GENERATION)


def whisper() -> Tiny:
    """Whisper, English only: one second of sound is 100 frames."""
    config = hf.WhisperConfig(
        **IDS, **BART, num_mel_bins=16, max_source_positions=100, begin_suppress_tokens=None, suppress_tokens=None
    )
    generation = {**GENERATION, "no_timestamps_token_id": 5}
    return Tiny(config, {"<|start|>": BEGIN}, whisper_audio(16, 2), generation)


def moonshine() -> Tiny:
    """Moonshine; transformers reads its queries by the number of key heads, so there are no groups."""
    config = hf.MoonshineConfig(
        **IDS, hidden_size=48, intermediate_size=88, encoder_num_hidden_layers=2, decoder_num_hidden_layers=3,
        encoder_num_attention_heads=6, decoder_num_attention_heads=6, encoder_num_key_value_heads=6,
        decoder_num_key_value_heads=6, max_position_embeddings=64,
    )  # fmt: skip
    return _speech(config, "Wav2Vec2FeatureExtractor")


def moonshine_streaming() -> Tiny:
    """Moonshine for streaming: encoder layers of two window sizes."""
    encoder = {
        "hidden_size": 40, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 5,
        "num_key_value_heads": 5, "head_dim": 8, "sliding_windows": [[4, 2], [4, 2], [4, 0]],
    }  # fmt: skip
    config = hf.MoonshineStreamingConfig(
        **IDS, encoder_config=encoder, hidden_size=48, intermediate_size=72, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, head_dim=12, max_position_embeddings=64,
    )  # fmt: skip
    return _speech(config, "MoonshineStreamingFeatureExtractor")


def speech_to_text() -> Tiny:
    """Speech2Text."""
    config = hf.Speech2TextConfig(**IDS, **BART, input_feat_per_channel=16, conv_channels=24, max_source_positions=200)
    return _speech(config, "Speech2TextFeatureExtractor")


def speecht5() -> Tiny:
    """SpeechT5: seven convolutions become three."""
    layers = {name: value for name, value in BART.items() if name not in ("d_model", "max_target_positions")}
    config = hf.SpeechT5Config(
        **IDS, **layers, hidden_size=48, conv_dim=[16, 20, 24], conv_stride=[10, 4, 4], conv_kernel=[20, 8, 8],
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, max_text_positions=64,
        encoder_max_relative_position=20,
    )  # fmt: skip
    return _speech(config, "SpeechT5FeatureExtractor")


def _seamless(config_class: type[Any]) -> Callable[[], Tiny]:
    def make() -> Tiny:
        config = config_class(
            **IDS, hidden_size=48, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
            decoder_attention_heads=3, encoder_ffn_dim=88, decoder_ffn_dim=72, max_position_embeddings=64,
            speech_encoder_layers=2, speech_encoder_attention_heads=4, speech_encoder_intermediate_size=56,
            feature_projection_input_dim=16, num_adapter_layers=2, adaptor_kernel_size=4, adaptor_stride=2,
            conv_depthwise_kernel_size=5, max_source_positions=64, t2u_vocab_size=16, t2u_encoder_layers=1,
            t2u_decoder_layers=1, t2u_encoder_attention_heads=2, t2u_decoder_attention_heads=2,
            t2u_encoder_ffn_dim=8, t2u_decoder_ffn_dim=8,
        )  # fmt: skip
        return _speech(config, "SeamlessM4TFeatureExtractor")

    return make


def canary() -> Tiny:
    """Canary: FastConformer and a text decoder."""
    ids = {name: value for name, value in IDS.items() if name not in ("vocab_size", "decoder_start_token_id")}
    config = hf.CanaryConfig(**IDS, encoder_config={**CONFORMER, "hidden_size": 48}, decoder_config={**DECODER, **ids})
    return _speech(config, "ParakeetFeatureExtractor")


def cohere_asr() -> Tiny:
    """Cohere ASR: FastConformer, a projection to another width."""
    decoder = {name: value for name, value in DECODER.items() if name != "vocab_size"}
    config = hf.CohereAsrConfig(**IDS, **decoder, encoder_config=CONFORMER)
    return _speech(config, "CohereAsrFeatureExtractor")


CHECKPOINTS: Mapping[tuple[str, str], Callable[[], Tiny]] = {
    ("canary", "CanaryForConditionalGeneration"): canary,
    ("cohere_asr", "CohereAsrForConditionalGeneration"): cohere_asr,
    ("moonshine", "MoonshineForConditionalGeneration"): moonshine,
    ("moonshine_streaming", "MoonshineStreamingForConditionalGeneration"): moonshine_streaming,
    ("seamless_m4t", "SeamlessM4TForSpeechToText"): _seamless(hf.SeamlessM4TConfig),
    ("seamless_m4t_v2", "SeamlessM4Tv2ForSpeechToText"): _seamless(hf.SeamlessM4Tv2Config),
    ("speech_to_text", "Speech2TextForConditionalGeneration"): speech_to_text,
    ("speecht5", "SpeechT5ForSpeechToText"): speecht5,
    ("whisper", "WhisperForConditionalGeneration"): whisper,
}
