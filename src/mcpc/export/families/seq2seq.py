"""Encoder-decoder models by their own forward: one pair of wrappers for every family that takes `encoder_outputs`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from mcpc.errors import UnsupportedError
from mcpc.export.wrapper import Outputs, Wrapper, flat_cache

#: Which feature rows are real, as the decoder takes it; most encoders make fewer rows than they read.
MASK = "encoder_attention_mask"


@dataclass
class EncoderOutput(BaseModelOutput):
    """What an encoder returns; some models read the mask of its rows from there."""

    attention_mask: torch.Tensor | None = None


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
        seen: dict[str, Any] = {}
        with _before_decoder(self.model, seen.update):
            output = self.model(**tensors, decoder_input_ids=start, cache=cache, use_cache=True, return_dict=True)
        features: list[torch.Tensor] = [output.encoder_last_hidden_state]
        if any(spec.name == MASK for spec in self.component.outputs):
            if seen.get(MASK) is None:
                raise UnsupportedError("the decoder gets no mask of the encoder's rows", where=self.component.name)
            features.append(seen[MASK].to(torch.int64))
        return (*features, *flat_cache(cross))


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
        options = {f"decoder_{name}": tensors[name] for name in ("attention_mask", "position_ids") if name in tensors}
        mask = {MASK: tensors[MASK]} if MASK in tensors else {}
        with _before_decoder(self.model, lambda given: given.update(mask)):
            output = self.model(
                encoder_outputs=EncoderOutput(unread), decoder_input_ids=tensors["input_ids"], cache=cache,
                use_cache=True, return_dict=True, **options,
            )  # fmt: skip
        return (output.logits, *flat_cache(own))


@contextmanager
def _before_decoder(model: torch.nn.Module, look: Any) -> Iterator[None]:
    """Show the decoder's keyword arguments to `look`, which may change them, for the length of the block."""

    def hook(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        look(kwargs)
        return args, kwargs

    decoder: Any = model
    handle = decoder.get_decoder().register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
