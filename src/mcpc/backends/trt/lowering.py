"""Precision in the graph: TensorRT networks are strongly typed, so every cast is written before the builder sees them.

Before:  MatMul(x: float32, w: float32) -> RMS norm (float32) -> MatMul(float32)
After:   MatMul(x: float16, w: float16) -> Cast(float32) -> RMS norm (float32) -> Cast(float16) -> MatMul(float16)

Graph inputs and outputs take the narrow dtype too, so that engines chain without casts and a key/value cache takes half
the bytes. Scales of packed weights take the activation's dtype, as TensorRT wants.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from mcpc.backends.trt.islands import wide_nodes
from mcpc.config.target import Precision
from mcpc.core.runner import Array
from mcpc.errors import UnsupportedError
from mcpc.graph import io
from mcpc.graph.widen import WidenedTensor, widen
from mcpc.passes.quantize.tables import DequantizeTables

_WIDE = ir.DataType.FLOAT
HALVES = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
FLOAT16_MAX = 65504.0
BFLOAT16_MAX = 3.3895313892515355e38
#: A constant of this magnitude only says "never": no weight or scale of a network that has a float16 form reaches it.
MASK_MAGNITUDE = 1e9
#: Inputs that the ONNX standard fixes to float32 whatever the dtype of the data.
_FLOAT32_INPUTS = frozenset({("Resize", 2), ("Upsample", 1)})


@dataclass(frozen=True)
class Lowered:
    """A graph in the engine's precision.

    Attributes:
        model: The graph; its weights are not yet written.
        precision: Dtype of the activations.
        casts: Casts that were added.
        wide: Names of the nodes that stay float32, the islands and those of `kept`.
        clamped: Constants whose mask values were limited to the float16 range.
        kept: What had to stay float32 because of its range, with the reason.
        padded: Packed weights that got more columns.
    """

    model: ir.Model
    precision: str
    casts: int = 0
    wide: tuple[str, ...] = ()
    clamped: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    padded: tuple[str, ...] = ()


def open_flat(path: Path) -> ir.Model:
    """Load a graph, put DequantizeLinear in front of INT8 tables, inline its functions and infer the missing types.

    Constants become initializers, so that one rule serves both.
    """
    model = io.load(path)
    DequantizeTables(None)(model)
    passes.InlinePass()(model)
    for identifier in list(model.functions):
        del model.functions[identifier]
    passes.LiftConstantsToInitializersPass(lift_all_constants=True)(model)
    passes.RemoveUnusedOpsetsPass()(model)
    if any(value.type is None for node in model.graph.all_nodes() for value in node.outputs):
        passes.ShapeInferencePass()(model)
    return model


def main_dtype(model: ir.Model) -> ir.DataType:
    """Return the float dtype of the graph's inputs and outputs; float32 when it has none."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.dtype is not None and (value.dtype in HALVES or value.dtype == _WIDE):
            return value.dtype
    return _WIDE


def lower(model: ir.Model, precision: Precision, wide_values: frozenset[str] = frozenset()) -> Lowered:
    """Rewrite a flat graph in place to the precision of the engine.

    Args:
        model: From `open_flat`.
        precision: `keep` leaves every dtype as it is.
        wide_values: Values whose producers and consumers must stay float32, because float16 cannot hold them.

    Raises:
        UnsupportedError: A graph input or output cannot be held in float16.
    """
    _fold_weight_casts(model)
    main = main_dtype(model)
    target = main if precision == "keep" else io.dtype_of(precision)
    if target == main:
        return Lowered(model, io.dtype_name(main))
    if target == _WIDE:
        widen(model)
        return Lowered(model, io.dtype_name(target))
    return _Narrowing(model, main, target, wide_values).run()


def _fold_weight_casts(model: ir.Model) -> None:
    """Replace Cast(initializer) by an initializer of the cast's dtype, made when it is read, as the builder would."""
    for node in list(model.graph.all_nodes()):
        source = node.inputs[0] if node.op_type == "Cast" and node.domain == "" else None
        if source is None or source.const_value is None or node.graph is None or not source.is_initializer():
            continue
        to = ir.DataType(node.attributes["to"].as_int())
        if source.dtype in HALVES and to == _WIDE:
            output = node.outputs[0]
            twin = ir.Value(name=f"{source.name}.{io.dtype_name(to)}", shape=source.shape, type=ir.TensorType(to))
            twin.const_value = _cast_tensor(source.const_value, to, twin.name or "", None)
            model.graph.register_initializer(twin)
            ir.convenience.replace_all_uses_with(output, twin)
            node.graph.remove(node, safe=True)
    _drop_unused(model)


