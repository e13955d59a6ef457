"""Token embedding with rows of another modality in place of placeholders."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mcpc.export.wrapper import Outputs, Wrapper, tensor_of


class VisionEmbed(Wrapper):
    """Token embedding with image or audio rows in place of placeholders, by the op `mcpc::VisionEmbed`.

    `pos_map` is the running number of the placeholder, or -1 for a text token. The op is symbolic: neither the
    tracer nor the optimizer looks inside.
    """

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return [batch, sequence, hidden] from ids [batch, sequence] and rows [feature_rows, hidden]."""
        ids, features = tensors["input_ids"], tensors[self._features]
        table = tensor_of(self.model.get_input_embeddings(), "weight")
        is_image = ids == self._placeholder
        number = is_image.reshape(-1).to(torch.int64).cumsum(0).reshape(is_image.shape)
        # A placeholder id that the model itself generated has no row: it is a word like any other.
        has_row = is_image & (number <= features.shape[0])
        pos_map = torch.where(has_row, number - 1, -1).to(torch.int32)
        rows = torch.onnx.ops.symbolic(
            "mcpc::VisionEmbed", (ids, table, features, pos_map), {},
            dtype=table.dtype, shape=(*ids.shape, table.shape[1]), version=1,
        )  # fmt: skip
        scale = _scale_of(self.model.get_input_embeddings())
        if scale is None:
            return (rows,)
        return (torch.where(has_row.unsqueeze(-1), rows, rows * scale),)

    def eager(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return the merge as transformers does it: masked_scatter of the rows over the placeholders."""
        ids = tensors["input_ids"]
        embeds = self.model.get_input_embeddings()(ids)
        is_image = (ids == self._placeholder).unsqueeze(-1).expand_as(embeds)
        return (embeds.masked_scatter(is_image, tensors[self._features]),)

    @property
    def _features(self) -> str:
        return next(spec.name for spec in self.component.inputs if spec.dtype.startswith("float"))

    @property
    def _placeholder(self) -> int:
        return next(iter(self.plan.placeholder_ids.values()))


class DeepstackEmbed(VisionEmbed):
    """Embedding with a second output: rows that the first decoder layers add, zero where a token is no image row."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return [batch, sequence, hidden], and [batch, sequence, levels, hidden] of [feature_rows, levels, hidden]."""
        is_image, rows = tensors["input_ids"] == self._placeholder, tensors["deepstack_features"]
        number = is_image.reshape(-1).to(torch.int64).cumsum(0).reshape(is_image.shape)
        nothing = torch.zeros((1, rows.shape[1] * rows.shape[2]), dtype=rows.dtype, device=rows.device)
        place = torch.where(is_image & (number <= rows.shape[0]), number, 0)
        added = torch.nn.functional.embedding(place, torch.cat([nothing, rows.flatten(1)]))
        return (*super().compute(tensors), added.unflatten(-1, rows.shape[1:]))

    def eager(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return the same as transformers merges it."""
        rows = tensors["deepstack_features"]
        is_image = tensors["input_ids"] == self._placeholder
        added = rows.new_zeros((*is_image.shape, *rows.shape[1:]))
        return (*super().eager(tensors), added.masked_scatter(is_image[..., None, None].expand_as(added), rows))


def _scale_of(embedding: torch.nn.Module) -> torch.Tensor | None:
    """Return what a scaled embedding (Gemma's) multiplies its rows by."""
    scale = getattr(embedding, "embed_scale", None)
    return scale if isinstance(scale, torch.Tensor) else None
