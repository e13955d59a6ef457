"""Granite's vision-language models: rows of several vision layers enter the language model between its layers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from mcpc.export.embedding import DeepstackEmbed
from mcpc.export.wrapper import Outputs, Wrapper, flat_cache


class DoclingImages(Wrapper):
    """Granite Docling's tower over tiles, by its coarse route."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return [feature_rows, H] and [feature_rows, levels, H] of pixels [tiles, 3, Y, X]."""
        output = self.model.model.vision_model(pixel_values=tensors["pixel_values"], return_dict=True)
        levels = [_rows(level) for level in output.deepstack_features]
        return _rows(output.pooler_output), torch.stack(levels, dim=1)


class GraniteImages(Wrapper):
    """Granite 4 Vision's tower over the tiles of images of any resolution."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return the rows of the first level, and those of the others; see `AnyResolution` for `row_index`.

        Source: transformers `Granite4VisionModel.get_image_features`.
        """
        base: Any = self.model.model
        config = base.config
        states = base.vision_tower(tensors["pixel_values"], output_hidden_states=True, return_dict=True).hidden_states
        first = 1 if config.vision_feature_select_strategy == "default" else 0
        rows = [
            project(states[layer][:, first:])
            for project, (layer, _) in zip(base.layerwise_projectors, config.deepstack_layer_map, strict=True)
        ]
        rows += [project(states[config.spatial_vision_layer][:, first:]) for project in base.spatial_projectors]
        newline = base.image_newline.unsqueeze(0)
        chosen = [
            torch.nn.functional.embedding(tensors["row_index"], torch.cat([newline, level.flatten(0, 1)]))
            for level in rows
        ]
        return chosen[0], torch.stack(chosen[1:], dim=1)


class GraniteEmbed(DeepstackEmbed):
    """Embedding that is zero where an image is: all of its rows enter between the layers."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return [batch, sequence, H] and [batch, sequence, levels, H]."""
        return super().compute(_all_levels(tensors))

    def eager(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return the same as transformers merges it."""
        return super().eager(_all_levels(tensors))


def _all_levels(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first = tensors["image_features"]
    levels = torch.cat([first.unsqueeze(1), tensors["deepstack_features"]], dim=1)
    return {**tensors, "image_features": torch.zeros_like(first), "deepstack_features": levels}


class TappedDecoder(Wrapper):
    """The model's own forward, with rows added to what enters some of its layers."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return logits [batch, sequence, V], then present keys and values."""
        cache = self.cache_of(tensors, "past")
        inputs = {name: tensors[name] for name in ("inputs_embeds", "attention_mask", "position_ids")}
        language = self.model.get_decoder()
        stations = [*language.layers, language.norm]
        with ExitStack() as stack:
            for place, level in zip(self._places(), tensors["deepstack_embeds"].unbind(dim=2), strict=True):
                handle = stations[place].register_forward_pre_hook(_adder(level))
                stack.callback(handle.remove)
            logits = self.model(**inputs, cache=cache, use_cache=True, return_dict=True).logits
        return (logits, *flat_cache(cache))

    def _places(self) -> list[int]:
        """Return before which layer each level is added."""
        config = self.model.config
        pairs = getattr(config, "deepstack_layer_map", None)
        if pairs is None:
            return [number + 1 for number in range(len(config.vision_config.deepstack_visual_indexes))]
        return [*(place for _, place in pairs), *config.spatial_target_layers]


def _rows(features: torch.Tensor) -> torch.Tensor:
    return features.flatten(0, -2)


def _adder(level: torch.Tensor) -> Any:
    return lambda module, args: (args[0] + level, *args[1:])
