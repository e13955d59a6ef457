"""Seeded inputs of an encoder, by name and type: noise where any value will do, else masks and shapes that fit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mcpc.core.runner import Array
from mcpc.package.manifest import Component


def encoder_inputs(random: np.random.Generator, component: Component, sizes: Mapping[str, int]) -> dict[str, Array]:
    """Return the inputs of a component at the given sizes of its dynamic dimensions.

    Floats are standard normal. A mask [items, n] hides the end of every second item, `pixel_mask` [items, Y, X] the
    bottom of every second image, from the first. `spatial_shapes` [items, 2] are rows and columns of patches, and
    `pixel_attention_mask` [items, patches] shows exactly those.
    """
    specs = {tensor.name: tensor.spec() for tensor in component.inputs}
    feeds: dict[str, Array] = {}
    for name, spec in specs.items():
        shape = spec.concrete(sizes)
        if spec.dtype.startswith("float"):
            feeds[name] = random.standard_normal(shape).astype(np.float32)
        else:
            feeds[name] = np.ones(shape, spec.dtype)
            if len(shape) == 2 and name.endswith("attention_mask"):
                feeds[name][1::2, shape[1] - shape[1] // 4 :] = 0
            if name == "pixel_mask":
                feeds[name][::2, shape[1] - shape[1] // 3 :] = 0
    if "flattened_patches" in feeds:
        patches = feeds["flattened_patches"]
        # The first two values of a patch are its row and column, from 1; 0 is padding.
        patches[..., 0], patches[..., 1] = np.divmod(np.arange(patches.shape[1]), 4)
        patches[..., :2] += 1
        patches *= feeds["attention_mask"][..., None]
    if "spatial_shapes" in feeds:
        mask = feeds["pixel_attention_mask"]
        rows = random.integers(2, int(mask.shape[1] ** 0.5) + 1, len(mask))
        feeds["spatial_shapes"] = np.stack([rows, mask.shape[1] // rows], axis=1).astype(np.int64)
        shown = feeds["spatial_shapes"].prod(axis=1)
        feeds["pixel_attention_mask"] = (np.arange(mask.shape[1]) < shown[:, None]).astype(mask.dtype)
    return feeds
