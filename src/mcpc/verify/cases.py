"""Inputs for every component, at sizes that differ from the traced ones, made by running the reference."""

from __future__ import annotations

from collections.abc import Iterator

from mcpc.core.runner import RunnerFactory
from mcpc.package import Manifest
from mcpc.verify.audio_language_cases import AudioLanguageCases
from mcpc.verify.case import Case, CaseMaker, Sample
from mcpc.verify.dual_encoder_cases import DualEncoderCases
from mcpc.verify.grid_cases import GridCases
from mcpc.verify.host_cases import HostCases
from mcpc.verify.seq2seq_cases import Seq2SeqCases
from mcpc.verify.vision_language_cases import VisionLanguageCases

__all__ = ["Case", "Cases", "Sample", "seeded_samples"]


def seeded_samples(manifest: Manifest, reference: RunnerFactory) -> tuple[Sample, ...]:
    """Return whole requests drawn from a seed, for a package whose preprocessing mcpc cannot do."""
    if manifest.kind == "dual-encoder":
        return DualEncoderCases(manifest, reference).seeded()
    if manifest.kind in ("speech-seq2seq", "image-seq2seq"):
        return Seq2SeqCases(manifest, reference).seeded(())
    if manifest.kind == "audio-language":
        return AudioLanguageCases(manifest, reference).seeded()
    return _vision_language(manifest)(manifest, reference).seeded()


def _vision_language(manifest: Manifest) -> type[VisionLanguageCases]:
    if manifest.modalities["image"].host is not None:
        return HostCases
    return VisionLanguageCases if manifest.modalities["image"].merge is None else GridCases


class Cases(CaseMaker):
    """Makes the cases of a model kind."""

    def all(self, samples: tuple[Sample, ...], seeded: bool = True) -> Iterator[Case]:
        """Yield seeded cases at three sizes, then the cases of real samples."""
        if self.manifest.kind == "vision-language":
            yield from _vision_language(self.manifest)(self.manifest, self.reference, self.small).all(samples, seeded)
        elif self.manifest.kind == "audio-language":
            yield from AudioLanguageCases(self.manifest, self.reference, self.small).all(samples, seeded)
        elif self.manifest.kind == "dual-encoder":
            yield from DualEncoderCases(self.manifest, self.reference, self.small).all(samples, seeded)
        elif self.manifest.kind in ("speech-seq2seq", "image-seq2seq"):
            yield from Seq2SeqCases(self.manifest, self.reference, self.small).all(samples, seeded)
