"""What a verification case is, and what every maker of cases shares.

A decoder sees embeddings and caches that the reference really produced, not noise: noise would hide errors in
some layers and exaggerate them in others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from mcpc.core.runner import Array, Feeds, RunnerFactory
from mcpc.inference.cache import bytes_per_token, declared, empty_cache, generated_type, positions
from mcpc.package import Manifest
from mcpc.package.manifest import Component

_SEED = 20260101
#: Cache that the step after a long prompt reads, in small cases.
_PAST_BYTES = 128 << 20


@dataclass(frozen=True)
class Case:
    """One set of inputs of one component.

    Attributes:
        component: Its name.
        label: Sizes, and where the inputs come from.
        feeds: Graph inputs.
        valid: Attention mask [batch, total]; outputs at masked positions mean nothing and are not compared.
        expected: The reference's outputs, where making the cases took running it. Whoever judges them takes them out
            one by one: those of a long prompt fill memory.
    """

    component: str
    label: str
    feeds: Feeds
    valid: Array | None = None
    expected: dict[str, Array] = field(default_factory=dict)

    def masked(self, name: str, output: Array) -> Array:
        """Return the output with masked positions set to zero."""
        if self.valid is None or self.valid.all():
            return output
        if name.startswith(("present.", "cross.")):
            is_rows = name.endswith((".key", ".value")) and output.ndim == 4
            return output * self.valid[:, None, :, None] if is_rows else output
        if output.ndim == 3:
            return output * self.valid[:, -output.shape[1] :, None]
        return output


@dataclass(frozen=True)
class Sample:
    """One request: the model's own inputs, as preprocessing made them, or drawn from a seed."""

    label: str
    feeds: Mapping[str, Array]


class CaseMaker:
    """Makes the cases of one kind of package.

    Args:
        manifest: Of the package.
        reference: Runs the reference's components.
        small: Make requests whose outputs take little memory: of many tokens only one prompt, and a step after no
            more of them than `_PAST_BYTES` of cache hold.
    """

    def __init__(self, manifest: Manifest, reference: RunnerFactory, small: bool = False) -> None:
        self.manifest = manifest
        self.reference = reference
        self.small = small
        self.random = np.random.default_rng(_SEED)

    def normal(self, component: str, name: str, **sizes: int) -> Array:
        """Return seeded standard normal values for a graph input."""
        spec = next(tensor.spec() for tensor in self.manifest.component(component).inputs if tensor.name == name)
        return self.random.standard_normal(spec.concrete(sizes)).astype(np.float32)

    def ids(self, batch: int, sequence: int) -> Array:
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

    def dynamic_sizes(self, number: int) -> dict[str, int]:
        """Return the sizes that the package gives to dynamic dimensions of its encoders, other than the traced one."""
        found: dict[str, int] = {}
        for modality in self.manifest.modalities.values():
            found |= {
                name: (sizes[1:] or sizes)[number % max(len(sizes) - 1, 1)] for name, sizes in modality.sizes.items()
            }
        return found

    def decoder_cases(
        self, label: str, first: Feeds, then: Feeds, mask: Array, extra: Feeds, types: Array | None = None
    ) -> Iterator[Case]:
        """Yield prefill (past length 0) and one decode step on the reference's own cache.

        Args:
            label: What the inputs are.
            first: Tokens or embeddings of the prompt.
            then: Those of the next step.
            mask: [batch, length] of the prompt.
            extra: Feeds that stay the same, such as the cross-attention cache.
            types: [batch, length] of the prompt's tokens, for a decoder that reads them.
        """
        decoder = self.manifest.by_role("decoder")
        batch, length = mask.shape
        past = empty_cache(decoder, batch)
        start = self.manifest.binding.first_position if self.manifest.binding else 0
        prompt = np.zeros_like(mask) if types is None else types
        feeds = {"attention_mask": mask, "position_ids": positions(mask, start)[:, -length:], **past, **extra, **first}
        feeds = declared(decoder, {**feeds, "token_type_ids": prompt})
        present = dict(self.reference(decoder.name).run(feeds))
        past = {name: present[name.replace("past.", "present.", 1)] for name in past}
        prefill = Case(decoder.name, f"{label} prefill={length} past=0", feeds, mask, present)
        kept = _PAST_BYTES // max(1, batch * bytes_per_token(decoder.inputs))
        if self.small and kept < length:
            past, mask, prompt, length = _first(decoder, past, kept), mask[:, :kept], prompt[:, :kept], kept
        yield prefill
        steps = next(iter(then.values())).shape[1]
        longer = np.concatenate([mask, np.ones((batch, steps), np.int64)], axis=1)
        following = positions(longer, start)[:, -steps:]
        decode = {"attention_mask": longer, "position_ids": following, **past, **extra, **then}
        later = np.full((batch, steps), generated_type(self.manifest), np.int64)
        decode["token_type_ids"] = np.concatenate([prompt, later], axis=1)
        yield Case(decoder.name, f"{label} sequence={steps} past={length}", declared(decoder, decode), longer)


def _first(decoder: Component, past: Mapping[str, Array], length: int) -> dict[str, Array]:
    """Return copies of the first positions of a cache, so that the rest can go; states have no positions."""
    axes = {tensor.name: tensor.shape.index("past") for tensor in decoder.inputs if "past" in tensor.shape}
    return {name: array if name not in axes else array.take(range(length), axes[name]) for name, array in past.items()}
