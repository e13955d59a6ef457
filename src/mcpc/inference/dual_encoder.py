"""Dual encoders: an image or video tower and a text tower that meet in one space."""

from __future__ import annotations

from mcpc.core.runner import Array, Feeds, RunnerFactory
from mcpc.inference.cache import declared
from mcpc.inference.ids import check_ids
from mcpc.package.manifest import Manifest


class DualEncoder:
    """Runs `vision_encoder`, `text_encoder` and `similarity`.

    Args:
        manifest: Of the package.
        open_runner: Opens a component; each is opened when it is first needed.
    """

    def __init__(self, manifest: Manifest, open_runner: RunnerFactory) -> None:
        self._open = open_runner
        self._manifest = manifest
        self._images = next(c for c in manifest.components if c.role == "encoder" and c.modality != "text")
        self._texts = manifest.by_role("encoder", "text")
        self._similarity = manifest.by_role("head")

    def encode_images(self, feeds: Feeds) -> Array:
        """Return `image_embeds` [images, P] of the tower's inputs, such as `pixel_values` [images, 3, Y, X]."""
        outputs = self._open(self._images.name).run(declared(self._images, feeds))
        return outputs[self._images.outputs[0].name]

    def encode_texts(self, feeds: Feeds) -> Array:
        """Return `text_embeds` [texts, P] of `input_ids` and, where the tower has one, `attention_mask`."""
        if "input_ids" in feeds:
            check_ids(self._manifest, feeds["input_ids"])
        outputs = self._open(self._texts.name).run(declared(self._texts, feeds))
        return outputs[self._texts.outputs[0].name]

    def scores(self, image_embeds: Array, text_embeds: Array) -> Array:
        """Return logits [images, texts]: similarities as the family scales them."""
        feeds = {self._images.outputs[0].name: image_embeds, self._texts.outputs[0].name: text_embeds}
        return self._open(self._similarity.name).run(feeds)[self._similarity.outputs[0].name]
