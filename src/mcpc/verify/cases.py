"""Inputs for every component, at sizes that differ from the traced ones, made by running the reference."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mcpc.core.runner import Array, RunnerFactory
from mcpc.errors import BadInputError
from mcpc.package import Manifest
from mcpc.verify.case import Case, CaseMaker, Sample
from mcpc.verify.dual_encoder_cases import DualEncoderCases
from mcpc.verify.seq2seq_cases import Seq2SeqCases

__all__ = ["Case", "Cases", "Sample", "seeded_samples"]


def seeded_samples(manifest: Manifest, reference: RunnerFactory) -> tuple[Sample, ...]:
    """Return whole requests drawn from a seed, for a package whose preprocessing mcpc cannot do."""
    if manifest.kind == "dual-encoder":
        return DualEncoderCases(manifest, reference).seeded()
    if manifest.kind in ("speech-seq2seq", "image-seq2seq"):
        return Seq2SeqCases(manifest, reference).seeded(())
    return ()


class Cases(CaseMaker):
    """Makes the cases of a model kind."""

    def all(self, samples: tuple[Sample, ...], seeded: bool = True) -> Iterator[Case]:
        """Yield seeded cases at three sizes, then the cases of real samples."""
        if self.manifest.kind == "vision-language":
            yield from self._vision_language(samples, seeded)
        elif self.manifest.kind == "dual-encoder":
            yield from DualEncoderCases(self.manifest, self.reference).all(samples, seeded)
        elif self.manifest.kind in ("speech-seq2seq", "image-seq2seq"):
            yield from Seq2SeqCases(self.manifest, self.reference).all(samples, seeded)

    def _vision_language(self, samples: tuple[Sample, ...], seeded: bool) -> Iterator[Case]:
        rows = self.manifest.modalities["image"].rows_per_item or 1
        for batch, extra, images, pad in ((1, 5, 1, 0), (3, 9, 3, 2), (4, 6, 0, 0)) if seeded else ():
            pixels = self.normal("vision_encoder", "pixel_values", images=images) if images else None
            ids = self.ids(batch, extra + (rows if images else 0))
            if images:
                ids[:, pad + 1 : pad + 1 + rows] = self._placeholder()
            mask = np.ones_like(ids)
            mask[0, :pad] = 0
            yield from self._one_request(f"seeded batch={batch} images={images}", ids, mask, pixels)
        for sample in samples:
            feeds = sample.feeds
            yield from self._one_request(
                sample.label, feeds["input_ids"], feeds["attention_mask"], feeds.get("pixel_values")
            )

    def _placeholder(self) -> int:
        if self.manifest.binding is None:
            raise BadInputError("the package does not say where images go in the text", where="manifest.binding")
        return self.manifest.binding.placeholders["image"].token_id

    def _one_request(self, label: str, ids: Array, mask: Array, pixels: Array | None) -> Iterator[Case]:
        hidden = next(t for t in self.manifest.component("embed").inputs if t.name == "image_features").shape[-1]
        features = np.zeros((0, int(hidden)), np.float32)
        if pixels is not None:
            yield Case("vision_encoder", label, {"pixel_values": pixels})
            features = self.reference("vision_encoder").run({"pixel_values": pixels})["image_features"]
        embed = {"input_ids": ids, "image_features": features}
        yield Case("embed", label, embed)
        prefill = self.reference("embed").run(embed)["inputs_embeds"]
        follow_ids = self.ids(len(ids), 1 if len(ids) < 4 else 3)
        follow = self.reference("embed").run({"input_ids": follow_ids, "image_features": features[:0]})["inputs_embeds"]
        yield from self.decoder_cases(label, {"inputs_embeds": prefill}, {"inputs_embeds": follow}, mask, {})
