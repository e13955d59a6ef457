"""Host functions choose and order the rows of images as transformers does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llava_next.modeling_llava_next import LlavaNextModel
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

from mcpc.errors import BadInputError
from mcpc.processing.hosts import AnyResolution, BatchedTiles, ImagePatches, PaddedPatches

RESOLUTIONS = [(28, 56), (56, 28), (56, 56), (84, 28), (28, 84)]
SIDE, TILE, HIDDEN = 4, 28, 5
CONFIG = SimpleNamespace(
    vision_config=SimpleNamespace(image_size=TILE, patch_size=TILE // SIDE),
    image_grid_pinpoints=[list(size) for size in RESOLUTIONS],
)
SIZES = [(28, 28), (30, 55), (200, 90), (41, 97), (13, 90), (56, 56), (300, 17)]


@pytest.mark.parametrize("limit", [None, 1, 2, 9])
@pytest.mark.parametrize("size", SIZES)
def test_rows_of_any_resolution(size: tuple[int, int], limit: int | None) -> None:
    host = AnyResolution(RESOLUTIONS, TILE, SIDE, limit)
    down, across = host.tiles(size)
    random = torch.Generator().manual_seed(sum(size))
    features = torch.randn((1 + down * across, SIDE * SIDE, HIDDEN), generator=random)
    newline = torch.randn(HIDDEN, generator=random)
    owner: Any = SimpleNamespace(config=CONFIG)
    if limit is None:
        expected, _ = LlavaNextModel.pack_image_features(owner, [features], torch.tensor([size]), "full", newline)
    else:
        expected, _ = LlavaOnevisionModel.pack_image_features(
            owner, [features], torch.tensor([size]), newline, f"anyres_max_{limit}"
        )
    feeds: Any = {
        "pixel_values": np.zeros((1 + down * across, 3, TILE, TILE), np.float32),
        "image_sizes": np.array([size], np.int64),
    }
    inputs = host.inputs(feeds)
    rows = torch.cat([newline[None], features.flatten(0, 1)]).numpy()
    got = rows[inputs["row_index"]]
    if limit is not None:
        got = (got * inputs["row_weights"][..., None]).sum(1)
    assert host.rows(feeds) == [len(expected[0])]
    assert got.shape == expected[0].shape
    assert np.abs(got - expected[0].numpy()).max() <= 1e-6


def test_missing_tiles_are_refused() -> None:
    feeds: Any = {
        "pixel_values": np.zeros((2, 3, TILE, TILE), np.float32),
        "image_sizes": np.array([[56, 56]], np.int64),
    }
    with pytest.raises(BadInputError, match="tiles"):
        AnyResolution(RESOLUTIONS, TILE, SIDE).inputs(feeds)


def test_patches_are_those_of_a_convolution_and_squares_those_of_unfold() -> None:
    patch, merge, sizes = 3, 2, [(12, 18), (6, 24)]
    random = np.random.default_rng(0)
    pixels = random.standard_normal((2, 2, 12, 24)).astype(np.float32)
    host = ImagePatches(patch, merge)
    feeds: Any = {"pixel_values": pixels, "image_sizes": np.array(sizes, np.int64)}
    inputs = host.inputs(feeds)
    kernel = torch.randn(HIDDEN, 2, patch, patch)
    got = torch.nn.functional.conv2d(torch.from_numpy(inputs["patches"]), kernel).flatten(1)
    first, squares = 0, []
    for number, (height, width) in enumerate(sizes):
        whole = torch.nn.functional.conv2d(torch.from_numpy(pixels[number]), kernel, stride=patch)
        shown = whole[:, : height // patch, : width // patch]
        count = shown.shape[1] * shown.shape[2]
        assert (got[first : first + count] - shown.flatten(1).T).abs().max() <= 1e-5
        assert (inputs["image_index"][first : first + count] == number).all()
        squares.append(torch.nn.functional.unfold(shown[None], merge, stride=merge)[0].T)
        first += count
    merged = got[torch.from_numpy(inputs["merge_index"])].transpose(1, 2).flatten(1)
    assert merged.shape == torch.cat(squares).shape
    assert (merged - torch.cat(squares)).abs().max() <= 1e-5
    assert host.rows(feeds) == [len(rows) for rows in squares] == [6, 4]


def test_squares_of_padded_patches_are_those_of_each_image() -> None:
    shapes, most = np.array([(2, 4), (4, 2)], np.int64), 9
    feeds: Any = {"pixel_values": np.zeros((2, most, 3), np.float32), "spatial_shapes": shapes}
    host = PaddedPatches(2)
    index = host.inputs(feeds)["merge_index"]
    assert index.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [9, 10, 11, 12], [13, 14, 15, 16]]
    assert host.rows(feeds) == [2, 2]


def test_tiles_that_the_mask_hides_are_left_out() -> None:
    pixels = np.arange(2 * 3 * 1 * 2 * 2, dtype=np.float32).reshape(2, 3, 1, 2, 2)
    mask = np.array([[True, False, False], [True, True, False]])
    host = BatchedTiles(4)
    feeds = {"pixel_values": pixels, "pixel_attention_mask": mask}
    assert np.array_equal(host.inputs(feeds)["pixel_values"], np.stack([pixels[0, 0], pixels[1, 0], pixels[1, 1]]))
    assert host.rows(feeds) == [16, 16, 16]
