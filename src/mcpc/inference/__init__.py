"""Chains of components, over any runner: vision-language, audio-language, dual encoder, encoder-decoder."""

from mcpc.inference.audio_language import AudioLanguage
from mcpc.inference.dual_encoder import DualEncoder
from mcpc.inference.greedy import Step
from mcpc.inference.seq2seq import Seq2Seq
from mcpc.inference.vision_language import VisionLanguage

__all__ = ["AudioLanguage", "DualEncoder", "Seq2Seq", "Step", "VisionLanguage"]
