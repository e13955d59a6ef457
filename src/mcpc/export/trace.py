"""Trace one component into an ONNX graph whose weights have names but no bytes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch
import transformers
from onnx_ir.passes.common import CommonSubexpressionEliminationPass
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.exporters.exporter_onnx import _ONNX_TRANSLATION_TABLE, apply_onnx_ir_fixes
from transformers.exporters.utils import apply_fx_node_fixes, apply_patches

from mcpc.core.tensors import Dimension, TensorSpec
from mcpc.errors import InternalError, UnsupportedError
from mcpc.export.components import make_wrapper
from mcpc.export.layers import Survey, one_of_each_kind, survey
from mcpc.export.skeleton import TORCH_DTYPES
from mcpc.export.wrapper import Wrapper
from mcpc.graph.dims import rename_dimensions
from mcpc.graph.hide import hidden_initializers
from mcpc.graph.segments import has_subgraphs
from mcpc.graph.stack import expand_layers
from mcpc.templates.plan import ExportPlan, PlannedComponent

OPSET = 21
_PREFIX = "model."  # the wrapper's attribute that holds the whole model
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


@dataclass(frozen=True)
class Traced:
    """A traced component.

    Attributes:
        component: What was traced.
        model: Its graph.
        relations: What the graph knows of derived dimensions, as {"feature_rows": "16*images"}.
        cloned: Layers that were cloned instead of traced.
    """

    component: PlannedComponent
    model: ir.Model
    relations: Mapping[str, str]
    cloned: int


def trace_sizes(plan: ExportPlan) -> dict[str, int]:
    """Return a small size, at least 2, for every dynamic dimension; all differ, or two would become one symbol.

    The template gives a larger one where an encoder needs it.
    """
    given = {name: sizes[0] for item in plan.template.modalities.values() for name, sizes in item.sizes.items()}
    return dict(zip(plan.template.dynamic, _PRIMES, strict=False)) | given


def output_shapes(
    model: transformers.PreTrainedModel, fake: FakeTensorMode, component: PlannedComponent, plan: ExportPlan
) -> tuple[tuple[int, ...], ...]:
    """Run a component once on tensors without bytes, of the sizes of a trace, and return the shapes of its outputs."""
    wrapper = make_wrapper(model, component, plan)
    sizes = trace_sizes(plan)
    tensors = {spec.name: _sample(spec, sizes, fake) for spec in component.inputs}
    with fake, patched():
        return tuple(tuple(int(dim) for dim in tensor.shape) for tensor in wrapper.compute(tensors))


def trace(
    model: transformers.PreTrainedModel,
    fake: FakeTensorMode,
    component: PlannedComponent,
    plan: ExportPlan,
    weight_names: Mapping[str, str],
    each_layer: bool = False,
) -> Traced:
    """Return the optimized graph of a component; weights are initializers named as in the model, without bytes.

    One layer of each kind is traced and cloned, so that time and memory do not grow with depth.

    Args:
        model: Skeleton whose parameters are FakeTensors.
        fake: The mode of those.
        component: What to trace.
        plan: The whole plan, for sizes and placeholders.
        weight_names: Parameter name -> checkpoint tensor name; such initializers are hidden from the optimizer.
        each_layer: Trace every layer, and clone none.

    Raises:
        UnsupportedError: torch cannot trace or translate the component, or it fixes a dimension that must be dynamic.
    """
    wrapper = make_wrapper(model, component, plan)
    sizes = trace_sizes(plan)
    tensors = {spec.name: _sample(spec, sizes, fake) for spec in component.inputs}
    found = Survey()
    if not each_layer:
        # Whatever goes wrong with clones, tracing each layer gives the same graph, or the error to report.
        with contextlib.suppress(Exception), fake, patched():
            found = survey(model, wrapper.compute, tensors, [spec.name for spec in component.outputs])
    try:
        return _trace(model, wrapper, tensors, component, weight_names, found)
    except Exception as error:  # torch raises many unrelated types
        if isinstance(error, UnsupportedError):
            raise
        if found.later:
            return trace(model, fake, component, plan, weight_names, each_layer=True)
        raise UnsupportedError(
            f"cannot trace component {component.name}",
            where=plan.template.id,
            got=_first_cause(error),
            hint="report the model type and the transformers version",
        ) from error


def _trace(
    model: transformers.PreTrainedModel,
    wrapper: Wrapper,
    tensors: Mapping[str, torch.Tensor],
    component: PlannedComponent,
    weight_names: Mapping[str, str],
    found: Survey,
) -> Traced:
    inputs = [spec for spec in component.inputs if spec.name not in found.aliases]
    outputs = [spec for spec in component.outputs if spec.name not in found.outputs]
    wrapper.leave_out(found.aliases, found.outputs)
    with one_of_each_kind(model, found):
        program = _export(wrapper, [tensors[spec.name] for spec in inputs], inputs, outputs)
    names = _state_names(wrapper)
    graph_model = program.model
    with hidden_initializers(graph_model, lambda name: names.get(name) in weight_names):
        program.optimize()
    apply_onnx_ir_fixes(program)
    if found.later and has_subgraphs(graph_model):
        raise RuntimeError("a node holds a subgraph")
    _rename_initializers(graph_model, names)
    _name_io(graph_model, component, inputs, outputs)
    cloned = expand_layers(graph_model)
    if cloned:  # the clones repeat what the tracer computes once, such as a mask
        CommonSubexpressionEliminationPass()(graph_model)
    _order_io(graph_model, component)
    relations = rename_dimensions(graph_model, component.inputs, component.outputs)
    return Traced(component, graph_model, relations, cloned)


def _export(
    wrapper: Wrapper, tensors: Sequence[torch.Tensor], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> torch.onnx.ONNXProgram:
    shapes = {"tensors": tuple(_dynamic_axes(spec) for spec in inputs)}
    with patched():
        exported = torch.export.export(wrapper, args=tuple(tensors), dynamic_shapes=shapes, strict=False)
        apply_fx_node_fixes("onnx", exported.graph_module)
        program = torch.onnx.export(
            exported,
            args=tuple(tensors),
            input_names=[spec.name for spec in inputs],
            output_names=[spec.name for spec in outputs],
            opset_version=OPSET,
            optimize=False,
            custom_translation_table=_ONNX_TRANSLATION_TABLE,
            dynamo=True,
            verbose=False,
        )
    if program is None:
        raise InternalError("torch.onnx.export returned nothing", where=wrapper.component.name)
    return program


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Trace without gradients, under transformers' own exporter patches."""
    with torch.no_grad(), apply_patches("onnx"), apply_patches("dynamo"):
        yield


