"""The wrappers that are traced: each turns a part of a transformers model into one graph with explicit inputs.

Every wrapper holds the whole model as `model`, so that the module path of each node is `model.` + the path in
the model, and takes its tensors by name in the order of the plan.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers import EncoderDecoderCache

from mcpc.errors import BadInputError, UnsupportedError
from mcpc.export.embedding import DeepstackEmbed, VisionEmbed
from mcpc.export.families import FAMILY_WRAPPERS
from mcpc.export.wrapper import Outputs, Wrapper, flat_cache
from mcpc.templates.plan import ExportPlan, PlannedComponent


class Features(Wrapper):
    """A tower: `get_image_features` or `get_text_features`, whose pooled output is the features."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return [items, D], or [items * rows, H] when the call says `flatten`."""
        call = self.component.call
        with _batch_stays_whole(self.model):
            method = getattr(self.model, call.method or "", None) or getattr(self.model.model, call.method or "")
            output = method(**tensors, return_dict=True)
        features = output if isinstance(output, torch.Tensor) else output.pooler_output
        features = output.last_hidden_state if features is None else features  # a tower without a projector
        if isinstance(features, (builtins.list, tuple)):
            features = torch.cat(builtins.list(features), dim=0)
        return (features.flatten(0, 1) if call.flatten and features.ndim == 3 else features,)


class MaskedFeatures(Features):
    """A tower whose method ends in `rows[mask]`, which has as many rows as the data says.

    The graph keeps every row and says which ones the mask shows; whoever puts rows between tokens drops the others.
    """

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return [items * rows, H] and the mask [items * rows]."""
        kept = _KeptRows()
        with kept:
            (features,) = super().compute(tensors)
        if len(kept.masks) != 1:
            raise UnsupportedError(
                "the method does not end in one selection of rows", where=f"components.{self.component.name}.call",
                expected="rows[mask], once", got=f"{len(kept.masks)} selections",
            )  # fmt: skip
        return features, kept.masks[0].to(torch.int64).flatten()


class _KeptRows(TorchFunctionMode):
    """Return every row where a mask [items, rows] would select some of [items, rows, H]; remember the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: builtins.list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`, or stand in for it."""
        if func is torch.Tensor.__getitem__ and _selects_rows(*args):
            self.masks.append(args[1])
            return args[0].flatten(0, 1)
        return func(*args, **(kwargs or {}))


def _selects_rows(tensor: torch.Tensor, index: Any) -> bool:
    masked = isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.ndim == 2
    return masked and tensor.ndim == 3


class CausalDecoder(Wrapper):
    """Language model with its head; prefill and decode are the same graph, past length 0 included."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return logits [batch, sequence, V], then present keys and values."""
        cache = self.cache_of(tensors, "past")
        inputs = {spec.name: tensors[spec.name] for spec in self.component.inputs if not _is_cache(spec.name)}
        # The model's own forward: a family may scale or cap its logits after the head.
        logits = self.model(**inputs, cache=cache, use_cache=True, return_dict=True).logits
        return (logits, *flat_cache(cache))


def _is_cache(name: str) -> bool:
    return name.startswith(("past.", "cross."))


class SpeechEncoder(Wrapper):
    """Audio encoder, with the cross-attention keys and values of every decoder layer: they are computed once."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return features [batch, rows, H], then cross keys and values [batch, heads, rows, D]."""
        features = self.model.get_encoder()(tensors["input_features"])[0]
        cross = []
        for layer in self.model.get_decoder().layers:
            attention = layer.encoder_attn
            for projection in (attention.k_proj, attention.v_proj):
                shape = (features.shape[0], -1, attention.num_heads, attention.head_dim)
                cross.append(projection(features).view(shape).transpose(1, 2).contiguous())
        return (features, *cross)


class SpeechDecoder(Wrapper):
    """Text decoder that reads the cross-attention cache and appends to its own."""

    def compute(self, tensors: Mapping[str, torch.Tensor]) -> Outputs:
        """Return logits [batch, sequence, V], then present keys and values."""
        own, cross = self.cache_of(tensors, "past"), self.cache_of(tensors, "cross")
        cache = EncoderDecoderCache(own, cross)
        # The cross cache is complete: attention must read it and never project the encoder's output again.
        cache.is_updated = dict.fromkeys(range(len(cross.layers)), True)
        rows = tensors["cross.0.key"]
        unread = rows.transpose(1, 2).flatten(2)  # any [batch, rows, H] tensor switches cross-attention on
        output = self.model.get_decoder()(
            input_ids=tensors["input_ids"],
            attention_mask=tensors["attention_mask"],
            position_ids=tensors["position_ids"],
            encoder_hidden_states=unread,
            cache=cache,
            use_cache=True,
        )
        return (self.model.get_output_embeddings()(output[0]), *flat_cache(own))


WRAPPERS: Mapping[str, type[Wrapper]] = {
    "features": Features,
    "masked-features": MaskedFeatures,
    "vision-embed": VisionEmbed,
    "deepstack-embed": DeepstackEmbed,
    "causal-decoder": CausalDecoder,
    "speech-encoder": SpeechEncoder,
    "speech-decoder": SpeechDecoder,
    **FAMILY_WRAPPERS,
}


def make_wrapper(model: transformers.PreTrainedModel, component: PlannedComponent, plan: ExportPlan) -> Wrapper:
    """Return the wrapper that a component's template names.

    Raises:
        BadInputError: There is no such wrapper.
    """
    found = WRAPPERS.get(component.call.wrapper)
    if found is None:
        raise BadInputError(
            "the template names an unknown wrapper",
            where=f"{plan.template.id}: components.{component.name}.call.wrapper",
            expected=", ".join(WRAPPERS),
            got=component.call.wrapper,
        )
    return found(model, component, plan)


class _TensorStaysWhole(type):
    """Metaclass of a stand-in for `list`: a tensor is returned as it is, everything else becomes a list."""

    def __call__(cls, value: Any = ()) -> Any:
        return value if isinstance(value, torch.Tensor) else builtins.list(value)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, builtins.list)

    def __getitem__(cls, item: Any) -> Any:
        return builtins.list[item]


class _WholeList(metaclass=_TensorStaysWhole):
    pass


@contextlib.contextmanager
def _batch_stays_whole(model: torch.nn.Module) -> Iterator[None]:
    """Shadow `list` in the model's modules while tracing.

    transformers ends `get_image_features` with `list(features)`; iterating a tensor fixes the batch size in the
    trace. With the shadow the batch stays one tensor and one dynamic dimension.
    """
    names = {cls.__module__ for child in (model, *model.children()) for cls in type(child).__mro__}
    modules = [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]
    shadowed = [module for module in modules if "list" not in vars(module)]
    for module in shadowed:
        module.list = _WholeList  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in shadowed:
            del module.list
