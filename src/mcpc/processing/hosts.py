"""What stands between an image processor and an image encoder, for families whose encoder alone cannot do it.

A host function works on the sizes of the images only: it says which rows of the encoder's tiles become feature rows,
and in which order; the encoder's graph selects them. Which function, with which settings, is in the manifest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np

from mcpc.core.runner import Array, Feeds
from mcpc.errors import BadInputError
from mcpc.package.manifest import HostSettings, Modality


class Host(Protocol):
    """A host function with its settings."""

    def inputs(self, feeds: Feeds) -> dict[str, Array]:
        """Return the inputs of the image encoder, of those that the processor makes."""
        ...

    def rows(self, feeds: Feeds) -> list[int]:
        """Return how many feature rows each image becomes."""
        ...


@dataclass(frozen=True)
class AnyResolution:
    """LLaVA-NeXT's layout: a small picture of the whole image, then its tiles, without padding, row by row.

    Attributes:
        resolutions: Heights and widths that tiles may cover.
        tile: Height and width of a tile, in pixels.
        side: Feature rows along each side of a tile.
        limit: Tiles from which on the rows of an image are resized to fit; None for never.

    Source: transformers `LlavaNextModel.pack_image_features`, `LlavaOnevisionModel.pack_image_features`.
    """

    resolutions: Sequence[tuple[int, int]]
    tile: int
    side: int
    limit: int | None = None

    def tiles(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return how many tiles, down and across, an image of a height and width is cut into.

        Source: transformers `select_best_resolution`.
        """
        best, most, least = (0, 0), 0, math.inf
        for height, width in self.resolutions:
            scale = min(width / size[1], height / size[0])
            covered = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
            wasted = width * height - covered
            if covered > most or (covered == most and wasted < least):
                best, most, least = (height, width), covered, wasted
        return best[0] // self.tile, best[1] // self.tile

    def inputs(self, feeds: Feeds) -> dict[str, Array]:
        """Return `pixel_values` [tiles, 3, Y, X] and which of their rows, counted from 1, each feature row is.

        Row 0 is the end of a line. With `limit`, a feature row is a sum of four rows, `row_index` and `row_weights`
        [feature_rows, 4]; else `row_index` [feature_rows].
        """
        indices, weights, first = [], [], 1
        for size in self._sizes(feeds):
            index, weight = self._layout(size, first)
            indices.append(index)
            weights.append(weight)
            down, across = self.tiles(size)
            first += (1 + down * across) * self.side**2
        found = {"pixel_values": feeds["pixel_values"], "row_index": np.concatenate(indices)}
        if first - 1 != len(feeds["pixel_values"]) * self.side**2:
            raise BadInputError(
                "the tiles do not fit the sizes of the images", where="pixel_values",
                expected=f"{(first - 1) // self.side**2} tiles", got=str(len(feeds["pixel_values"])),
            )  # fmt: skip
        if self.limit is None:
            return {**found, "row_index": found["row_index"][:, 0]}
        return {**found, "row_weights": np.concatenate(weights)}

    def rows(self, feeds: Feeds) -> list[int]:
        """Return the feature rows of each image."""
        return [len(self._layout(size, 1)[0]) for size in self._sizes(feeds)]

    def _sizes(self, feeds: Feeds) -> list[tuple[int, int]]:
        return [(int(height), int(width)) for height, width in feeds["image_sizes"]]

    def _layout(self, size: tuple[int, int], first: int) -> tuple[Array, Array]:
        """Return which four rows make each feature row of an image, and their weights, int64 and float32 [rows, 4]."""
        (down, across), side = self.tiles(size), self.side
        whole = np.arange(side**2) + first
        grid = np.arange(down * across * side**2).reshape(down, across, side, side) + first + side**2
        grid = _without_padding(grid.transpose(0, 2, 1, 3).reshape(down * side, across * side), size)
        taps, weights = _resized(grid, self._target(grid))
        ends = np.zeros((len(taps), 1, 4), np.int64)
        taps, weights = np.concatenate([taps, ends], 1), np.concatenate([weights, _once(ends.shape)], 1)
        base = np.repeat(whole[:, None], 4, axis=1)
        return (
            np.concatenate([base, taps.reshape(-1, 4)]),
            np.concatenate([_once(base.shape), weights.reshape(-1, 4)]).astype(np.float32),
        )

    def _target(self, grid: Array) -> tuple[int, int]:
        height, width = grid.shape
        if self.limit is None:
            return height, width
        ratio = math.sqrt(height * width / (self.limit * self.side**2))
        return (int(height // ratio), int(width // ratio)) if ratio > 1.1 else (height, width)


def _without_padding(grid: Array, size: tuple[int, int]) -> Array:
    """Cut off what an image of a height and width does not cover. Source: transformers `unpad_image`."""
    height, width = grid.shape
    if size[1] / size[0] > width / height:
        padding = (height - int(round(size[0] * (width / size[1]), 7))) // 2
        return grid[padding : height - padding]
    padding = (width - int(round(size[1] * (height / size[0]), 7))) // 2
    return grid[:, padding : width - padding]


def _resized(grid: Array, target: tuple[int, int]) -> tuple[Array, Array]:
    """Return the four places of each place of a resized grid, and their bilinear weights, [height, width, 4].

    Source: PyTorch `upsample_bilinear2d` without aligned corners.
    """
    if grid.shape == target:
        return np.repeat(grid[..., None], 4, axis=2), _once((*grid.shape, 4))
    (top, bottom, down), (left, right, across) = (_axis(n, size) for n, size in zip(grid.shape, target, strict=True))
    taps = [grid[rows[:, None], columns] for rows in (top, bottom) for columns in (left, right)]
    weights = [y[:, None] * x for y in (1 - down, down) for x in (1 - across, across)]
    return np.stack(taps, axis=2), np.stack(weights, axis=2)


def _axis(size: int, target: int) -> tuple[Array, Array, Array]:
    """Return the two neighbours of each place along an axis, and the weight of the second."""
    place = np.maximum((np.arange(target, dtype=np.float32) + 0.5) * np.float32(size / target) - 0.5, 0)
    low = place.astype(np.int64)
    return low, np.minimum(low + 1, size - 1), place - low


def _once(shape: tuple[int, ...]) -> Array:
    """Return weights [..., 4] that take the first of four rows."""
    weights = np.zeros(shape, np.float32)
    weights[..., 0] = 1
    return weights


@dataclass(frozen=True)
class ImagePatches:
    """Pixtral's layout: the patches of all images one after another, row by row; a square of them is one feature row.

    Attributes:
        patch: Height and width of a patch, in pixels.
        merge: Patches along each side of one feature row.

    Source: transformers `PixtralVisionModel.forward`, `Mistral3PatchMerger.forward`.
    """

    patch: int
    merge: int

    def inputs(self, feeds: Feeds) -> dict[str, Array]:
        """Return the encoder's inputs of `pixel_values` [images, 3, Y, X] and `image_sizes`.

        `patches` [patches, 3, P, P], their `position_ids` [patches, 2] (row and column) and `image_index` [patches];
        `merge_index` [feature_rows, merge * merge] says which patches become a feature row.
        """
        patches, places, numbers, merged, first = [], [], [], [], 0
        for number, (pixels, (height, width)) in enumerate(zip(feeds["pixel_values"], self._grids(feeds), strict=True)):
            size, m = self.patch, self.merge
            shown = pixels[:, : height * size, : width * size].reshape(-1, height, size, width, size)
            patches.append(shown.transpose(1, 3, 0, 2, 4).reshape(height * width, -1, size, size))
            places.append(np.stack(np.divmod(np.arange(height * width), width), axis=1))
            numbers.append(np.full(height * width, number))
            grid = (np.arange(height * width) + first).reshape(height, width)[: height // m * m, : width // m * m]
            merged.append(grid.reshape(height // m, m, width // m, m).transpose(0, 2, 1, 3).reshape(-1, m * m))
            first += height * width
        found = {"position_ids": places, "image_index": numbers, "merge_index": merged}
        return {
            "patches": np.concatenate(patches),
            **{name: np.concatenate(parts).astype(np.int64) for name, parts in found.items()},
        }

    def rows(self, feeds: Feeds) -> list[int]:
        """Return the feature rows of each image."""
        return [(height // self.merge) * (width // self.merge) for height, width in self._grids(feeds)]

    def _grids(self, feeds: Feeds) -> list[tuple[int, int]]:
        return [(int(height) // self.patch, int(width) // self.patch) for height, width in feeds["image_sizes"]]


@dataclass(frozen=True)
class PaddedPatches:
    """SigLIP 2's layout: the patches of each image filled up to one number; a square of them is one feature row.

    Attributes:
        merge: Patches along each side of one feature row.

    Source: transformers `Lfm2VlModel.get_image_features`.
    """

    merge: int

    def inputs(self, feeds: Feeds) -> dict[str, Array]:
        """Return the processor's arrays, and `merge_index` [feature_rows, merge * merge] into all patches in a row."""
        most, found = feeds["pixel_values"].shape[1], []
        for number, (height, width) in enumerate(feeds["spatial_shapes"]):
            m = self.merge
            grid = (np.arange(height * width) + number * most).reshape(height, width)[
                : height // m * m, : width // m * m
            ]
            found.append(grid.reshape(height // m, m, width // m, m).transpose(0, 2, 1, 3).reshape(-1, m * m))
        return {**feeds, "merge_index": np.concatenate(found).astype(np.int64)}

    def rows(self, feeds: Feeds) -> list[int]:
        """Return the feature rows of each image."""
        return [int(rows) for rows in (feeds["spatial_shapes"] // self.merge).prod(axis=1)]


@dataclass(frozen=True)
class BatchedTiles:
    """Tiles that the processor keeps apart by prompt, filled up with empty ones.

    Attributes:
        side: Feature rows along each side of a tile.
    """

    side: int

    def inputs(self, feeds: Feeds) -> dict[str, Array]:
        """Return the tiles [tiles, 3, Y, X] of `pixel_values` [prompts, tiles, 3, Y, X] that the mask shows."""
        return {"pixel_values": feeds["pixel_values"][feeds["pixel_attention_mask"].astype(bool)]}

    def rows(self, feeds: Feeds) -> list[int]:
        """Return the feature rows of each tile."""
        return [self.side**2] * int(feeds["pixel_attention_mask"].sum())


def any_resolution(settings: HostSettings) -> Host:
    """Return the layout of LLaVA-NeXT and its kin."""
    aspect = str(settings.get("aspect_ratio") or "")
    limit = int(aspect.removeprefix("anyres_max_")) if aspect.startswith("anyres_max_") else None
    pinpoints = settings["resolutions"]
    if not isinstance(pinpoints, tuple) or not isinstance(settings["tile"], int):
        raise BadInputError("malformed settings of a host function", where="manifest.modalities.image.host")
    side = int(settings["tile"] // _integer(settings, "patch") * Fraction(str(settings.get("downsample") or 1)))
    return AnyResolution([(height, width) for height, width in pinpoints], settings["tile"], side, limit)


def image_patches(settings: HostSettings) -> Host:
    """Return the layout of Pixtral and its kin."""
    return ImagePatches(_integer(settings, "patch"), _integer(settings, "merge"))


def batched_tiles(settings: HostSettings) -> Host:
    """Return the layout of processors that fill up tiles."""
    return BatchedTiles(_integer(settings, "tile") // _integer(settings, "patch") // _integer(settings, "scale"))


def _integer(settings: HostSettings, name: str) -> int:
    value = settings.get(name)
    if not isinstance(value, int):
        where = f"manifest.modalities.image.host.settings.{name}"
        raise BadInputError(
            "malformed settings of a host function", where=where, expected="an integer", got=repr(value)
        )
    return value


_HOSTS: Mapping[str, Callable[[HostSettings], Host]] = {
    "any-resolution": any_resolution,
    "batched-tiles": batched_tiles,
    "image-patches": image_patches,
    "padded-patches": lambda settings: PaddedPatches(_integer(settings, "merge")),
}


def host_of(modality: Modality) -> Host | None:
    """Return the host function that a modality needs, None where the encoder takes what the processor makes."""
    if modality.host is None:
        return None
    return _HOSTS[modality.host.name](modality.host.settings)
