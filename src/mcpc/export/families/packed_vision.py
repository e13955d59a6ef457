"""Vision towers over packed patches: images of any size one after another, told apart by `image_grid_thw`.

transformers computes rotary positions, attention bounds and windows from the grid in Python, which a trace would fix.
Here they are formulas over the patches: two patches see each other where they lie in the same frame, or window.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, vision_utils

from mcpc.export.wrapper import Outputs, Wrapper, flat_cache
from mcpc.templates.plan import ExportPlan, PlannedComponent

#: The name that makes a tower hand its bounds to the attention instead of splitting by them in Python.
_ATTENTION = "flash_bounds_as_mask"


@dataclass(frozen=True)
class Patches:
    """Where each patch [patches] lies.

    Attributes:
        first: Number of the first patch of its frame.
        frame: Number of the frame in its image.
        row: Row in the image.
        column: Column in the image.
        height: Rows of its image.
        width: Columns of its image.
    """

    first: torch.Tensor
    frame: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    height: torch.Tensor
    width: torch.Tensor


def locate(patches: int, grid: torch.Tensor, merge: int) -> Patches:
    """Return where each patch lies; the patches that become one feature row, merge x merge, follow each other.

    Args:
        patches: How many there are.
        grid: int64 [images, 3], frames, rows and columns of patches.
        merge: Patches along each side of one feature row.
    """
    number = torch.arange(patches, device=grid.device)
    counts = grid[:, 0] * grid[:, 1] * grid[:, 2]
    ends = counts.cumsum(0)
    image = (number.unsqueeze(1) >= ends.unsqueeze(0)).to(torch.int64).sum(1)
    height, width = grid[:, 1][image], grid[:, 2][image]
    within = number - (ends - counts)[image]
    inside = within % (height * width)
    block = inside // (merge * merge)
    across = width // merge
    row = block // across * merge + inside // merge % merge
    column = block % across * merge + inside % merge
    return Patches(number - inside, within // (height * width), row, column, height, width)


class PackedImages(Wrapper):
    """The vision tower, with what it needs of the grid as formulas."""

    def __init__(self, model: transformers.PreTrainedModel, component: PlannedComponent, plan: ExportPlan) -> None:
        super().__init__(model, component, plan)
        self._forwards = {
            cls: cls.__dict__["forward"]
            for cls in {type(module) for module in self._tower.modules()}
            if cls.__name__.endswith("Attention") and "forward" in cls.__dict__
        }

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return feature rows [feature_rows, H], then the deepstack rows where the plan has them."""
        tower, pixels, grid = self._tower, tensors["pixel_values"], tensors["image_grid_thw"]
        patches = locate(pixels.shape[0], grid, self._merge)
        known: dict[str, Any] = {
            "position_ids": torch.stack([patches.row, patches.column], dim=-1),
            "cu_seqlens": _same(patches.first),
            "max_seqlen": 1,
        }
        if getattr(tower, "window_size", None) is not None:
            known |= self._windows(patches, pixels.shape[0])
        if getattr(tower, "num_grid_per_side", None) is not None:
            known |= _interpolation(tower, patches)
        with _bounds_as_mask(tower.config, self._forwards):
            output = tower(pixels, grid_thw=grid, return_dict=True, **known)
        return self._rows(output, output.pooler_output)

    def eager(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return the same by the model's own method."""
        output = self.model.model.get_image_features(**tensors, return_dict=True)
        return self._rows(output, torch.cat(list(output.pooler_output)))

    def _rows(self, output: Any, features: torch.Tensor) -> Outputs:
        if len(self.component.outputs) == 1:
            return (features,)
        levels = [rows if isinstance(rows, torch.Tensor) else torch.cat(rows) for rows in output.deepstack_features]
        return features, torch.stack(levels, dim=1)

    @property
    def _tower(self) -> Any:
        return self.model.model.visual

    @property
    def _merge(self) -> int:
        return int(self._tower.spatial_merge_size)

    def _windows(self, patches: Patches, count: int) -> dict[str, Any]:
        """Return windows in the order of the patches: attention does not depend on order, so none are moved."""
        tower = self._tower
        side = tower.window_size // tower.patch_size // self._merge * self._merge
        # In a frame of h x w patches, rows * w + columns of windows stay below h * w: the numbers are unique.
        window = patches.first + patches.row // side * patches.width + patches.column // side
        return {
            "window_index": torch.arange(count // self._merge**2, device=window.device),
            "cu_window_seqlens": _same(window),
            "max_window_seqlen": 1,
        }


class GlmImages(PackedImages):
    """GLM's tower, which finds the image of a patch, to sample its learned positions, by lengths."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return feature rows [feature_rows, H]."""
        lengths = tensors["image_grid_thw"].prod(dim=1)
        handle = self._tower.embeddings.register_forward_pre_hook(lambda _, args: (args[0], lengths, *args[2:]))
        try:
            return super().compute(tensors)
        finally:
            handle.remove()


class PaddleImages(PackedImages):
    """PaddleOCR-VL: the tower reads the patches of an image row by row, the projector joins those of a feature row."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return feature rows [feature_rows, H]. Source: PaddleOCRProjector.forward."""
        tower, projector = self._tower, self.model.model.projector
        pixels, grid = tensors["pixel_values"], tensors["image_grid_thw"]
        count, merge = pixels.shape[0], self.model.config.vision_config.spatial_merge_size
        by_row = locate(count, grid, 1)
        known = {
            "position_ids": torch.stack([by_row.row, by_row.column], dim=-1),
            "cu_seqlens": _same(by_row.first),
            "max_seqlen": 1,
            **_interpolation(tower.vision_model.embeddings, by_row),
        }
        with _bounds_as_mask(tower.config, self._forwards):
            hidden = tower(pixel_values=pixels.unsqueeze(0), grid_thw=grid, **known).last_hidden_state
        by_block = locate(count, grid, merge)
        order = by_block.first + by_block.row * by_block.width + by_block.column
        joined = projector.pre_norm(hidden[order]).reshape(count // merge**2, -1)
        return (projector.linear_2(projector.act(projector.linear_1(joined))),)


class DeepstackDecoder(Wrapper):
    """Language model whose first layers add further rows of the images."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return logits [batch, sequence, V], then present keys and values."""
        cache, language = self.cache_of(tensors, "past"), self.model.model.language_model
        inputs = {name: tensors[name] for name in ("inputs_embeds", "attention_mask", "position_ids")}
        levels = list(tensors["deepstack_embeds"].unbind(dim=2))
        # The model adds them where images are, which depends on the data; they are zero everywhere else.
        language._deepstack_process = lambda hidden, _, added: hidden + added
        try:
            hidden = language(
                **inputs, cache=cache, use_cache=True, visual_pos_masks=None, deepstack_visual_embeds=levels
            )[0]
        finally:
            del language._deepstack_process
        return (self.model.get_output_embeddings()(hidden), *flat_cache(cache))


def _interpolation(module: Any, patches: Patches) -> dict[str, Any]:
    """Return from which learned positions of a module each patch's is made, and the weights.

    Source: transformers `get_vision_interpolation_indices_and_weights`.
    """
    side = module.num_grid_per_side
    mode = getattr(module, "interpolation_mode", None) or "bilinear"
    corners = getattr(module, "interpolation_align_corners", None) is True
    taps = vision_utils._interpolation_axis_taps_weights
    rows, row_weights = taps(patches.row, patches.height, side, mode, corners, "border")
    columns, column_weights = taps(patches.column, patches.width, side, mode, corners, "border")
    return {
        "interp_indices": (rows.unsqueeze(2) * side + columns.unsqueeze(1)).flatten(1),
        "interp_weights": (row_weights.unsqueeze(2) * column_weights.unsqueeze(1)).flatten(1),
    }


def _same(group: torch.Tensor) -> torch.Tensor:
    """Return the mask [patches, patches] of patches in one group; whole numbers, for some towers subtract bounds."""
    return (group.unsqueeze(1) == group.unsqueeze(0)).to(torch.int32)


def _masked_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attend where the mask [patches, patches], given in the place of bounds, says so."""
    mask = cu_seq_lens_q.to(torch.bool)
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return output.transpose(1, 2), None


AttentionInterface.register(_ATTENTION, _masked_attention)
AttentionMaskInterface.register(_ATTENTION, lambda *_, **__: None)


@contextmanager
def _bounds_as_mask(config: Any, forwards: Mapping[type, Any]) -> Iterator[None]:
    """Let the tower of a config call `_masked_attention` for the length of the block.

    Its attention classes get their own forwards back, because transformers' exporter patches them to cut the patches
    into images of one size.
    """
    before, patched = config._attn_implementation_internal, {cls: cls.__dict__["forward"] for cls in forwards}
    config._attn_implementation_internal = _ATTENTION
    _set(forwards)
    try:
        yield
    finally:
        config._attn_implementation_internal = before
        _set(patched)


def _set(forwards: Mapping[type, Any]) -> None:
    for cls, forward in forwards.items():
        cls.forward = forward  # type: ignore[attr-defined]
