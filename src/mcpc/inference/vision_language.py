"""Vision-language models: image features enter the token stream through `embed`, a cached decoder answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mcpc.core.runner import Array, RunnerFactory
from mcpc.errors import BadInputError
from mcpc.inference.cache import CachedDecoder, require_cache, token_types
from mcpc.inference.greedy import Step, greedy, require_generation
from mcpc.inference.ids import check_ids
from mcpc.package.manifest import Manifest


class VisionLanguage:
    """Runs `vision_encoder`, `embed` and `decoder`.

    Args:
        manifest: Of the package.
        open_runner: Opens a component; each is opened when it is first needed.
    """

    def __init__(self, manifest: Manifest, open_runner: RunnerFactory) -> None:
        self._open = open_runner
        self._manifest = manifest
        self._cache = require_cache(manifest)
        self._generation = require_generation(manifest)
        self._encoder = manifest.by_role("encoder", "image").name
        self._embed = manifest.by_role("embedding").name
        self._decoder = manifest.by_role("decoder")
        self._hidden = _last_size(manifest, self._embed, "image_features")
        self._placeholder = manifest.binding.placeholders["image"].token_id if manifest.binding else None

    def image_features(self, pixel_values: Array) -> Array:
        """Return `image_features` [feature_rows, H] of `pixel_values` [images, 3, Y, X]."""
        return self._open(self._encoder).run({"pixel_values": pixel_values})["image_features"]

    def embed(self, input_ids: Array, image_features: Array | None = None) -> Array:
        """Return `inputs_embeds` [batch, sequence, H]; the rows of the features go to the placeholders in order.

        Raises:
            BadInputError: There are not as many placeholders as feature rows.
        """
        features = np.zeros((0, self._hidden), np.float32) if image_features is None else image_features
        found = int((input_ids == self._placeholder).sum())
        if found != len(features):
            raise BadInputError(
                "the placeholders do not match the image features", expected=f"{len(features)} rows", got=f"{found}"
            )
        return self._embedded(input_ids, features)

    def _embedded(self, input_ids: Array, features: Array) -> Array:
        check_ids(self._manifest, input_ids)
        return self._open(self._embed).run({"input_ids": input_ids, "image_features": features})["inputs_embeds"]

    def prefill(
        self, input_ids: Array, pixel_values: Array | None, attention_mask: Array | None = None
    ) -> tuple[CachedDecoder, Array]:
        """Feed whole prompts [batch, sequence] and return the decoder with its cache, and the logits of every token.

        Args:
            input_ids: int64, each image placeholder repeated once per feature row.
            pixel_values: The images of all prompts in order, or None.
            attention_mask: [batch, sequence], 0 on left padding; None means no padding.
        """
        features = None if pixel_values is None else self.image_features(pixel_values)
        decoder = CachedDecoder(
            self._decoder, self._open(self._decoder.name), self._cache, len(input_ids), self._manifest
        )
        types = token_types(self._manifest, input_ids)
        return decoder, decoder.step("inputs_embeds", self.embed(input_ids, features), attention_mask, types)

    def advance(self, decoder: CachedDecoder, tokens: Sequence[int]) -> Array:
        """Feed one token to each prompt and return the next logits [batch, V].

        A placeholder that the model itself generated is a word like any other: there is no feature row for it.
        """
        ids = np.array(tokens, np.int64)[:, None]
        return decoder.step("inputs_embeds", self._embedded(ids, np.zeros((0, self._hidden), np.float32)))[:, -1]

    def greedy(
        self, input_ids: Sequence[int], pixel_values: Array | None, *, max_new_tokens: int, stop_at_eos: bool = True
    ) -> Iterator[Step]:
        """Yield the steps of the greedy answer to one prompt.

        Args:
            input_ids: The prompt; each image placeholder repeated once per feature row.
            pixel_values: [images, 3, Y, X], or None.
            max_new_tokens: Largest number of steps.
            stop_at_eos: False goes on after the end-of-sequence token.
        """
        decoder, logits = self.prefill(np.array([input_ids], np.int64), pixel_values)
        yield from greedy(
            logits[0, -1],
            lambda token: self.advance(decoder, [token])[0],
            self._generation,
            max_new_tokens=max_new_tokens,
            stop_at_eos=stop_at_eos,
        )


def _last_size(manifest: Manifest, component: str, name: str) -> int:
    """Return the last dimension of a component's input."""
    for tensor in manifest.component(component).inputs:
        if tensor.name == name and isinstance(tensor.shape[-1], int):
            return tensor.shape[-1]
    raise BadInputError(
        "the component does not declare this input", where=f"manifest.components.{component}", expected=name
    )
