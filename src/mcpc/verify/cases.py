"""Inputs for every component, at sizes that differ from the traced ones, made by running the reference.

A decoder sees embeddings and caches that the reference really produced, not noise: noise would hide errors in
some layers and exaggerate them in others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from mcpc.core.runner import Array, Feeds, RunnerFactory
from mcpc.errors import BadInputError
from mcpc.inference.cache import positions, require_cache
from mcpc.package import Manifest

_SEED = 20260101


@dataclass(frozen=True)
class Case:
    """One set of inputs of one component.

    Attributes:
        component: Its name.
        label: Sizes, and where the inputs come from.
        feeds: Graph inputs.
        valid: Attention mask [batch, total]; outputs at masked positions mean nothing and are not compared.
    """

    component: str
    label: str
    feeds: Feeds
    valid: Array | None = None

    def masked(self, name: str, output: Array) -> Array:
        """Return the output with masked positions set to zero."""
        if self.valid is None or self.valid.all():
            return output
        if name.startswith("present.") and output.ndim == 4:
            return output * self.valid[:, None, :, None]
        if output.ndim == 3:
            return output * self.valid[:, -output.shape[1] :, None]
        return output


@dataclass(frozen=True)
class Sample:
    """One real request: the model's own inputs, as preprocessing made them."""

    label: str
    feeds: Mapping[str, Array]


