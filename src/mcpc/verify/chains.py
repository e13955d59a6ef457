"""A package as a whole model, over any runner."""

from __future__ import annotations

import numpy as np

from mcpc.core.runner import Array, Feeds, RunnerFactory
from mcpc.inference import AudioLanguage, DualEncoder, Seq2Seq, VisionLanguage
from mcpc.inference.greedy import require_generation
from mcpc.package import Manifest
from mcpc.verify.cases import Sample
from mcpc.verify.crossmodal import pairwise_cosines


class PackageChain:
    """Answers samples with a package's own chain of components."""

    def __init__(self, manifest: Manifest, runners: RunnerFactory) -> None:
        self._manifest = manifest
        self._runners = runners

    def logits(self, sample: Sample) -> Array:
        """Return logits [batch, sequence, V] of the prompt, or [images, texts] of a dual encoder."""
        feeds = sample.feeds
        if self._manifest.kind == "dual-encoder":
            model = DualEncoder(self._manifest, self._runners)
            return model.scores(model.encode_images(feeds), model.encode_texts(feeds))
        if self._manifest.kind == "vision-language":
            return VisionLanguage(self._manifest, self._runners).prefill(feeds["input_ids"], self._images(sample))[1]
        if self._manifest.kind == "audio-language":
            return AudioLanguage(self._manifest, self._runners).prefill(feeds["input_ids"], feeds)[1]
        seq2seq = Seq2Seq(self._manifest, self._runners)
        return seq2seq.prefill(seq2seq.encode(feeds), self._start())[1]

    def cosines(self, sample: Sample) -> Array:
        """Return image-text cosine similarities [images, texts]."""
        model = DualEncoder(self._manifest, self._runners)
        return pairwise_cosines(model.encode_images(sample.feeds), model.encode_texts(sample.feeds))

    def greedy(self, sample: Sample, new_tokens: int) -> list[int]:
        """Return exactly `new_tokens` greedy tokens, past the end of text too."""
        feeds = sample.feeds
        if self._manifest.kind == "vision-language":
            model = VisionLanguage(self._manifest, self._runners)
            ids = [int(token) for token in np.asarray(feeds["input_ids"])[0]]
            steps = model.greedy(ids, self._images(sample), max_new_tokens=new_tokens, stop_at_eos=False)
        elif self._manifest.kind == "audio-language":
            ids = [int(token) for token in np.asarray(feeds["input_ids"])[0]]
            sound = AudioLanguage(self._manifest, self._runners)
            steps = sound.greedy(ids, feeds, max_new_tokens=new_tokens, stop_at_eos=False)
        else:
            seq2seq = Seq2Seq(self._manifest, self._runners)
            first = {name: value[:1] for name, value in feeds.items()}
            steps = seq2seq.greedy(first, max_new_tokens=new_tokens, stop_at_eos=False)
        return [step.token for step in steps]

    def _images(self, sample: Sample) -> Feeds | None:
        """Return what a sample has of images, None for a request without."""
        names = self._manifest.modalities["image"].inputs
        return {name: sample.feeds[name] for name in names if name in sample.feeds} or None

    def _start(self) -> tuple[int, ...]:
        return require_generation(self._manifest).decoder_start_ids
