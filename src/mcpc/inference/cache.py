"""A decoder with its key/value cache, and the positions of padded prompts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mcpc.core.runner import Array, Feeds, Runner
from mcpc.core.tensors import nbytes
from mcpc.package.manifest import Component, Manifest, Tensor


def positions(attention_mask: Array, first: int = 0) -> Array:
    """Return position ids int64 [batch, total] of a mask [batch, total] of 0 and 1: padding does not count.

    Positions start at `first`. Those of padding itself are `first` too; nothing attends to them.

    Source: transformers `GenerationMixin.prepare_inputs_for_generation`.
    """
    result: Array = np.maximum(np.cumsum(attention_mask, axis=1, dtype=np.int64) - 1, 0) + first
    return result


def three_axes(decoder: Component) -> bool:
    """Return True for a decoder with positions of time, row and column."""
    return any(tensor.name == "position_ids" and len(tensor.shape) == 3 for tensor in decoder.inputs)


def grid_text_positions(attention_mask: Array, steps: int, shift: Array) -> Array:
    """Return position ids [3, batch, steps] of text at the end of a mask [batch, total].

    Images before it have shifted it by `shift` [batch, 1]; a text token stands at the same place on all three axes.
    """
    places = positions(attention_mask)[:, -steps:] + shift
    return np.repeat(places[None], 3, axis=0)


def token_types(manifest: Manifest, input_ids: Array) -> Array:
    """Return the types int64 [batch, sequence] of a prompt's tokens, as `binding.token_types` says."""
    binding = manifest.binding
    if binding is None or binding.token_types != "image":
        return np.zeros_like(input_ids)
    types: Array = (input_ids == binding.placeholders["image"].token_id).astype(np.int64)
    return types


def generated_type(manifest: Manifest) -> int:
    """Return the type of every token after the prompt."""
    return int(manifest.binding is not None and manifest.binding.token_types == "prefix")


def bytes_per_token(tensors: Iterable[Tensor]) -> int:
    """Return by how many bytes the cache grows with each token; states do not grow."""
    grown = [tensor for tensor in tensors if tensor.name.startswith("past.") and "past" in tensor.shape]
    return sum(nbytes(tensor.dtype, [dim for dim in tensor.shape if isinstance(dim, int)]) for tensor in grown)


def empty_cache(decoder: Component, batch: int) -> dict[str, Array]:
    """Return what a decoder reads before the first token: `past.{i}.key|value` of length 0, states of zeros."""
    specs = [tensor.spec() for tensor in decoder.inputs if tensor.name.startswith("past.")]
    return {spec.name: np.zeros(spec.concrete({"batch": batch, "past": 0}), np.float32) for spec in specs}


def declared(component: Component, feeds: Feeds) -> dict[str, Array]:
    """Return the feeds that a component declares as inputs; a family has a mask or positions, or it has not."""
    names = {tensor.name for tensor in component.inputs}
    return {name: value for name, value in feeds.items() if name in names}


class CachedDecoder:
    """Runs `decoder` step by step: `past.{i}.key|value` [batch, kv_heads, past, head_dim] grow from length 0.

    States of a convolution, `past.{i}.conv`, keep their size.

    Args:
        component: The decoder's description.
        runner: Of the decoder.
        batch: Rows that are decoded together.
        constants: Feeds that stay the same at every step, such as `cross.{i}.key`.
        manifest: Of the package: where positions start, and the types of tokens.

    Attributes:
        shift: [batch, 1], how far images have moved the text after them, for positions of three axes.
    """

    def __init__(
        self,
        component: Component,
        runner: Runner,
        batch: int,
        manifest: Manifest,
        constants: Feeds | None = None,
    ) -> None:
        self._component = component
        self._runner = runner
        self._first = manifest.binding.first_position if manifest.binding else 0
        self._next_type = generated_type(manifest)
        self._types = np.zeros((batch, 0), np.int64)
        self._constants = dict(constants or {})
        self._past = empty_cache(component, batch)
        self._mask = np.zeros((batch, 0), np.int64)
        self.shift: Array | None = None

    def step(
        self,
        name: str,
        tokens: Array,
        attention_mask: Array | None = None,
        types: Array | None = None,
        extra: Feeds | None = None,
    ) -> Array:
        """Feed more tokens and return their logits [batch, sequence, V].

        Args:
            name: The decoder's input: `input_ids` or `inputs_embeds`.
            tokens: [batch, sequence] int64, or [batch, sequence, H] float32.
            attention_mask: [batch, sequence] of the new tokens; all ones when None. 0 marks left padding.
            types: [batch, sequence] of the new tokens; those of generated ones when None.
            extra: Feeds of this step alone; they count before what is worked out here.
        """
        new = np.ones(tokens.shape[:2], np.int64) if attention_mask is None else attention_mask
        self._mask = np.concatenate([self._mask, new], axis=1)
        self._types = np.concatenate([self._types, np.full_like(new, self._next_type) if types is None else types], 1)
        steps = tokens.shape[1]
        places = positions(self._mask, self._first)[:, -steps:]
        feeds = {
            name: tokens,
            "attention_mask": self._mask,
            "position_ids": places if self.shift is None else grid_text_positions(self._mask, steps, self.shift),
            "token_type_ids": self._types,
            **self._past,
            **self._constants,
            **(extra or {}),
        }
        outputs = self._runner.run(declared(self._component, feeds))
        self._past = {name: outputs[name.replace("past.", "present.", 1)] for name in self._past}
        return outputs["logits"]
