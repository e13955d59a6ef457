"""Encoder-decoder models by their own forward: one pair of wrappers for every family that takes `encoder_outputs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from mcpc.export.wrapper import Outputs, Wrapper, flat_cache

#: The encoder's mask, as the decoder's graph calls it; the model's forward calls both `attention_mask`.
MASK = "encoder_attention_mask"


class Seq2SeqEncoder(Wrapper):
    """Encoder, with the cross-attention keys and values of every decoder layer: they are computed once.

    The decoder runs on one token, whatever it is, and fills its cross-attention cache; nothing else of it stays in the
    graph.
    """

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return features [batch, rows, H], the mask of the rows where the plan has one, then cross keys and values."""
        start = torch.zeros((next(iter(tensors.values())).shape[0], 1), dtype=torch.long)
        cross = DynamicCache()
        cache = EncoderDecoderCache(DynamicCache(), cross)
        output = self.model(**tensors, decoder_input_ids=start, cache=cache, use_cache=True, return_dict=True)
        mask = [self._mask(tensors, output.encoder_last_hidden_state)] if self._has_mask() else []
        return (output.encoder_last_hidden_state, *mask, *flat_cache(cross))

    def _has_mask(self) -> bool:
        return any(spec.name == MASK for spec in self.component.outputs)

    def _mask(self, tensors: Mapping[str, torch.Tensor], features: torch.Tensor) -> torch.Tensor:
        """Return the mask of the feature rows [batch, rows]."""
        return tensors["attention_mask"]


class Seq2SeqDecoder(Wrapper):
    """Text decoder that reads the cross-attention cache and appends to its own."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return logits [batch, sequence, V], then present keys and values."""
        own, cross = self.cache_of(tensors, "past"), self.cache_of(tensors, "cross")
        cache = EncoderDecoderCache(own, cross)
        # The cross cache is complete: attention must read it and never project the encoder's output again.
        cache.is_updated = dict.fromkeys(range(len(cross.layers)), True)
        rows = tensors["cross.0.key"]
        # Any [batch, rows, H] tensor switches cross-attention on; nothing reads it.
        unread = rows[:, 0, :, :1].expand(-1, -1, self.plan.sizes["hidden"])
        options: dict[str, Any] = {
            f"decoder_{name}": tensors[name] for name in ("attention_mask", "position_ids") if name in tensors
        }
        if MASK in tensors:
            options["attention_mask"] = tensors[MASK]
        output = self.model(
            encoder_outputs=BaseModelOutput(unread), decoder_input_ids=tensors["input_ids"], cache=cache,
            use_cache=True, return_dict=True, **options,
        )  # fmt: skip
        return (output.logits, *flat_cache(own))
