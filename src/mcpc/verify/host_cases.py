"""Cases of language models whose images become as many rows as they need, by a host function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mcpc.core.runner import Array
from mcpc.errors import InternalError
from mcpc.inference.cache import token_types
from mcpc.processing.hosts import AnyResolution, BatchedTiles, Host, ImagePatches, PaddedPatches, host_of
from mcpc.verify.case import Case, Sample
from mcpc.verify.vision_language_cases import VisionLanguageCases

#: Images of each prompt, and the padding of the first prompt.
_REQUESTS: tuple[tuple[tuple[int, ...], int], ...] = (((1,), 0), ((2, 0, 1), 2), ((0, 0, 0, 0), 0))
_SINGLE = ((1,), (2,), (1,))
_TEXT = 3


class HostCases(VisionLanguageCases):
    """Makes cases in which the images of one call become different numbers of rows."""

    def seeded(self) -> tuple[Sample, ...]:
        """Return whole requests: one image, two, another one."""
        return tuple(self._prompts(counts, 0) for counts in _SINGLE)

    def all(self, samples: tuple[Sample, ...], seeded: bool = True) -> Iterator[Case]:
        """Yield the cases of seeded requests, then of real ones."""
        requests = [self._prompts(counts, pad) for counts, pad in _REQUESTS] if seeded else []
        for sample in (*requests, *samples):
            yield from self._one_request(sample)

    @property
    def _host(self) -> Host:
        found = host_of(self.manifest.modalities["image"])
        if found is None:
            raise InternalError("the package has no host function", where="manifest.modalities.image")
        return found

    @property
    def _channels(self) -> int:
        first = self.manifest.component("vision_encoder").inputs[0]
        return int(first.shape[1])

    def _pixels_of(self, sample: Sample) -> dict[str, Array]:
        names = self.manifest.modalities["image"].inputs
        feeds = {name: sample.feeds[name] for name in names if name in sample.feeds}
        return self._host.inputs(feeds) if feeds else {}

    def _prompts(self, counts: Sequence[int], pad: int) -> Sample:
        """Return prompts of one length, each image between texts, the first prompt padded on the left."""
        images = self._images(sum(counts)) if sum(counts) else {}
        rows = self._host.rows(images) if images else []
        parts = [[rows.pop(0) for _ in range(count)] for count in counts]
        length = max(_TEXT + sum(part + _TEXT for part in prompt) for prompt in parts) + pad
        ids = self.ids(len(counts), length)
        for number, prompt in enumerate(parts):
            place = _TEXT + (pad if number == 0 else 0)
            for part in prompt:
                ids[number, place : place + part] = self._placeholder()
                place += part + _TEXT
        mask = np.ones_like(ids)
        mask[0, :pad] = 0
        feeds = {"input_ids": ids, "attention_mask": mask, **images}
        if self.manifest.binding and self.manifest.binding.token_types:
            feeds["token_type_ids"] = token_types(self.manifest, ids)
        return Sample(f"seeded batch={len(counts)} images={','.join(map(str, counts))}", feeds)

    def _images(self, count: int) -> dict[str, Array]:
        """Return what the processor makes of images of different sizes."""
        host = self._host
        if isinstance(host, AnyResolution):
            # Shapes between those of the resolutions: each has padding to be cut off.
            sizes = [
                (int(height * self.random.uniform(0.5, 1.5)) + 1, int(width * self.random.uniform(0.5, 1.5)) + 1)
                for height, width in self.random.permutation(np.array(host.resolutions))[:count]
            ]
            tiles = sum(1 + down * across for down, across in map(host.tiles, sizes))
            pixels = self.normal("vision_encoder", "pixel_values", tiles=tiles)
            return {"pixel_values": pixels, "image_sizes": np.array(sizes, np.int64)}
        if isinstance(host, ImagePatches):
            side = host.patch * host.merge
            sizes = [(side * int(a), side * int(b)) for a, b in self.random.integers(1, 6, (count, 2))]
            tall, wide = (max(size[axis] for size in sizes) for axis in (0, 1))
            pixels = self.random.standard_normal((count, self._channels, tall, wide)).astype(np.float32)
            return {"pixel_values": pixels, "image_sizes": np.array(sizes, np.int64)}
        if isinstance(host, BatchedTiles):
            pixels = self.normal("vision_encoder", "pixel_values", tiles=count + 1)[None]
            shown = np.arange(count + 1)[None] < count
            return {"pixel_values": pixels * shown[..., None, None, None], "pixel_attention_mask": shown}
        if isinstance(host, PaddedPatches):
            shapes = self.random.integers(1, 4, (count, 2)) * host.merge
            most = int(shapes.prod(axis=1).max()) + 1
            pixels = self.normal("vision_encoder", "pixel_values", images=count, patches=most)
            shown = (np.arange(most) < shapes.prod(axis=1, keepdims=True)).astype(np.int64)
            return {"pixel_values": pixels, "pixel_attention_mask": shown, "spatial_shapes": shapes}
        raise InternalError("no images can be drawn for a host function", where=type(host).__name__)
