"""Image rows of models whose language model has experts, as their own forward makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mcpc.export.wrapper import Outputs, Wrapper


class AriaImages(Wrapper):
    """Aria: features of the layer that the config names; the method of the outer model takes the last one instead."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return [images * rows, H] of pixels [images, 3, Y, X] and their mask [images, Y, X]."""
        model: Any = self.model.model
        layer = model.config.vision_feature_layer
        output = model.get_image_features(**tensors, vision_feature_layer=layer, return_dict=True)
        return (output.pooler_output.flatten(0, 1),)
