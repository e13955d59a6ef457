"""One checkpoint's model, ready to be traced component by component."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import transformers

from mcpc.checkpoint import Checkpoint
from mcpc.checkpoint.adapters import Adapter
from mcpc.checkpoint.made import Made
from mcpc.export.adapt import adapt
from mcpc.export.calls import check_calls
from mcpc.export.keys import map_keys
from mcpc.export.skeleton import build_skeleton, config_dict, make_fake
from mcpc.export.trace import Traced, output_shapes, patched, trace
from mcpc.templates.plan import ExportPlan, PlannedComponent

#: Graphs are traced in float32 whatever the weights are stored in: a 16-bit trace rounds scalar constants (an
#: attention scale of 32 ** -0.5, say) to 16 bits, which no reference does.
COMPUTE_DTYPE = "float32"
ResultT = TypeVar("ResultT")


class Exporter:
    """Builds the model without weights and traces its components.

    Attributes:
        config: Full config of the model, defaults included.
        source: Parameter name -> checkpoint tensor name.
        ignored: Checkpoint tensors that no component needs, and why.
        notes: Where config and weights disagree, and what was done.
        checkpoint: What it was made for, with the tensors that its model makes of others.
        drifts: Of each adapter, in order; known once the merged weights were computed.
        embedding_rows: Rows of the token embedding table, None for a model without one.
        head_rows: Rows of the output head, None for a model without one.
    """

    def __init__(self, checkpoint: Checkpoint, adapters: Sequence[Adapter] = (), dtype: str = "keep") -> None:
        self._model = build_skeleton(checkpoint.root, checkpoint.architecture, COMPUTE_DTYPE)
        self.config: dict[str, Any] = config_dict(self._model.config)
        keys = map_keys(self._model, checkpoint)
        checkpoint = replace(checkpoint, made=keys.made)
        merged, self.drifts = adapt(self._model, checkpoint, keys.source, adapters, dtype)
        names = {parameter: made.name for parameter, made in merged.items()}
        self.source: Mapping[str, str] = {**keys.source, **names}
        self.checkpoint = replace(
            checkpoint, made={**keys.made, **{made.name: made for made in merged.values()}}, merged=names
        )
        self.ignored: Mapping[str, str] = {
            **dict.fromkeys(keys.ignored, "computed by the model, not read from the file"),
            **{name: f"the same bytes as {kept}, to which the config ties it" for name, kept in keys.copies.items()},
        }
        self.notes = tuple(
            f"the config ties {name}, but its tensor differs from its twin's: both are kept" for name in keys.untied
        )
        self.embedding_rows = _embedding_rows(self._model)
        self.head_rows = _head_rows(self._model)
        self._fake = make_fake(self._model)

    def check_calls(self, plan: ExportPlan) -> None:
        """Refuse a plan that calls a wrapper or a method that there is not.

        Raises:
            BadInputError: Lists every one, and what exists.
        """
        check_calls(self._model, plan)

    def take(self, made: Mapping[str, Made]) -> Checkpoint:
        """Take in tensors of initializers that a rewrite adds; return the checkpoint that makes them."""
        self.source = {**self.source, **{name: item.name for name, item in made.items()}}
        self.checkpoint = replace(
            self.checkpoint, made={**self.checkpoint.made, **{item.name: item for item in made.values()}}
        )
        return self.checkpoint

    @property
    def model(self) -> transformers.PreTrainedModel:
        """Return the model, whose parameters have shapes and no bytes."""
        return self._model

    def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Return what `work` returns; the tensors that it makes for the model have shapes and no bytes."""
        with self._fake, patched():
            return work()

    def output_shapes(self, component: PlannedComponent, plan: ExportPlan) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a component's outputs at the sizes of a trace, without tracing it."""
        return output_shapes(self._model, self._fake, component, plan)

    def trace(self, component: PlannedComponent, plan: ExportPlan, each_layer: bool = False) -> Traced:
        """Trace one component of the plan; every layer of it, or one of each kind."""
        return trace(self._model, self._fake, component, plan, self.source, each_layer)


def _embedding_rows(model: Any) -> int | None:
    """Return the rows of the table that text ids index; a dual encoder keeps it in its text tower."""
    for owner in (model, getattr(model, "text_model", None)):
        if owner is None:
            continue
        try:
            table = owner.get_input_embeddings()
        except (NotImplementedError, AttributeError):
            continue
        if isinstance(table, torch.nn.Embedding):  # a vision tower answers with its patch convolution
            return int(table.weight.shape[0])
    return None


def _head_rows(model: Any) -> int | None:
    """Return how many logits the output head computes for a token."""
    try:
        return int(model.get_output_embeddings().weight.shape[0])
    except (NotImplementedError, AttributeError):
        return None
