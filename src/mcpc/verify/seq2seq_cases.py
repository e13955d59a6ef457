"""Cases of encoder-decoder models: an encoder that reads sound or images, a decoder that writes text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mcpc.core.runner import Array
from mcpc.inference.cache import declared
from mcpc.package.manifest import Component
from mcpc.verify.case import Case, CaseMaker, Sample
from mcpc.verify.inputs import encoder_inputs

#: Batch, and tokens of the prompt.
_SIZES = ((1, 4), (3, 6), (4, 1))


class Seq2SeqCases(CaseMaker):
    """Makes cases of the encoder and of the decoder."""

    def seeded(self, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
        """Return requests of several sizes, made from a real one where there is one."""
        real = samples[0].feeds if samples else {}
        found = []
        for number, (batch, _) in enumerate(_SIZES):
            sizes = {"batch": batch, **self.dynamic_sizes(number)}
            feeds = encoder_inputs(self.random, self._encoder(), sizes)
            if "input_features" in real and not self.dynamic_sizes(number):
                feeds["input_features"] = self._voices(batch, real["input_features"])
            label = " ".join(f"{name}={size}" for name, size in sizes.items())
            found.append(Sample(f"seeded {label}", feeds))
        return tuple(found)

    def all(self, samples: tuple[Sample, ...], seeded: bool = True) -> Iterator[Case]:
        """Yield the cases of seeded requests, then of real ones."""
        for (_, length), sample in zip(_SIZES, self.seeded(samples), strict=True) if seeded else ():
            yield from self._one_input(sample, length)
        for sample in samples:
            yield from self._one_input(sample, 4)

    def _encoder(self) -> Component:
        return self.manifest.by_role("encoder")

    def _voices(self, batch: int, clip: Array) -> Array:
        """Return features [batch, mel, frames]: a real clip at seeded moments.

        White noise in place of features is no test: a log-mel never looks like it, and on it PyTorch's own float32
        is a hundred times further from float64 than on speech.
        """
        shifts = self.random.integers(0, clip.shape[-1], batch)
        return np.stack([np.roll(clip[0], int(shift), axis=-1) for shift in shifts])

    def _one_input(self, sample: Sample, length: int) -> Iterator[Case]:
        encoder = self._encoder()
        feeds = declared(encoder, sample.feeds)
        batch = len(next(iter(feeds.values())))
        encoded = dict(self.reference(encoder.name).run(feeds))
        yield Case(encoder.name, sample.label, feeds, encoded.get("encoder_attention_mask"), dict(encoded))
        first, then = {"input_ids": self.ids(batch, length)}, {"input_ids": self.ids(batch, 1 if batch < 3 else 2)}
        yield from self.decoder_cases(sample.label, first, then, np.ones((batch, length), np.int64), encoded)
