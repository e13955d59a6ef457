"""Cases of dual encoders: images and texts of several sizes, and their similarity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from mcpc.core.runner import Array
from mcpc.inference.cache import declared
from mcpc.package.manifest import Component
from mcpc.verify.case import Case, CaseMaker, Sample
from mcpc.verify.inputs import encoder_inputs

_SIZES = ((1, 4, 4), (3, 1, 6), (4, 5, 9))


class DualEncoderCases(CaseMaker):
    """Makes cases of both towers and of the similarity."""

    def seeded(self) -> tuple[Sample, ...]:
        """Return requests of several sizes; where the tower takes a mask, every second text is shorter."""
        return tuple(self._request(number, *sizes) for number, sizes in enumerate(_SIZES))

    def all(self, samples: tuple[Sample, ...], seeded: bool = True) -> Iterator[Case]:
        """Yield the cases of seeded requests, then of real ones."""
        for sample in (*(self.seeded() if seeded else ()), *samples):
            yield from self._one_match(sample)

    def _request(self, number: int, images: int, texts: int, sequence: int) -> Sample:
        binding = self.manifest.binding
        if self._images().modality == "video":
            images = max(images, 2)  # scores are shares among the clips: of one clip they are all 1
        sequence = binding.pad_to if binding and binding.pad_to else sequence
        ids = self.ids(texts, sequence)
        mask = np.ones_like(ids)
        if any(tensor.name == "attention_mask" for tensor in self._texts().inputs):
            mask[1::2, sequence - 2 :] = 0
            ids[1::2, sequence - 2 :] = (binding.pad_token_id if binding else None) or 0
        if binding and binding.suffix_token_ids:
            ids[np.arange(texts), mask.sum(axis=1) - 1] = binding.suffix_token_ids[-1]
        feeds = {
            **encoder_inputs(
                self.random, self._images(), {"images": images, "videos": images, **self.dynamic_sizes(number)}
            ),
            "input_ids": ids,
        }
        label = f"seeded images={images} texts={texts} sequence={sequence}"
        return Sample(label, {**feeds, **declared(self._texts(), {"attention_mask": mask})})

    def _images(self) -> Component:
        return next(item for item in self.manifest.components if item.role == "encoder" and item.modality != "text")

    def _texts(self) -> Component:
        return self.manifest.by_role("encoder", "text")

    def _one_match(self, sample: Sample) -> Iterator[Case]:
        embeds: dict[str, Array] = {}
        for tower in (self._images(), self._texts()):
            feeds: Mapping[str, Array] = declared(tower, sample.feeds)
            outputs = dict(self.reference(tower.name).run(feeds))
            embeds |= outputs
            yield Case(tower.name, sample.label, feeds, expected=outputs)
        yield Case(self.manifest.by_role("head").name, sample.label, embeds)
