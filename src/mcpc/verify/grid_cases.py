"""Cases of language models that read images of any size, as packed patches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mcpc.core.runner import Array, Feeds
from mcpc.inference.cache import grid_text_positions, three_axes
from mcpc.inference.grid import grid_positions
from mcpc.verify.case import Case, Sample
from mcpc.verify.vision_language_cases import VisionLanguageCases

#: Rows and columns of features of the images of each prompt, and the padding of the first prompt.
_REQUESTS: tuple[tuple[tuple[tuple[tuple[int, int], ...], ...], int], ...] = (
    ((((3, 5),),), 0),
    ((((2, 2), (4, 3)), ((1, 6),), ((5, 2),)), 2),
    (((), (), (), ()), 0),
)
_SINGLE: tuple[tuple[tuple[int, int], ...], ...] = (((3, 5),), ((2, 2), (4, 3)), ((1, 6),))
_TEXT = 3


class GridCases(VisionLanguageCases):
    """Makes cases in which images of one call differ in size."""

    def seeded(self) -> tuple[Sample, ...]:
        """Return whole requests: one image, two of different size, another one."""
        return tuple(self._prompts((images,), 0) for images in _SINGLE)

    def all(self, samples: tuple[Sample, ...], seeded: bool = True) -> Iterator[Case]:
        """Yield the cases of seeded requests, then of real ones."""
        requests = [self._prompts(prompts, pad) for prompts, pad in _REQUESTS] if seeded else []
        for sample in (*requests, *samples):
            yield from self._one_request(sample)

    @property
    def _merge(self) -> int:
        return self.manifest.modalities["image"].merge or 1

    def _prompts(self, prompts: Sequence[Sequence[tuple[int, int]]], pad: int) -> Sample:
        """Return prompts of one length, each image between texts, the first prompt padded on the left."""
        sizes = [size for images in prompts for size in images]
        length = max(_TEXT + sum(h * w + _TEXT for h, w in images) for images in prompts) + pad
        ids = self.ids(len(prompts), length)
        for number, images in enumerate(prompts):
            place = _TEXT + (pad if number == 0 else 0)
            for height, width in images:
                ids[number, place : place + height * width] = self._placeholder()
                place += height * width + _TEXT
        mask = np.ones_like(ids)
        mask[0, :pad] = 0
        feeds = {"input_ids": ids, "attention_mask": mask}
        if three_axes(self.manifest.by_role("decoder")):
            feeds["mm_token_type_ids"] = (ids == self._placeholder()).astype(np.int64)
        if sizes:
            feeds |= self._pixels(np.array([[1, h * self._merge, w * self._merge] for h, w in sizes], np.int64))
        shown = ", ".join(f"{height}x{width}" for height, width in sizes) or "none"
        return Sample(f"seeded batch={len(prompts)} images={shown}", feeds)

    def _pixels(self, grids: Array) -> dict[str, Array]:
        patches = int(grids.prod(axis=1).sum())
        pixels = self.normal("vision_encoder", "pixel_values", patches=patches)
        return {"pixel_values": pixels, "image_grid_thw": grids}

    def _one_request(self, sample: Sample) -> Iterator[Case]:
        label, ids, mask = sample.label, sample.feeds["input_ids"], sample.feeds["attention_mask"]
        inputs = {tensor.name for tensor in self.manifest.component("vision_encoder").inputs}
        pixels = {name: array for name, array in sample.feeds.items() if name in inputs}
        if pixels:
            features = dict(self.reference("vision_encoder").run(pixels))
            yield Case("vision_encoder", label, pixels, expected=dict(features))
        else:
            specs = [tensor.spec() for tensor in self.manifest.component("embed").inputs if tensor.name != "input_ids"]
            features = {spec.name: np.zeros(spec.concrete({"feature_rows": 0}), np.float32) for spec in specs}
        embed = {"input_ids": ids, **features}
        first = dict(self.reference("embed").run(embed))
        if pixels or len(features) == 1:  # without images, further rows are nothing but zeros
            yield Case("embed", label, embed, expected=dict(first))
        follow_ids = self.ids(len(ids), 1 if len(ids) < 4 else 3)
        nothing: Feeds = {name: rows[:0] for name, rows in features.items()}
        then = dict(self.reference("embed").run({"input_ids": follow_ids, **nothing}))
        if three_axes(self.manifest.by_role("decoder")):
            grids = sample.feeds.get("image_grid_thw", np.zeros((0, 3), np.int64))
            first["position_ids"], shift = grid_positions(ids, mask, grids, self._placeholder(), self._merge)
            steps = follow_ids.shape[1]
            longer = np.concatenate([mask, np.ones((len(ids), steps), np.int64)], axis=1)
            then["position_ids"] = grid_text_positions(longer, steps, shift)
        yield from self.decoder_cases(label, first, then, mask, {})
