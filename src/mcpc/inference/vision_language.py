"""Vision-language models: image features enter the token stream through `embed`, a cached decoder answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mcpc.core.runner import Array, Feeds, RunnerFactory
from mcpc.errors import BadInputError
from mcpc.inference.cache import CachedDecoder, three_axes, token_types
from mcpc.inference.greedy import Step, greedy, require_generation
from mcpc.inference.grid import grid_positions
from mcpc.inference.ids import check_ids
from mcpc.package.manifest import Manifest
from mcpc.processing.hosts import host_of

#: `pixel_values`, or every input of the image encoder by name.
Images = Array | Feeds


class VisionLanguage:
    """Runs `vision_encoder`, `embed` and `decoder`.

    Args:
        manifest: Of the package.
        open_runner: Opens a component; each is opened when it is first needed.
    """

    def __init__(self, manifest: Manifest, open_runner: RunnerFactory) -> None:
        self._open = open_runner
        self._manifest = manifest
        self._generation = require_generation(manifest)
        self._encoder = manifest.by_role("encoder", "image").name
        self._embed = manifest.by_role("embedding").name
        self._decoder = manifest.by_role("decoder")
        self._rows = _row_shapes(manifest, self._embed)
        self._merge = manifest.modalities["image"].merge if three_axes(self._decoder) else None
        self._host = host_of(manifest.modalities["image"])
        self._placeholder = manifest.binding.placeholders["image"].token_id if manifest.binding else None

    def image_features(self, images: Images) -> Array:
        """Return `image_features` [feature_rows, H] of images."""
        return self._features(images)["image_features"]

    def embed(self, input_ids: Array, image_features: Array | None = None) -> Array:
        """Return `inputs_embeds` [batch, sequence, H]; the rows of the features go to the placeholders in order.

        Raises:
            BadInputError: There are not as many placeholders as feature rows.
        """
        rows = self._features(None) | ({} if image_features is None else {"image_features": image_features})
        return self._embedded(input_ids, rows)["inputs_embeds"]

    def _features(self, images: Images | None) -> dict[str, Array]:
        """Return what `embed` reads beside the tokens, each [feature_rows, ...]; without images there are no rows."""
        if images is None:
            return {name: np.zeros((0, *shape), np.float32) for name, shape in self._rows.items()}
        feeds = images if isinstance(images, Mapping) else {"pixel_values": images}
        feeds = feeds if self._host is None else self._host.inputs(feeds)
        outputs = self._open(self._encoder).run(feeds)
        return {name: outputs[name] for name in self._rows}

    def _embedded(self, input_ids: Array, features: Feeds, generated: bool = False) -> dict[str, Array]:
        check_ids(self._manifest, input_ids)
        found, rows = int((input_ids == self._placeholder).sum()), len(features["image_features"])
        if found != rows and not generated:
            raise BadInputError(
                "the placeholders do not match the image features", expected=f"{rows} rows", got=f"{found}"
            )
        return self._open(self._embed).run({"input_ids": input_ids, **features})

    def prefill(
        self, input_ids: Array, images: Images | None, attention_mask: Array | None = None
    ) -> tuple[CachedDecoder, Array]:
        """Feed whole prompts [batch, sequence] and return the decoder with its cache, and the logits of every token.

        Args:
            input_ids: int64, each image placeholder repeated once per feature row.
            images: Those of all prompts in order, or None.
            attention_mask: [batch, sequence], 0 on left padding; None means no padding.
        """
        decoder = CachedDecoder(self._decoder, self._open(self._decoder.name), len(input_ids), self._manifest)
        embedded = self._embedded(input_ids, self._features(images))
        if self._merge is not None:
            embedded["position_ids"], decoder.shift = self._grid_positions(input_ids, images, attention_mask)
        types = token_types(self._manifest, input_ids)
        return decoder, decoder.step("inputs_embeds", embedded.pop("inputs_embeds"), attention_mask, types, embedded)

    def _grid_positions(
        self, input_ids: Array, images: Images | None, attention_mask: Array | None
    ) -> tuple[Array, Array]:
        if images is not None and not isinstance(images, Mapping):
            raise BadInputError("the package needs the grids of images beside their pixels", expected="image_grid_thw")
        grids = np.zeros((0, 3), np.int64) if images is None else images["image_grid_thw"]
        mask = np.ones_like(input_ids) if attention_mask is None else attention_mask
        return grid_positions(input_ids, mask, grids, self._placeholder, self._merge or 1)

    def advance(self, decoder: CachedDecoder, tokens: Sequence[int]) -> Array:
        """Feed one token to each prompt and return the next logits [batch, V].

        A placeholder that the model itself generated is a word like any other: there is no feature row for it.
        """
        ids = np.array(tokens, np.int64)[:, None]
        embedded = self._embedded(ids, self._features(None), generated=True)
        return decoder.step("inputs_embeds", embedded.pop("inputs_embeds"), extra=embedded)[:, -1]

    def greedy(
        self, input_ids: Sequence[int], images: Images | None, *, max_new_tokens: int, stop_at_eos: bool = True
    ) -> Iterator[Step]:
        """Yield the steps of the greedy answer to one prompt.

        Args:
            input_ids: The prompt; each image placeholder repeated once per feature row.
            images: Those of the prompt, or None.
            max_new_tokens: Largest number of steps.
            stop_at_eos: False goes on after the end-of-sequence token.
        """
        decoder, logits = self.prefill(np.array([input_ids], np.int64), images)
        yield from greedy(
            logits[0, -1],
            lambda token: self.advance(decoder, [token])[0],
            self._generation,
            max_new_tokens=max_new_tokens,
            stop_at_eos=stop_at_eos,
        )


def _row_shapes(manifest: Manifest, embed: str) -> dict[str, tuple[int, ...]]:
    """Return {input of `embed` beside the tokens: shape of one row}."""
    specs = [tensor.spec() for tensor in manifest.component(embed).inputs if tensor.name != "input_ids"]
    if not any(spec.name == "image_features" for spec in specs):
        where = f"manifest.components.{embed}"
        raise BadInputError("the component does not declare this input", where=where, expected="image_features")
    return {spec.name: spec.concrete({"feature_rows": 0})[1:] for spec in specs}
