"""Dual encoders: an image tower and a text tower that meet in one space."""

from __future__ import annotations

from mcpc.core.runner import Array, RunnerFactory
from mcpc.package.manifest import Manifest


class DualEncoder:
    """Runs `vision_encoder`, `text_encoder` and `similarity`.

    Args:
        manifest: Of the package.
        open_runner: Opens a component; each is opened when it is first needed.
    """

    def __init__(self, manifest: Manifest, open_runner: RunnerFactory) -> None:
        self._open = open_runner
        self._images = manifest.by_role("encoder", "image").name
        self._texts = manifest.by_role("encoder", "text").name
        self._similarity = manifest.by_role("head").name

    def encode_images(self, pixel_values: Array) -> Array:
        """Return `image_embeds` [images, P] of `pixel_values` [images, 3, Y, X]."""
        return self._open(self._images).run({"pixel_values": pixel_values})["image_embeds"]

    def encode_texts(self, input_ids: Array, attention_mask: Array) -> Array:
        """Return `text_embeds` [texts, P] of ids and mask [texts, sequence]."""
        feeds = {"input_ids": input_ids, "attention_mask": attention_mask}
        return self._open(self._texts).run(feeds)["text_embeds"]

    def scores(self, image_embeds: Array, text_embeds: Array) -> Array:
        """Return `logits_per_image` [images, texts]: scaled cosine similarities."""
        feeds = {"image_embeds": image_embeds, "text_embeds": text_embeds}
        return self._open(self._similarity).run(feeds)["logits_per_image"]
