"""Audio language models: rows of sound enter the token stream through `embed`, a cached decoder answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mcpc.core.runner import Array, Feeds, RunnerFactory
from mcpc.errors import BadInputError
from mcpc.inference.cache import CachedDecoder, declared
from mcpc.inference.greedy import Step, greedy, require_generation
from mcpc.inference.ids import check_ids
from mcpc.package.manifest import Manifest

FEATURES, MASK = "audio_features", "feature_mask"


def kept_rows(outputs: Feeds) -> Array:
    """Return the feature rows [rows, H] of an encoder's outputs, without those of padded sound.

    A graph has as many rows as the padded input makes; where padding makes rows of its own, `feature_mask`
    [feature_rows] is 0 on them, and no placeholder stands for them.
    """
    features = outputs[FEATURES]
    return features[outputs[MASK] != 0] if MASK in outputs else features


class AudioLanguage:
    """Runs `audio_encoder`, `embed` and `decoder`.

    Args:
        manifest: Of the package.
        open_runner: Opens a component; each is opened when it is first needed.

    Raises:
        BadInputError: The manifest does not say which token stands for a row.
    """

    def __init__(self, manifest: Manifest, open_runner: RunnerFactory) -> None:
        if manifest.binding is None:
            raise BadInputError("the package does not say where sound goes in the text", where="manifest.binding")
        self._open = open_runner
        self._manifest = manifest
        self._generation = require_generation(manifest)
        self._encoder = manifest.by_role("encoder", "audio")
        self._embed = manifest.by_role("embedding")
        self._decoder = manifest.by_role("decoder")
        self._placeholder = manifest.binding.placeholders["audio"].token_id

    def features(self, feeds: Feeds) -> Array:
        """Return the rows [rows, H] of the encoder's own inputs, such as `input_features` and their mask."""
        return kept_rows(self._open(self._encoder.name).run(declared(self._encoder, feeds)))

    def embed(self, input_ids: Array, features: Array) -> Array:
        """Return `inputs_embeds` [batch, sequence, H]; the rows of the features go to the placeholders in order.

        Raises:
            BadInputError: There are not as many placeholders as feature rows.
        """
        found = int((input_ids == self._placeholder).sum())
        if found != len(features):
            raise BadInputError(
                "the placeholders do not match the rows of sound", expected=f"{len(features)} rows", got=f"{found}"
            )
        return self._embedded(input_ids, features)

    def prefill(
        self, input_ids: Array, feeds: Feeds, attention_mask: Array | None = None
    ) -> tuple[CachedDecoder, Array]:
        """Feed whole prompts [batch, sequence] and return the decoder with its cache, and the logits of every token.

        Args:
            input_ids: int64, the placeholder repeated once per feature row.
            feeds: The encoder's inputs of all prompts in order; empty for prompts without sound.
            attention_mask: [batch, sequence], 0 on left padding; None means no padding.
        """
        sound = declared(self._encoder, feeds)
        embeds = self.embed(input_ids, self.features(sound) if sound else self._no_rows())
        decoder = CachedDecoder(self._decoder, self._open(self._decoder.name), len(input_ids), self._manifest)
        return decoder, decoder.step("inputs_embeds", embeds, attention_mask)

    def advance(self, decoder: CachedDecoder, tokens: Sequence[int]) -> Array:
        """Feed one token to each prompt and return the next logits [batch, V]; a placeholder is a word too."""
        ids = np.array(tokens, np.int64)[:, None]
        return decoder.step("inputs_embeds", self._embedded(ids, self._no_rows()))[:, -1]

    def greedy(
        self, input_ids: Sequence[int], feeds: Feeds, *, max_new_tokens: int, stop_at_eos: bool = True
    ) -> Iterator[Step]:
        """Yield the steps of the greedy answer to one prompt.

        Args:
            input_ids: The prompt; the placeholder repeated once per feature row.
            feeds: The encoder's inputs of this prompt.
            max_new_tokens: Largest number of steps.
            stop_at_eos: False goes on after the end-of-sequence token.
        """
        decoder, logits = self.prefill(np.array([input_ids], np.int64), feeds)
        yield from greedy(
            logits[0, -1],
            lambda token: self.advance(decoder, [token])[0],
            self._generation,
            max_new_tokens=max_new_tokens,
            stop_at_eos=stop_at_eos,
        )

    def _embedded(self, input_ids: Array, features: Array) -> Array:
        check_ids(self._manifest, input_ids)
        return self._open(self._embed.name).run({"input_ids": input_ids, FEATURES: features})["inputs_embeds"]

    def _no_rows(self) -> Array:
        size = next(tensor.shape[-1] for tensor in self._embed.inputs if tensor.name == FEATURES)
        return np.zeros((0, int(size)), np.float32)
