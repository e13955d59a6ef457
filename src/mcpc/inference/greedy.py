"""Greedy decoding: the most likely token at each step, under the model's own constraints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from mcpc.core.runner import Array
from mcpc.errors import BadInputError
from mcpc.package.manifest import Generation, Manifest


@dataclass(frozen=True)
class Step:
    """One generated token, and the logits [V] float32 as the model gave them, before any token was suppressed."""

    token: int
    logits: Array


def greedy(
    logits: Array,
    advance: Callable[[int], Array],
    generation: Generation,
    *,
    max_new_tokens: int,
    stop_at_eos: bool = True,
) -> Iterator[Step]:
    """Yield the steps of one answer; the end-of-sequence token is the last one.

    Args:
        logits: [V], of the token after the prompt.
        advance: Feeds a token to the decoder and returns the next logits [V]. Not called for the last token.
        generation: Which tokens end the answer, and which may not be chosen.
        max_new_tokens: Largest number of steps.
        stop_at_eos: False goes on after the end-of-sequence token.

    Raises:
        BadInputError: The chosen logit is not finite.

    Source: transformers `SuppressTokensLogitsProcessor`, `SuppressTokensAtBeginLogitsProcessor`: suppressed logits
    become -inf; the second list only at the first step.
    """
    for index in range(max_new_tokens):
        token = _choose(logits, generation, first=index == 0)
        yield Step(token, logits)
        if stop_at_eos and token in generation.eos_token_ids:
            return
        if index + 1 < max_new_tokens:
            logits = advance(token)


def _choose(logits: Array, generation: Generation, first: bool) -> int:
    banned = generation.suppress_token_ids + (generation.begin_suppress_token_ids if first else ())
    scores = logits
    if banned:
        scores = logits.copy()
        scores[list(banned)] = -np.inf
    token = int(scores.argmax())  # argmax returns the first NaN when there is one
    if not np.isfinite(scores[token]):
        raise BadInputError("the decoder's logits are not finite", where="decoder.logits", got=str(scores[token]))
    return token


def require_generation(manifest: Manifest) -> Generation:
    """Return how the decoder is started and stopped.

    Raises:
        BadInputError: The manifest does not say.
    """
    if manifest.generation is None:
        raise BadInputError("the package does not say how to generate", where="manifest.generation")
    return manifest.generation
