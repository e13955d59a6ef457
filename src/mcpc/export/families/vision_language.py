"""Parts of vision-language models whose own methods depend on the data, or leave a part of a mask out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from mcpc.export.wrapper import Outputs, Wrapper, flat_cache


class Tiles(Wrapper):
    """Idefics 2 and 3, SmolVLM: features of full tiles.

    The model's own method drops tiles that are all zero and masks padded edges; both happen before the graph, which
    takes the tiles that are left, each of full size.
    """

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return [tiles * rows, H] of pixels [tiles, 3, Y, X]."""
        pixels, model = tensors["pixel_values"], self.model.model
        patch = model.config.vision_config.patch_size
        shape = (pixels.shape[0], pixels.shape[2] // patch, pixels.shape[3] // patch)
        full = torch.ones(shape, dtype=torch.bool, device=pixels.device)
        hidden = model.vision_model(pixel_values=pixels, patch_attention_mask=full, return_dict=True).last_hidden_state
        masked = {"attention_mask": full.flatten(1)} if self.component.call.method == "masked" else {}
        return (model.connector(hidden, **masked).flatten(0, 1),)


class PrefixDecoder(Wrapper):
    """PaliGemma's decoder: tokens of type 0 see each other in both directions, at any length of the cache.

    The model's own forward sets that mask only while the cache is empty, a branch that a trace would fix.
    """

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return logits [batch, sequence, V], then present keys and values."""
        cache, model = self.cache_of(tensors, "past"), self.model.model
        arguments = {
            "config": model.config.get_text_config(),
            "inputs_embeds": tensors["inputs_embeds"],
            "attention_mask": tensors["attention_mask"],
            "cache": cache,
            "position_ids": tensors["position_ids"],
            "block_sequence_ids": torch.where(tensors["token_type_ids"] == 0, 0, -1),
        }
        mask = create_causal_mask(**arguments)
        if getattr(arguments["config"], "sliding_window", None) is not None:
            mask = {"full_attention": mask, "sliding_attention": create_sliding_window_causal_mask(**arguments)}
        hidden = model.language_model(
            inputs_embeds=tensors["inputs_embeds"], attention_mask=mask, position_ids=tensors["position_ids"],
            cache=cache, use_cache=True,
        )[0]  # fmt: skip
        return (self.model.lm_head(hidden), *flat_cache(cache))


class LanguageModel(Wrapper):
    """Decoder of a model whose own forward wants an image: its language model, with its head."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return logits [batch, sequence, V], then present keys and values."""
        cache = self.cache_of(tensors, "past")
        inputs = {spec.name: tensors[spec.name] for spec in self.component.inputs if "." not in spec.name}
        language_model: Any = self.model.language_model
        logits = language_model(**inputs, cache=cache, use_cache=True, return_dict=True).logits
        return (logits, *flat_cache(cache))
