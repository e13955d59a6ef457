"""Chains of components, over any runner: vision-language, dual encoder, speech."""

from mcpc.inference.dual_encoder import DualEncoder
from mcpc.inference.greedy import Step
from mcpc.inference.speech import SpeechSeq2Seq
from mcpc.inference.vision_language import VisionLanguage

__all__ = ["DualEncoder", "SpeechSeq2Seq", "Step", "VisionLanguage"]
