"""Cases of language models that read image rows between their tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mcpc.core.runner import Array
from mcpc.errors import BadInputError
from mcpc.inference.cache import declared, token_types
from mcpc.verify.case import Case, CaseMaker, Sample
from mcpc.verify.inputs import encoder_inputs

#: Prompts, tokens of each beside the image's, images, and padding of the first prompt.
_SIZES = ((1, 5, 1, 0), (3, 9, 3, 2), (4, 6, 0, 0))
_SMALL_SIZES = ((1, 5, 1, 0), (3, 6, 0, 2))


class VisionLanguageCases(CaseMaker):
    """Makes cases of the vision encoder, of the embedding and of the decoder."""

    def seeded(self) -> tuple[Sample, ...]:
        """Return whole requests with one image each, for a package that cannot read image files."""
        return tuple(self._request(1, extra, 1, 0, number) for number, extra in enumerate((4, 7)))

    def all(self, samples: tuple[Sample, ...], seeded: bool = True) -> Iterator[Case]:
        """Yield the cases of seeded requests, then of real ones."""
        sizes = _SMALL_SIZES if self.small else _SIZES
        requests = [self._request(*size, number) for number, size in enumerate(sizes)] if seeded else []
        for sample in (*requests, *samples):
            yield from self._one_request(sample)

    def _request(self, batch: int, extra: int, images: int, pad: int, number: int) -> Sample:
        sizes = {"images": images, **self.dynamic_sizes(number)}
        pixels = encoder_inputs(self.random, self.manifest.component("vision_encoder"), sizes) if images else {}
        rows = self._rows(pixels) if images else 0
        ids = self.ids(batch, extra + rows)
        if images:
            ids[:, pad + 1 : pad + 1 + rows] = self._placeholder()
        mask = np.ones_like(ids)
        mask[0, :pad] = 0
        feeds = {"input_ids": ids, "attention_mask": mask, **pixels}
        if self.manifest.binding and self.manifest.binding.token_types:
            feeds["token_type_ids"] = token_types(self.manifest, ids)
        return Sample(f"seeded batch={batch} images={images}", feeds)

    def _rows(self, pixels: dict[str, Array]) -> int:
        """Return the feature rows of one image: a fixed number, or what the reference makes of this one."""
        fixed = self.manifest.modalities["image"].rows_per_item
        if fixed is not None:
            return fixed
        features = self.reference("vision_encoder").run(pixels)["image_features"]
        return len(features) // len(pixels["pixel_values"])

    def _placeholder(self) -> int:
        if self.manifest.binding is None:
            raise BadInputError("the package does not say where images go in the text", where="manifest.binding")
        return self.manifest.binding.placeholders["image"].token_id

    def _pixels_of(self, sample: Sample) -> dict[str, Array]:
        """Return the inputs of the vision encoder, {} for a request without images."""
        return declared(self.manifest.component("vision_encoder"), sample.feeds)

    def _one_request(self, sample: Sample) -> Iterator[Case]:
        label, ids, mask = sample.label, sample.feeds["input_ids"], sample.feeds["attention_mask"]
        specs = [tensor.spec() for tensor in self.manifest.component("embed").inputs if tensor.name != "input_ids"]
        features = {spec.name: np.zeros(spec.concrete({"feature_rows": 0}), np.float32) for spec in specs}
        pixels = self._pixels_of(sample)
        if pixels:
            outputs = dict(self.reference("vision_encoder").run(pixels))
            features = {name: outputs[name] for name in features}
            yield Case("vision_encoder", label, pixels, expected=outputs)
        embed = {"input_ids": ids, **features}
        first = dict(self.reference("embed").run(embed))
        if pixels or len(features) == 1:  # without images, further rows are nothing but zeros
            yield Case("embed", label, embed, expected=dict(first))
        follow_ids = self.ids(len(ids), 1 if len(ids) < 4 else 3)
        nothing = {name: rows[:0] for name, rows in features.items()}
        then = self.reference("embed").run({"input_ids": follow_ids, **nothing})
        yield from self.decoder_cases(label, first, then, mask, {}, token_types(self.manifest, ids))
