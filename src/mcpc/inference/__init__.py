"""Chains of components, over any runner: vision-language, dual encoder, encoder-decoder."""

from mcpc.inference.dual_encoder import DualEncoder
from mcpc.inference.greedy import Step
from mcpc.inference.seq2seq import Seq2Seq
from mcpc.inference.vision_language import VisionLanguage

__all__ = ["DualEncoder", "Seq2Seq", "Step", "VisionLanguage"]
