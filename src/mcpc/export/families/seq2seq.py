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
    """What an encoder returns; some models read its mask or its rows from a field of their own."""

    attention_mask: torch.Tensor | None = None
    pooler_output: torch.Tensor | None = None


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
        rows = output.encoder_last_hidden_state
        # An encoder that ends in a map [batch, H, Y, X] gives the decoder rows made of it.
        features: list[torch.Tensor] = [rows if rows.ndim == 3 else seen["encoder_hidden_states"]]
        if any(spec.name == MASK for spec in self.component.outputs):
            if seen.get(MASK) is None:
                raise UnsupportedError("the decoder gets no mask of the encoder's rows", where=self.component.name)
            features.append(seen[MASK].to(torch.int64))
        return (*features, *flat_cache(cross))


class MoonshineEncoder(Seq2SeqEncoder):
    """Moonshine's encoder; its own count of rows goes through a Python float, which would fix the number of samples."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return features, mask, and cross keys and values."""
        encoder: Any = self.model.get_encoder()
        encoder._get_feat_extract_output_lengths = _moonshine_rows
        try:
            return super().compute(tensors)
        finally:
            del encoder._get_feat_extract_output_lengths


def _moonshine_rows(samples: Any) -> Any:
    """Return the rows of a number of samples, three convolutions without padding. Source: MoonshinePreTrainedModel."""
    for kernel, stride in ((127, 64), (7, 3), (3, 2)):
        samples = (samples - kernel) // stride + 1
    return samples


class Seq2SeqDecoder(Wrapper):
    """Text decoder that reads the cross-attention cache and appends to its own."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return logits [batch, sequence, V], then present keys and values."""
        cache, own, unread = _complete_cache(self, tensors)
        options = {f"decoder_{name}": tensors[name] for name in ("attention_mask", "position_ids") if name in tensors}
        given = {"encoder_hidden_states": unread, **({MASK: tensors[MASK]} if MASK in tensors else {})}
        with _before_decoder(self.model, lambda arguments: arguments.update(given)):
            output = self.model(
                encoder_outputs=EncoderOutput(unread), decoder_input_ids=tensors["input_ids"], cache=cache,
                use_cache=True, return_dict=True, **options,
            )  # fmt: skip
        return (output.logits, *flat_cache(own))


class BlipEncoder(Wrapper):
    """BLIP's image tower, with the cross-attention cache of its text decoder, which takes no `encoder_outputs`."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return features [batch, rows, H], then cross keys and values."""
        model: Any = self.model
        features = model.vision_model(pixel_values=tensors["pixel_values"]).last_hidden_state
        cross = DynamicCache()
        model.text_decoder(
            input_ids=torch.zeros((features.shape[0], 1), dtype=torch.long), encoder_hidden_states=features,
            cache=EncoderDecoderCache(DynamicCache(), cross), use_cache=True,
        )  # fmt: skip
        return (features, *flat_cache(cross))


class BlipDecoder(Wrapper):
    """BLIP's text decoder, which reads the cross-attention cache and appends to its own."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return logits [batch, sequence, V], then present keys and values."""
        model: Any = self.model
        cache, own, unread = _complete_cache(self, tensors)
        output = model.text_decoder(
            input_ids=tensors["input_ids"], attention_mask=tensors["attention_mask"], encoder_hidden_states=unread,
            cache=cache, use_cache=True,
        )  # fmt: skip
        return (output.logits, *flat_cache(own))


def _complete_cache(
    wrapper: Wrapper, tensors: Mapping[str, torch.Tensor]
) -> tuple[EncoderDecoderCache, DynamicCache, torch.Tensor]:
    """Return the whole cache, its part that grows, and a tensor in the place of the encoder's output."""
    own, cross = wrapper.cache_of(tensors, "past"), wrapper.cache_of(tensors, "cross")
    cache = EncoderDecoderCache(own, cross)
    # The cross cache is complete: attention must read it and never project the encoder's output again.
    cache.is_updated = dict.fromkeys(range(len(cross.layers)), True)
    # Any [batch, rows, H] tensor switches cross-attention on; nothing reads it.
    sizes = wrapper.plan.sizes
    unread = tensors["cross.0.key"][:, 0, :, :1].repeat(1, 1, sizes.get("encoder_hidden", sizes["hidden"]))
    return cache, own, unread


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