def _cast_tensor(tensor: ir.TensorProtocol, to: ir.DataType, name: str, limit: float | None) -> ir.LazyTensor:
    """Return a tensor that is cast when it is read, and limited to +-`limit` when that is given."""

    def read() -> ir.TensorProtocol:
        array = tensor.numpy().astype(np.float32)
        if limit is not None:
            array = np.clip(array, -limit, limit)
        cast = ir.Tensor(array.astype(to.numpy()), name=name)
        release(tensor)
        return cast

    return ir.LazyTensor(read, dtype=to, shape=ir.Shape(int(size) for size in tensor.shape.numpy()), name=name)


def _drop_unused(model: ir.Model) -> None:
    outputs = set(model.graph.outputs)
    for graph in model.graphs():
        for name, value in list(graph.initializers.items()):
            if not value.uses() and value not in outputs:
                del graph.initializers[name]


@dataclass(frozen=True)
class _Range:
    """Largest finite magnitude of a constant that is no mask value, and whether it holds mask values."""

    largest: float
    masked: bool


def _range_of(array: Array) -> _Range:
    magnitude = np.abs(array.astype(np.float32))
    mask = magnitude >= MASK_MAGNITUDE
    return _Range(float(np.max(magnitude, where=~mask, initial=0.0)), bool(mask.any()))


