"""Vision towers over tiles, whose rows a host function puts in order: it knows the sizes of the images."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
import transformers

from mcpc.export.embedding import VisionEmbed
from mcpc.export.wrapper import Outputs, Wrapper, tensor_of
from mcpc.templates.plan import ExportPlan, PlannedComponent


class AnyResolution(Wrapper):
    """LLaVA-NeXT's tower and projector; a feature row is a row of a tile, the end of a line, or a mean of four rows."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return [feature_rows, H] of pixels [tiles, 3, Y, X] and `row_index`."""
        base: Any = self.model.model
        rows = torch.cat([base.image_newline.unsqueeze(0), self._rows(base, tensors["pixel_values"]).flatten(0, 1)])
        chosen = torch.nn.functional.embedding(tensors["row_index"], rows)
        if "row_weights" not in tensors:
            return (chosen,)
        return ((chosen * tensors["row_weights"].unsqueeze(-1)).sum(1),)

    def _rows(self, base: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Return [tiles, rows, H]. Source: transformers `LlavaNextModel.get_image_features`, up to the packing."""
        layers = base.config.vision_feature_layer
        states = base.vision_tower(pixels, output_hidden_states=True, return_dict=True).hidden_states
        chosen = states[layers] if isinstance(layers, int) else torch.cat([states[layer] for layer in layers], dim=-1)
        if base.config.vision_feature_select_strategy == "default":
            chosen = chosen[:, 1:]
        rows: torch.Tensor = base.multi_modal_projector(chosen)
        return rows


class Pixtral(Wrapper):
    """Pixtral's tower over the patches of all images; patches of one image see each other."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return [feature_rows, H] of `patches`. Source: transformers `PixtralVisionModel.forward`."""
        base: Any = self.model.model
        tower = base.get_encoder("image")
        embeds = tower.ln_pre(tower.patch_conv(tensors["patches"]).flatten(1).unsqueeze(0))
        rotary = tower.patch_positional_embedding(embeds, tensors["position_ids"])
        image = tensors["image_index"]
        apart = image.unsqueeze(1) != image.unsqueeze(0)
        mask = torch.zeros(apart.shape, dtype=embeds.dtype).masked_fill(apart, torch.finfo(embeds.dtype).min)
        states = [embeds]
        with ExitStack() as stack:
            for layer in tower.transformer.layers:
                handle = layer.register_forward_hook(lambda module, args, output: states.append(_first(output)))
                stack.callback(handle.remove)
            tower.transformer(embeds, attention_mask=mask[None, None], position_embeddings=rotary)
        layers = getattr(base.config, "vision_feature_layer", -1)
        chosen = states[layers] if isinstance(layers, int) else torch.cat([states[layer] for layer in layers], dim=-1)
        return (self._projected(base, chosen[0], tensors["merge_index"]),)

    def _projected(self, base: Any, rows: torch.Tensor, merge_index: torch.Tensor) -> torch.Tensor:
        projector = getattr(base, "multi_modal_projector", None) or base.vision_projection
        merger = getattr(projector, "patch_merger", None)
        if merger is None:
            plain: torch.Tensor = projector(rows)
            return plain

        def merge(features: torch.Tensor, sizes: object) -> torch.Tensor:
            # The square of a feature row lies innermost, as `unfold` puts it.
            squares = torch.nn.functional.embedding(merge_index, features).transpose(1, 2).flatten(1)
            merged: torch.Tensor = merger.merging_layer(squares)
            return merged

        merger.forward = merge
        try:
            result: torch.Tensor = projector(rows, None)
        finally:
            del merger.forward
        return result


def _first(output: Any) -> torch.Tensor:
    """Return a layer's hidden states, whether it returns them alone or first."""
    found: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return found


class Lfm2Images(Wrapper):
    """LFM2-VL's tower over patches of images of any shape, and its projector over squares of them."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return [feature_rows, H]. Source: transformers `Lfm2VlMultiModalProjector.forward`."""
        base: Any = self.model.model
        inputs = {name: tensors[name] for name in ("pixel_values", "pixel_attention_mask", "spatial_shapes")}
        hidden = base.vision_tower(**inputs, return_dict=True).last_hidden_state.flatten(0, 1)
        rows = torch.nn.functional.embedding(tensors["merge_index"], hidden).flatten(1)
        projector = base.multi_modal_projector
        rows = projector.layer_norm(rows) if projector.use_layer_norm else rows
        return (projector.linear_2(projector.act(projector.linear_1(rows))),)


class ChameleonImages(Wrapper):
    """Chameleon's images as words of the vocabulary."""

    def __init__(self, model: transformers.PreTrainedModel, component: PlannedComponent, plan: ExportPlan) -> None:
        super().__init__(model, component, plan)
        words: torch.Tensor = model.model.vocabulary_mapping.img2bpe_mapping_tensor
        self._words = words.to(torch.int64)

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return [feature_rows, H]. Source: transformers `ChameleonModel.get_image_features`."""
        base: Any = self.model.model
        numbers = base.vqmodel.encode(tensors["pixel_values"], return_dict=True).image_tokens
        return (base.get_input_embeddings()(self._words[numbers.reshape(-1)]),)


class Ovis2Embed(VisionEmbed):
    """Ovis 2's embedding: beside an image, the tokens that surround it come from the visual vocabulary."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return [batch, sequence, hidden]."""
        return (self._indicated(tensors, *super().compute(tensors)),)

    def eager(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return the same as transformers merges it."""
        return (self._indicated(tensors, *super().eager(tensors)),)

    def _indicated(self, tensors: Mapping[str, torch.Tensor], embeds: torch.Tensor) -> torch.Tensor:
        base: Any = self.model.model
        has_image = torch.ones_like(tensors["image_features"][:, :1]).sum() > 0
        ids = list(base.visual_indicator_token_ids)
        table = tensor_of(base.visual_embeddings_table, "weight")[-base.vision_tower.num_visual_indicator_tokens :]
        for number, token in enumerate(ids):
            chosen = ((tensors["input_ids"] == token) & has_image).unsqueeze(-1)
            embeds = torch.where(chosen, table[number], embeds)
        return embeds
