"""Cases of language models that read rows of sound between their tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mcpc.core.runner import Array
from mcpc.inference.audio_language import FEATURES, MASK, kept_rows
from mcpc.inference.cache import declared
from mcpc.verify.case import Case, CaseMaker, Sample
from mcpc.verify.inputs import encoder_inputs

#: Prompts, tokens of each beside the sound's, whether each has a clip, and padding of the first prompt.
_SIZES = ((1, 5, True, 0), (3, 9, True, 2), (4, 6, False, 0))
_SMALL_SIZES = ((1, 5, True, 0), (3, 6, False, 2))


class AudioLanguageCases(CaseMaker):
    """Makes cases of the audio encoder, of the embedding and of the decoder."""

    def seeded(self) -> tuple[Sample, ...]:
        """Return whole requests with one clip each: one of full length, one shorter than its padded length."""
        return tuple(self._request(1, extra, True, 0, number) for number, extra in enumerate((4, 7)))

    def all(self, samples: tuple[Sample, ...], seeded: bool = True) -> Iterator[Case]:
        """Yield the cases of seeded requests, then of real ones."""
        sizes = _SMALL_SIZES if self.small else _SIZES
        requests = [self._request(*size, number) for number, size in enumerate(sizes)] if seeded else []
        for sample in (*requests, *samples):
            yield from self._one_request(sample)

    def _request(self, batch: int, extra: int, sound: bool, pad: int, number: int) -> Sample:
        encoder = self.manifest.by_role("encoder", "audio")
        clips = self._shortened(
            encoder_inputs(self.random, encoder, {"clips": batch, **self.dynamic_sizes(number)}) if sound else {},
            number,
        )
        rows = self._rows(clips, batch)
        ids = self.ids(batch, pad + extra + int(rows.max()))
        for prompt, count in zip(ids, rows, strict=True):
            prompt[pad + 1 : pad + 1 + count] = self._placeholder()
        mask = np.ones_like(ids)
        mask[0, :pad] = 0
        label = f"seeded batch={batch} rows={','.join(map(str, rows))}"
        return Sample(label, {"input_ids": ids, "attention_mask": mask, **clips})

    def _shortened(self, clips: dict[str, Array], number: int) -> dict[str, Array]:
        """Return the inputs with masks that show whole clips at first, then clips of different lengths."""
        for name in clips:
            if name.endswith("mask"):
                length = clips[name].shape[1]
                shown = length - number * self.random.integers(length // 4, length // 2 + 1, (len(clips[name]), 1))
                clips[name] = (np.arange(length) < shown).astype(clips[name].dtype)
        return clips

    def _rows(self, clips: dict[str, Array], batch: int) -> Array:
        """Return the feature rows of each clip, as the reference computes them."""
        if not clips:
            return np.zeros(batch, np.int64)
        outputs = self.reference(self.manifest.by_role("encoder", "audio").name).run(clips)
        kept = outputs[MASK] if MASK in outputs else np.ones(len(outputs[FEATURES]), np.int64)
        rows: Array = kept.reshape(batch, -1).astype(np.int64).sum(axis=1)
        return rows

    def _placeholder(self) -> int:
        return 0 if self.manifest.binding is None else self.manifest.binding.placeholders["audio"].token_id

    def _one_request(self, sample: Sample) -> Iterator[Case]:
        label, ids, mask = sample.label, sample.feeds["input_ids"], sample.feeds["attention_mask"]
        encoder, embedding = self.manifest.by_role("encoder", "audio"), self.manifest.by_role("embedding")
        size = next(tensor.shape[-1] for tensor in embedding.inputs if tensor.name == FEATURES)
        features = np.zeros((0, int(size)), np.float32)
        if clips := declared(encoder, sample.feeds):
            heard = dict(self.reference(encoder.name).run(clips))
            features = kept_rows(heard)
            yield Case(encoder.name, label, clips, expected=heard)
        embed = {"input_ids": ids, FEATURES: features}
        embedded = dict(self.reference(embedding.name).run(embed))
        prefill = embedded["inputs_embeds"]
        yield Case(embedding.name, label, embed, expected=embedded)
        following = {"input_ids": self.ids(len(ids), 1 if len(ids) < 4 else 3), FEATURES: features[:0]}
        follow = self.reference(embedding.name).run(following)["inputs_embeds"]
        yield from self.decoder_cases(label, {"inputs_embeds": prefill}, {"inputs_embeds": follow}, mask, {})