class _Narrowing:
    """One graph on its way to another 16-bit dtype.

    What a 16-bit source computes in float32 was written so by its authors, and stays; a float32 source gets islands.
    """

    def __init__(self, model: ir.Model, source: ir.DataType, to: ir.DataType, wide_values: frozenset[str]) -> None:
        self._model = model
        self._from = source
        self._to = to
        self._kept = dict.fromkeys(sorted(wide_values), "its values leave the float16 range")
        self._masks: set[str] = set()
        self._clamped: set[str] = set()
        self._constants: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self._casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self._floats = self._float_values()
        self._limit = largest(to)
        self._check_constants()
        self._wide = self._touching(self._kept) | (wide_nodes(model) if source == _WIDE else set())

    def run(self) -> Lowered:
        self._refuse_wide_borders()
        order = [*self._model.graph.all_nodes()]
        for graph in self._model.graphs():
            for value in graph.inputs:
                if value in self._floats:
                    value.type = ir.TensorType(self._to)
        for node in order:
            self._retype(node)
        for node in order:
            self._connect(node)
        for graph in self._model.graphs():
            self._close(graph)
        _drop_unused(self._model)
        names = tuple(sorted(node.name or "" for node in self._wide))
        kept = tuple(f"{name}: {reason}" for name, reason in self._kept.items())
        return Lowered(
            self._model, io.dtype_name(self._to), len(self._casts), names, tuple(sorted(self._clamped)), kept
        )

    def _float_values(self) -> set[ir.Value]:
        values: Iterable[ir.Value] = (
            value
            for graph in self._model.graphs()
            for value in (
                *graph.inputs,
                *graph.initializers.values(),
                *(output for node in graph for output in node.outputs),
            )
        )
        return {value for value in values if value.dtype == self._from}

    def _check_constants(self) -> None:
        """Read every float constant once: mask values are limited, other values beyond the dtype's range stay float32.

        The lowest float32, -3.4e38, is beyond bfloat16 too: it would become -inf, and 0 * -inf is NaN.
        """
        for value in io.all_initializers(self._model):
            tensor = value.const_value
            if value not in self._floats or tensor is None:
                continue
            found = _range_of(tensor.numpy())
            release(tensor)
            if found.largest > self._limit:
                self._kept[str(value.name)] = f"it holds {found.largest:g}, beyond the {io.dtype_name(self._to)} range"
            elif found.masked:
                self._masks.add(str(value.name))

    def _touching(self, names: Iterable[str]) -> set[ir.Node]:
        """Return the producers and consumers of the named values."""
        wanted, nodes = set(names), set[ir.Node]()
        for value in self._floats:
            if value.name in wanted:
                nodes.update(use.node for use in value.uses())
                if (producer := value.producer()) is not None:
                    nodes.add(producer)
        return nodes

    def _refuse_wide_borders(self) -> None:
        border = {value.name for value in (*self._model.graph.inputs, *self._model.graph.outputs)}
        for name, reason in self._kept.items():
            if name in border:
                raise UnsupportedError(
                    "a graph input or output cannot be float16", where=name, got=reason, hint="--precision bfloat16"
                )

    def _retype(self, node: ir.Node) -> None:
        """Make a node compute in its new dtype: its dtype attributes, its fill value, its outputs."""
        to = _WIDE if node in self._wide else self._to
        for name in ("to", "dtype", "output_dtype"):
            attribute = node.attributes.get(name)
            if node.domain == "" and attribute is not None and attribute.as_int() == int(self._from):
                node.attributes[name] = ir.AttrInt64(name, int(to))
        if node.op_type == "ConstantOfShape" and node.outputs[0] in self._floats:
            fill = node.attributes.get("value")
            array = fill.as_tensor().numpy().astype(np.float32) if fill is not None else np.zeros(1, np.float32)
            limited = array if to == _WIDE else np.clip(array, -self._limit, self._limit)
            node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(limited.astype(to.numpy())))
        for value in node.outputs:
            if value in self._floats:
                value.type = ir.TensorType(to)

    def _connect(self, node: ir.Node) -> None:
        """Give every float input of a node the dtype that the node computes in."""
        for index, value in enumerate(node.inputs):
            if value is None or value not in self._floats or (node.op_type, index) in _FLOAT32_INPUTS:
                continue
            wanted = _WIDE if node in self._wide else self._to
            if value.is_initializer():
                node.replace_input_with(index, self._constant(value, wanted))
            elif value.dtype != wanted:
                node.replace_input_with(index, self._cast(value, wanted))

    def _constant(self, value: ir.Value, to: ir.DataType) -> ir.Value:
        """Return the twin of an initializer in another dtype, made once."""
        if value.dtype == to:
            return value
        key = (value, to)
        if key not in self._constants:
            assert value.const_value is not None and value.graph is not None  # noqa: S101 (an initializer has both)
            name = f"{value.name}.{io.dtype_name(to)}"
            twin = ir.Value(name=name, shape=value.shape, type=ir.TensorType(to))
            limit = self._limit if value.name in self._masks and to != _WIDE else None
            twin.const_value = _cast_tensor(value.const_value, to, name, limit)
            if limit is not None:
                self._clamped.add(str(value.name))
            value.graph.register_initializer(twin)
            self._constants[key] = twin
        return self._constants[key]

    def _cast(self, value: ir.Value, to: ir.DataType) -> ir.Value:
        """Return `value` in another dtype; one Cast per value and dtype, right after its producer."""
        key = (value, to)
        if key not in self._casts:
            name = f"{value.name}.to_{io.dtype_name(to)}"
            cast = ir.node("Cast", [value], {"to": int(to)}, name=name)
            cast.outputs[0].name, cast.outputs[0].shape, cast.outputs[0].type = name, value.shape, ir.TensorType(to)
            producer = value.producer()
            graph = producer.graph if producer is not None else value.graph
            assert graph is not None  # noqa: S101 (a value that is used belongs to a graph)
            if producer is not None:
                graph.insert_after(producer, cast)
            else:
                graph.insert_before(graph[0], cast)
            self._casts[key] = cast.outputs[0]
        return self._casts[key]

    def _close(self, graph: ir.Graph) -> None:
        """Make every float output of a graph narrow, under its own name."""
        for index, value in enumerate(list(graph.outputs)):
            if value not in self._floats or value.dtype == self._to:
                continue
            if value.is_initializer():
                graph.outputs[index] = self._constant(value, self._to)
                continue
            name = value.name
            cast = self._cast(value, self._to)
            if graph is self._model.graph:
                value.name = f"{name}.float32"
                cast.name = name
            graph.outputs[index] = cast


def largest(dtype: ir.DataType) -> float:
    """Return the largest finite number of a 16-bit float dtype."""
    return FLOAT16_MAX if dtype == ir.DataType.FLOAT16 else BFLOAT16_MAX


def release(tensor: ir.TensorProtocol) -> None:
    """Unmap a tensor that was read, so that memory does not grow with the weights."""
    source = tensor.source if isinstance(tensor, WidenedTensor) else tensor
    if isinstance(source, ir.ExternalTensor):
        source.release()
