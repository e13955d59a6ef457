"""Tiny models with an image tower and a text tower."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import transformers as hf

from tiny.build import END, PAD, START, VOCABULARY, Tiny
from tiny.processors import clip_images

TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 40, "pad_token_id": PAD, "bos_token_id": START,
    "eos_token_id": END,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 7,
}  # fmt: skip


def clip() -> Tiny:
    """CLIP."""
    config = hf.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=24)
    return Tiny(config, files=clip_images(28))


CHECKPOINTS: Mapping[tuple[str, str], Callable[[], Tiny]] = {
    ("clip", "CLIPModel"): clip,
}
