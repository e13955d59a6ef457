"""Tiny models whose language model reads image or audio rows between its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import transformers as hf

from tiny.build import END, PAD, START, VOCABULARY, Tiny
from tiny.processors import clip_images

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


CHECKPOINTS: Mapping[tuple[str, str], Callable[[], Tiny]] = {
    ("llava", "LlavaForConditionalGeneration"): llava,
}