class Cases:
    """Makes the cases of a model kind."""

    def __init__(self, manifest: Manifest, reference: RunnerFactory) -> None:
        self.manifest = manifest
        self.reference = reference
        self.random = np.random.default_rng(_SEED)

    def all(self, samples: tuple[Sample, ...]) -> Iterator[Case]:
        """Yield seeded cases at three sizes, then the cases of real samples."""
        if self.manifest.kind == "vision-language":
            yield from self._vision_language(samples)
        elif self.manifest.kind == "dual-encoder":
            yield from self._dual_encoder(samples)
        elif self.manifest.kind == "speech-seq2seq":
            yield from self._speech(samples)

    def _normal(self, component: str, name: str, **sizes: int) -> Array:
        """Return seeded standard normal values for a graph input."""
        spec = next(tensor.spec() for tensor in self.manifest.component(component).inputs if tensor.name == name)
        return self.random.standard_normal(spec.concrete(sizes)).astype(np.float32)

    def _ids(self, batch: int, sequence: int) -> Array:
        """Return seeded token ids that are no placeholder."""
        vocabulary = self._vocabulary()
        ids = self.random.integers(0, vocabulary, (batch, sequence), dtype=np.int64)
        taken = (
            {item.token_id for item in self.manifest.binding.placeholders.values()} if self.manifest.binding else set()
        )
        for token in taken:
            ids[ids == token] = (token + 1) % vocabulary
        return ids

    def _vocabulary(self) -> int:
        for component in self.manifest.components:
            for tensor in component.outputs:
                if tensor.name == "logits" and isinstance(tensor.shape[-1], int):
                    return tensor.shape[-1]
        limit = self.manifest.modalities["text"].vocabulary
        return limit if limit is not None else 2

    # -- vision-language

    def _vision_language(self, samples: tuple[Sample, ...]) -> Iterator[Case]:
        rows = self.manifest.modalities["image"].rows_per_item or 1
        for batch, extra, images, pad in ((1, 5, 1, 0), (3, 9, 3, 2), (4, 6, 0, 0)):
            pixels = self._normal("vision_encoder", "pixel_values", images=images) if images else None
            ids = self._ids(batch, extra + (rows if images else 0))
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
        follow_ids = self._ids(len(ids), 1 if len(ids) < 4 else 3)
        follow = self.reference("embed").run({"input_ids": follow_ids, "image_features": features[:0]})["inputs_embeds"]
        yield from self._decoder_cases(label, {"inputs_embeds": prefill}, {"inputs_embeds": follow}, mask, {})

    def _decoder_cases(self, label: str, first: Feeds, then: Feeds, mask: Array, extra: Feeds) -> Iterator[Case]:
        """Yield prefill (past length 0) and one decode step on the reference's own cache."""
        cache = require_cache(self.manifest)
        batch, length = mask.shape
        empty = np.zeros((batch, cache.kv_heads, 0, cache.head_dim), np.float32)
        past = {f"past.{i}.{part}": empty for i in range(cache.layers) for part in ("key", "value")}
        feeds = {**first, "attention_mask": mask, "position_ids": positions(mask)[:, -length:], **past, **extra}
        yield Case("decoder", f"{label} prefill={length} past=0", feeds, mask)
        present = self.reference("decoder").run(feeds)
        past = {name: present[name.replace("past.", "present.", 1)] for name in past}
        steps = next(iter(then.values())).shape[1]
        longer = np.concatenate([mask, np.ones((batch, steps), np.int64)], axis=1)
        decode = {**then, "attention_mask": longer, "position_ids": positions(longer)[:, -steps:], **past, **extra}
        yield Case("decoder", f"{label} sequence={steps} past={length}", decode, longer)

    # -- dual encoder

    def _dual_encoder(self, samples: tuple[Sample, ...]) -> Iterator[Case]:
        end = self.manifest.binding.suffix_token_ids if self.manifest.binding else ()
        for images, texts, sequence in ((1, 4, 4), (3, 1, 6), (4, 5, 9)):
            pixels = self._normal("vision_encoder", "pixel_values", images=images)
            ids = self._ids(texts, sequence)
            if end:
                ids[:, -1] = end[-1]
            yield from self._one_match(
                f"seeded images={images} texts={texts} sequence={sequence}", pixels, ids, np.ones_like(ids)
            )
        for sample in samples:
            yield from self._one_match(
                sample.label, sample.feeds["pixel_values"], sample.feeds["input_ids"], sample.feeds["attention_mask"]
            )

    def _one_match(self, label: str, pixels: Array, ids: Array, mask: Array) -> Iterator[Case]:
        text = {"input_ids": ids, "attention_mask": mask}
        yield Case("vision_encoder", label, {"pixel_values": pixels})
        yield Case("text_encoder", label, text)
        image_embeds = self.reference("vision_encoder").run({"pixel_values": pixels})["image_embeds"]
        text_embeds = self.reference("text_encoder").run(text)["text_embeds"]
        yield Case("similarity", label, {"image_embeds": image_embeds, "text_embeds": text_embeds})

    # -- speech

    def _speech(self, samples: tuple[Sample, ...]) -> Iterator[Case]:
        for batch, length in ((1, 4), (3, 6), (4, 1)):
            yield from self._one_clip(
                f"seeded batch={batch}", self._voices(batch, samples[0].feeds["input_features"]), length
            )
        for sample in samples:
            yield from self._one_clip(sample.label, sample.feeds["input_features"], 4)

    def _voices(self, batch: int, clip: Array) -> Array:
        """Return features [batch, mel, frames]: a real clip at seeded moments.

        White noise in place of features is no test: a log-mel never looks like it, and on it PyTorch's own float32
        is a hundred times further from float64 than on speech.
        """
        shifts = self.random.integers(0, clip.shape[-1], batch)
        return np.stack([np.roll(clip[0], int(shift), axis=-1) for shift in shifts])

    def _one_clip(self, label: str, features: Array, length: int) -> Iterator[Case]:
        batch = features.shape[0]
        yield Case("encoder", label, {"input_features": features})
        encoded = self.reference("encoder").run({"input_features": features})
        cross = {name: value for name, value in encoded.items() if name.startswith("cross.")}
        first, then = {"input_ids": self._ids(batch, length)}, {"input_ids": self._ids(batch, 1 if batch < 3 else 2)}
        yield from self._decoder_cases(label, first, then, np.ones((batch, length), np.int64), cross)
