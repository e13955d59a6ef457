"""Packed patches and positions of three axes against transformers' own functions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel, vision_utils

from mcpc.errors import BadInputError
from mcpc.export.families.packed_vision import locate
from mcpc.inference.cache import grid_text_positions
from mcpc.inference.grid import grid_positions

IMAGE = 9
GRIDS = torch.tensor([[1, 4, 6], [3, 2, 8], [1, 8, 4], [2, 6, 2]])
PATCHES = int(GRIDS.prod(1).sum())


def together(bounds: torch.Tensor) -> torch.Tensor:
    """Return which patches lie between the same bounds."""
    number = (torch.arange(int(bounds[-1])).unsqueeze(1) >= bounds.unsqueeze(0)).sum(1)
    return number.unsqueeze(1) == number.unsqueeze(0)


@pytest.mark.parametrize("merge", [1, 2])
def test_rows_columns_and_frames_are_those_of_transformers(merge: int) -> None:
    patches = locate(PATCHES, GRIDS, merge)
    expected = vision_utils.get_vision_position_ids(GRIDS, merge, include_temporal=True)
    assert torch.equal(torch.stack([patches.frame, patches.row, patches.column], dim=1), expected)
    same_frame = patches.first.unsqueeze(1) == patches.first.unsqueeze(0)
    assert torch.equal(same_frame, together(vision_utils.get_vision_cu_seqlens(GRIDS)))


def test_windows_are_those_of_transformers() -> None:
    patches = locate(PATCHES, GRIDS, 2)
    order, bounds = vision_utils.get_vision_window_index(GRIDS, 2, window_size=28, patch_size=7)
    window = patches.first + patches.row // 4 * patches.width + patches.column // 4
    moved = window.reshape(-1, 4)[order].flatten()
    assert torch.equal(moved.unsqueeze(1) == moved.unsqueeze(0), together(bounds))


@pytest.fixture(scope="module")
def model() -> Qwen2_5_VLModel:
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "vocab_size": 20,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    return Qwen2_5_VLModel(Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE))


def test_positions_of_prompts_are_those_of_transformers(model: Qwen2_5_VLModel) -> None:
    grids = np.array([[1, 4, 6], [1, 2, 8], [1, 8, 4]], np.int64)
    ids = np.ones((2, 20), np.int64)
    ids[0, 4:10] = ids[0, 12:16] = ids[1, 1:9] = IMAGE
    mask = np.ones_like(ids)
    mask[0, :2] = 0
    places, shift = grid_positions(ids, mask, grids, IMAGE, 2)
    expected, deltas = model.get_rope_index(
        torch.tensor(ids), torch.tensor(ids == IMAGE).int(), torch.tensor(grids), attention_mask=torch.tensor(mask)
    )
    np.testing.assert_array_equal(places, expected.numpy())
    np.testing.assert_array_equal(shift, deltas.numpy())
    longer = np.concatenate([mask, np.ones((2, 3), np.int64)], axis=1)
    following = grid_text_positions(longer, 3, shift)
    np.testing.assert_array_equal(following[:, :, 0], expected.amax(dim=(0, 2)).numpy()[None].repeat(3, 0) + 1)


@pytest.mark.parametrize(
    ("grids", "reason"),
    [([[1, 4, 6]], "do not match"), ([[2, 4, 6]], "one frame"), (np.zeros((0, 3), np.int64), "more image placeholders"),
     ([[1, 4, 6], [1, 2, 2]], "more images")],
)  # fmt: skip
def test_grids_that_do_not_fit_the_prompt_are_refused(grids: list[list[int]], reason: str) -> None:
    ids = np.array([[1, *[IMAGE] * 6, 1, 1]], np.int64)
    if reason == "do not match":
        ids[0, 5] = 1
    with pytest.raises(BadInputError, match=reason):
        grid_positions(ids, np.ones_like(ids), np.array(grids, np.int64), IMAGE, 2)