def _first_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"


def _sample(spec: TensorSpec, sizes: Mapping[str, int], fake: FakeTensorMode) -> torch.Tensor:
    shape = spec.concrete(sizes)
    make = torch.ones if spec.name == "attention_mask" else torch.zeros
    return fake.from_tensor(make(shape, dtype=TORCH_DTYPES[spec.dtype]), static_shapes=True)


def _dynamic_axes(spec: TensorSpec) -> dict[int, object]:
    """A plain name must stay dynamic; a sum is derived from others, so torch may relate it."""
    dim = torch.export.Dim
    return {
        axis: dim.AUTO if "+" in name else dim.DYNAMIC for axis, name in enumerate(spec.shape) if isinstance(name, str)
    }


def _state_names(wrapper: Wrapper) -> dict[str, str]:
    """Return {initializer name in the trace: name in the model}."""
    tensors = [*wrapper.named_parameters(remove_duplicate=False), *wrapper.named_buffers(remove_duplicate=False)]
    return {name: name.removeprefix(_PREFIX) for name, _ in tensors}


def _rename_initializers(model: ir.Model, names: Mapping[str, str]) -> None:
    """Call weights by their name in the model, drop what is unused, and strip the wrapper from module paths."""
    graph = model.graph
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
        elif name in names:
            del graph.initializers[name]
            value.name = names[name]
            graph.register_initializer(value)
    for node in model.graph.all_nodes():
        scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes")
        if scopes:
            node.metadata_props["pkg.torch.onnx.name_scopes"] = re.sub(rf"'{re.escape(_PREFIX)}", "'", scopes).replace(
                "'model'", "''"
            )


def _name_io(
    model: ir.Model, component: PlannedComponent, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> None:
    """Check count, rank, dtype and fixed sizes of the graph's inputs and outputs against the plan."""
    for kind, values, specs in (("input", model.graph.inputs, inputs), ("output", model.graph.outputs, outputs)):
        if len(values) != len(specs):
            raise InternalError(f"the trace has {len(values)} {kind}s, the plan {len(specs)}", where=component.name)
        for value, spec in zip(values, specs, strict=True):
            value.name = spec.name
            shape: list[Dimension | None] = [dim if isinstance(dim, int) else str(dim) for dim in value.shape or ()]
            if len(shape) != len(spec.shape) or any(
                isinstance(got, int) != isinstance(want, int) or (isinstance(want, int) and got != want)
                for got, want in zip(shape, spec.shape, strict=True)
            ):
                raise UnsupportedError(
                    f"{kind} {spec.name} was traced with another shape than the template says",
                    where=component.name,
                    expected=str(list(spec.shape)),
                    got=str(shape),
                )


def _order_io(model: ir.Model, component: PlannedComponent) -> None:
    """Put inputs and outputs, those of cloned layers included, in the order of the plan."""
    for values, specs in ((model.graph.inputs, component.inputs), (model.graph.outputs, component.outputs)):
        by_name = {value.name: value for value in values}
        if set(by_name) != {spec.name for spec in specs}:
            raise InternalError("the expanded graph has other inputs or outputs than the plan", where=component.name)
        values.clear()
        values.extend(by_name[spec.name] for spec in specs)
