"""Dual encoders: the similarity of their embeddings, and the towers of BLIP-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mcpc.export.wrapper import Outputs, Wrapper, tensor_of


class Similarity(Wrapper):
    """Cosine similarity of image and text embeddings, scaled and shifted as the family's forward does it.

    Where an image has several embeddings [images, rows, P], the best of them counts.
    """

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return logits [images, texts]."""
        image, text = tensors["image_embeds"], tensors["text_embeds"]
        image = image / image.pow(2).sum(dim=-1, keepdim=True).pow(0.5)
        text = text / text.pow(2).sum(dim=-1, keepdim=True).pow(0.5)
        cosines = image @ text.t()
        if cosines.ndim == 3:
            cosines = cosines.max(dim=1).values
        call = self.component.call
        if call.scale == "exp(logit_scale)":
            cosines = cosines * tensor_of(self.model, "logit_scale").exp()
        elif call.scale == "1 / temperature":
            cosines = cosines / tensor_of(self.model, "temperature")
        return (cosines + tensor_of(self.model, call.bias) if call.bias else cosines,)


class VideoSimilarity(Wrapper):
    """VideoPrism's scores: for each text a softmax over the clips."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return scores [videos, texts] that sum to 1 for each text."""
        return ((tensors["video_embeds"] @ tensors["text_embeds"].t()).softmax(dim=0),)


class Blip2Images(Wrapper):
    """BLIP-2's image tower: the learned queries read the image, each becomes an embedding."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return [images, queries, P]. Source: Blip2ForImageTextRetrieval.forward without the matching head."""
        model: Any = self.model
        image = model.vision_model(pixel_values=tensors["pixel_values"])[0]
        queries = tensor_of(self.model, "query_tokens").expand(image.shape[0], -1, -1)
        mask = torch.ones(image.shape[:-1], dtype=torch.long)
        output = model.qformer(
            query_embeds=queries, encoder_hidden_states=image, encoder_attention_mask=mask, return_dict=True
        )
        return (model.vision_projection(output.last_hidden_state),)


class Blip2Texts(Wrapper):
    """BLIP-2's text tower: the Q-Former without queries; its first token is the text's embedding."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return [texts, P]."""
        model: Any = self.model
        embeds = model.embeddings(input_ids=tensors["input_ids"])
        output = model.qformer(
            query_embeds=embeds, query_length=0, attention_mask=tensors["attention_mask"], return_dict=True
        )
        return (model.text_projection(output.last_hidden_state[:, 0, :]),)
