"""Tiny models whose language model routes each token to a few of several experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import transformers as hf

from tiny.build import Tiny
from tiny.processors import images_of
from tiny.vision_language import GENERATION, IMAGE, PLACEHOLDER, TEXT, VISION


def aria() -> Tiny:
    """Aria: Idefics 3's tower, a cross-attention projector, seven experts and two shared ones."""
    text = hf.AriaTextConfig(**TEXT, moe_num_experts=7, moe_topk=3, moe_num_shared_experts=2)
    config = hf.AriaConfig(
        vision_config=hf.Idefics3VisionConfig(**VISION), text_config=text, image_token_index=IMAGE,
        projector_patch_to_query_dict={16: 5}, vision_feature_layer=-2,
    )  # fmt: skip
    return Tiny(config, PLACEHOLDER, images_of("AriaImageProcessor", 28), GENERATION)


CHECKPOINTS: Mapping[tuple[str, str], Callable[[], Tiny]] = {
    ("aria", "AriaForConditionalGeneration"): aria,
}
