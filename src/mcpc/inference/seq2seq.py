"""Encoder-decoder models: an encoder that computes the cross-attention cache once, and a cached decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mcpc.core.runner import Array, Feeds, RunnerFactory
from mcpc.errors import BadInputError
from mcpc.inference.cache import CachedDecoder, declared
from mcpc.inference.greedy import Step, greedy, require_generation
from mcpc.inference.ids import check_ids
from mcpc.package.manifest import Manifest


class Seq2Seq:
    """Runs `encoder` and `decoder`.

    Args:
        manifest: Of the package.
        open_runner: Opens a component; each is opened when it is first needed.
    """

    def __init__(self, manifest: Manifest, open_runner: RunnerFactory) -> None:
        self._open = open_runner
        self._manifest = manifest
        self._generation = require_generation(manifest)
        self._encoder = manifest.by_role("encoder")
        self._decoder = manifest.by_role("decoder")
        if not self._generation.decoder_start_ids:
            raise BadInputError("the package does not say how to start", where="manifest.generation.decoder_start_ids")

    def encode(self, feeds: Feeds) -> dict[str, Array]:
        """Return the encoder's outputs for the model's own inputs: its features, and `cross.{i}.key|value`."""
        return self._open(self._encoder.name).run(declared(self._encoder, feeds))

    def prefill(self, encoded: Mapping[str, Array], input_ids: Sequence[int]) -> tuple[CachedDecoder, Array]:
        """Feed the start tokens to every row and return the decoder with its cache, and logits [batch, sequence, V]."""
        batch = len(encoded["cross.0.key"])
        decoder = CachedDecoder(self._decoder, self._open(self._decoder.name), batch, self._manifest, encoded)
        ids = np.tile(np.array(input_ids, np.int64), (batch, 1))
        check_ids(self._manifest, ids)
        return decoder, decoder.step("input_ids", ids)

    def advance(self, decoder: CachedDecoder, tokens: Sequence[int]) -> Array:
        """Feed one token to each row and return the next logits [batch, V]."""
        ids = np.array(tokens, np.int64)[:, None]
        check_ids(self._manifest, ids)
        return decoder.step("input_ids", ids)[:, -1]

    def greedy(self, feeds: Feeds, *, max_new_tokens: int, stop_at_eos: bool = True) -> Iterator[Step]:
        """Yield the steps of the greedy answer to one input.

        Args:
            feeds: The model's own inputs, of batch 1, such as `input_features` [1, mel, frames].
            max_new_tokens: Largest number of steps.
            stop_at_eos: False goes on after the end-of-sequence token.
        """
        decoder, logits = self.prefill(self.encode(feeds), self._generation.decoder_start_ids)
        yield from greedy(
            logits[0, -1],
            lambda token: self.advance(decoder, [token])[0],
            self._generation,
            max_new_tokens=max_new_tokens,
            stop_at_eos=stop_at_eos,
        )
