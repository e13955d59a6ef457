"""Run parts of a model on tensors without bytes, to know what they take and return before a template says it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from mcpc.config.template import Template
from mcpc.errors import McpcError, UnsupportedError
from mcpc.export.convert import COMPUTE_DTYPE, Exporter
from mcpc.export.derive.kinds import parameters
from mcpc.templates.plan import ExportPlan, make_plan

Shape = tuple[int, ...]
#: What a template must say beside its components; a probe has nothing to say there.
_REST: Mapping[str, Any] = {
    "__meta__": {"kind": "model-template", "schema_version": "1.0", "name": "probe", "version": "0.0.0"},
    "match": {"architectures": []},
}


@dataclass(frozen=True)
class Decoder:
    """A language model, as it was run.

    Attributes:
        wrapper: The wrapper that calls the part of the model that ran.
        inputs: What it takes beside the embeddings.
        hidden: Width of the embeddings.
        vocabulary: Logits of a token.
        keys: Shape [batch, heads, tokens, D] of each layer's keys; None for a layer that keeps something else.
        values: The same of its values.
    """

    wrapper: str
    inputs: tuple[str, ...]
    hidden: int
    vocabulary: int
    keys: tuple[Shape | None, ...]
    values: tuple[Shape | None, ...]


def plan_of(content: Mapping[str, Any], config: Mapping[str, Any]) -> ExportPlan:
    """Return the plan of a template that is plain data."""
    return make_plan(Template.model_validate(content), config, COMPUTE_DTYPE)


def probe(
    exporter: Exporter, kind: str, component: Mapping[str, Any], dynamic: Sequence[str], sizes: Mapping[str, int]
) -> tuple[Shape, ...] | str:
    """Run one component, whose dimensions are numbers or dynamic; return its outputs' shapes, or what went wrong.

    Args:
        exporter: The model.
        kind: Of the template.
        component: As a template writes it.
        dynamic: The dynamic dimensions that it names.
        sizes: Those that need a size of their own.
    """
    modality = {"inputs": list(component["inputs"]), "sizes": {name: [size] for name, size in sizes.items()}}
    content = {**_REST, "kind": kind, "dimensions": {"hidden": "1"}, "dynamic": list(dynamic),
               "components": {"part": component}, "modalities": {"text": modality}}  # fmt: skip
    try:
        plan = plan_of(content, exporter.config)
        return exporter.output_shapes(plan.components[0], plan)
    except Exception as error:  # noqa: BLE001 (a model says in many ways that it takes other inputs)
        return reason(error)


def reason(error: BaseException) -> str:
    """Return an error of mcpc as it is, of any other the first line of its first cause."""
    if isinstance(error, McpcError):
        return str(error)
    while error.__cause__ is not None:
        error = error.__cause__
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text[:160]}"


def run_decoder(exporter: Exporter, axes: int) -> Decoder:
    """Run the language model once on two prompts of three tokens.

    Args:
        exporter: The model.
        axes: Of its position ids: 1, or 3 for time, row and column.

    Raises:
        UnsupportedError: Neither the model nor its `language_model` runs on embeddings alone.
    """
    model: Any = exporter.model
    width = int(model.get_input_embeddings().weight.shape[1])
    said = []
    for wrapper, owner in (("causal-decoder", model), ("language-model", getattr(model, "language_model", None))):
        if owner is None:
            continue
        known = parameters(owner.forward)
        inputs = tuple(name for name in ("attention_mask", "position_ids") if name in known)
        try:
            return exporter.run(lambda: _run(owner, wrapper, inputs, width, axes))  # noqa: B023 (called at once)
        except Exception as error:  # noqa: BLE001 (as above)
            said.append(f"{wrapper}: {reason(error)}")
    raise UnsupportedError(
        "the language model does not run on embeddings alone", where=type(model).__name__, got="; ".join(said)
    )


def _run(owner: Any, wrapper: str, inputs: tuple[str, ...], width: int, axes: int) -> Decoder:
    positions = torch.arange(3).expand(2, 3)
    given = {
        "attention_mask": torch.ones((2, 3), dtype=torch.int64),
        "position_ids": positions.expand(3, 2, 3) if axes == 3 else positions,
    }
    cache = DynamicCache(config=owner.config.get_text_config(decoder=True))
    logits = owner(
        inputs_embeds=torch.zeros((2, 3, width)), cache=cache, use_cache=True, return_dict=True,
        **{name: given[name] for name in inputs},
    ).logits  # fmt: skip
    keys, values = zip(*(_shapes(layer) for layer in cache.layers), strict=True)
    return Decoder(wrapper, inputs, width, int(logits.shape[-1]), keys, values)


def _shapes(layer: Any) -> tuple[Shape | None, Shape | None]:
    plain = isinstance(layer, CacheLayerMixin) and getattr(layer, "keys", None) is not None
    if not plain or layer.keys.ndim != 4:
        return None, None
    return cast(tuple[Shape, Shape], (tuple(layer.keys.shape), tuple(layer.values.shape)))
