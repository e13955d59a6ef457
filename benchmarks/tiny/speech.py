"""Tiny models with a speech encoder and a text decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import transformers as hf

from tiny.build import END, PAD, START, VOCABULARY, Tiny
from tiny.processors import whisper_audio


def whisper() -> Tiny:
    """Whisper, English only: one second of sound is 100 frames."""
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY, d_model=48, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=3, encoder_ffn_dim=88, decoder_ffn_dim=72, num_mel_bins=16, max_source_positions=100,
        max_target_positions=64, pad_token_id=PAD, bos_token_id=START, eos_token_id=END, decoder_start_token_id=3,
        begin_suppress_tokens=None, suppress_tokens=None,
    )  # fmt: skip
    generation = {"eos_token_id": END, "pad_token_id": PAD, "decoder_start_token_id": 3, "no_timestamps_token_id": 5}
    return Tiny(config, {"<|start|>": 3}, whisper_audio(16, 2), generation)


CHECKPOINTS: Mapping[tuple[str, str], Callable[[], Tiny]] = {
    ("whisper", "WhisperForConditionalGeneration"): whisper,
}
